"""What every section of the file is made of."""

from pydantic import BaseModel, model_validator
from pydantic_settings import SettingsConfigDict


class Section(BaseModel):
    """One mapping of the file."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, data: object) -> object:
        """A known key without a value is as if it were not written: its section may be all comments."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in known}
