"""What an operator may say of traces."""

import re

from pydantic import Field, field_validator

from router.settings.section import Section
from router.settings.values import Ratio, Secret, Url


class Otel(Section):
    """Spans of calls for an OpenTelemetry collector, by OTLP over HTTP. Never prompts, answers or keys."""

    endpoint: Url | None = None
    """Where the collector listens, such as http://127.0.0.1:4318. Empty makes no spans. Needs the extra `otel`."""
    headers: dict[str, Secret] = Field(default_factory=dict, max_length=20)
    """Headers sent along, such as a key of the collector's."""
    sample: Ratio = 1
    """Share of calls that are traced when their `traceparent` does not say: one that comes sampled always is."""

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, Secret]) -> dict[str, Secret]:
        for name in headers:
            if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
                raise ValueError("must be named by letters, digits and dashes")
        return headers
