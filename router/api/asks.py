"""What a JSON body or a query says, field by field, refused in OpenAI's words and codes."""

from collections.abc import Collection, Mapping
from typing import Any

from router.core.wellformed import well_formed
from router.errors import BadRequest

KEPT_S = (3600, 2_592_000)
"""Least and most seconds a file may ask to be kept: an hour and 30 days (OpenAI's bounds)."""
_NAMES = {str: "a string", int: "an integer", dict: "an object", list: "an array", bool: "a boolean", float: "a number"}


def missing(param: str) -> BadRequest:
    """A field that must be there is not."""
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def wrong_type(param: str, wanted: str, value: object) -> BadRequest:
    """A field is of another type than `wanted`."""
    got = "null" if value is None else _NAMES.get(type(value), "another value")
    message = f"Invalid type for '{param}': expected {wanted}, but got {got} instead."
    return BadRequest(message, param=param, code="invalid_type")


def wrong_value(param: str, value: str, supported: Collection[str]) -> BadRequest:
    """A field is none of the `supported`."""
    listed = ", ".join(f"'{one}'" for one in supported)
    message = f"Invalid value: '{value[:64]}'. Supported values are: {listed}."
    return BadRequest(message, param=param, code="invalid_value")


def required(told: Mapping[str, Any], name: str, most: int = 512, *, within: str | None = None) -> str:
    """A text that must be there: 1 to `most` characters without NUL. `within` is the field whose object `told` is."""
    param = name if within is None else f"{within}.{name}"
    if told.get(name) is None:
        raise missing(param)
    return text(param, told[name], most)


def text(param: str, value: object, most: int = 512) -> str:
    """A text of 1 to `most` characters without NUL, which no database keeps."""
    if type(value) is not str:
        raise wrong_type(param, "a string", value)
    if not value:
        raise BadRequest(f"Invalid '{param}': empty string.", param=param, code="empty_string")
    if len(value) > most:
        raise too_long(param, most, len(value))
    if not well_formed(value):
        raise BadRequest(f"Invalid '{param}': NUL is not allowed.", param=param, code="invalid_value")
    return value


def too_long(param: str, most: int, length: int) -> BadRequest:
    """A text has more than `most` characters."""
    wanted = f"Expected a string with maximum length {most}, but got a string with length {length} instead."
    return BadRequest(f"Invalid '{param}': string too long. {wanted}", param=param, code="string_above_max_length")


def chosen(param: str, value: str, supported: Collection[str]) -> str:
    """One of the `supported`."""
    if value not in supported:
        raise wrong_value(param, value, supported)
    return value


def whole(param: str, value: object, least: int, most: int) -> int:
    """An integer within bounds."""
    if type(value) is not int:
        raise wrong_type(param, "an integer", value)
    if not least <= value <= most:
        side, sign, bound = ("below minimum", ">=", least) if value < least else ("above maximum", "<=", most)
        code = f"integer_{side.replace('imum', '').replace(' ', '_')}_value"
        got = str(value) if abs(value) < 10**18 else "a far greater one"
        message = f"Invalid '{param}': integer {side} value. Expected a value {sign} {bound}, but got {got} instead."
        raise BadRequest(message, param=param, code=code)
    return value


def whole_in_text(param: str, value: str, least: int, most: int) -> int:
    """An integer within bounds, written in a form or a query."""
    digits = value.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise BadRequest(f"Invalid value for '{param}': expected an integer.", param=param, code="invalid_type")
    return whole(param, int(value), least, most)


def kept_s(param: str, told: object) -> int | None:
    """Seconds from `{"anchor": "created_at", "seconds": N}`, None when it is not there."""
    if told is None:
        return None
    if type(told) is not dict:
        raise wrong_type(param, "an object", told)
    for name in ("anchor", "seconds"):
        if told.get(name) is None:
            raise missing(f"{param}.{name}")
    chosen(f"{param}.anchor", text(f"{param}.anchor", told["anchor"]), ("created_at",))
    return whole(f"{param}.seconds", told["seconds"], *KEPT_S)
