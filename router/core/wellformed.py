"""Refuses JSON that engines could read differently from us, or choke on.

msgspec rejects NaN, Infinity, control characters, lone surrogates in escapes and deep nesting while it skips what we do
not read. It does not look at UTF-8, at duplicate keys or at the length of numbers in skipped values; those are checked
here, each behind a test so cheap that an ordinary body pays about a microsecond for all of them.
"""

import codecs
import re
from itertools import islice

import msgspec

from router.core.content import is_flood
from router.errors import BadRequest

__all__ = ["ROUTING_KEYS", "check_form", "mended", "not_json", "well_formed"]

#: Keys that decide where a call goes and what room it takes; another reader must see the same value.
ROUTING_KEYS = ("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens")

# The quote that opens a key follows no letter, so no match can end with it and hide the key from the next one.
_QUOTED = re.compile(f'"(?:{"|".join(ROUTING_KEYS)})"'.encode())
_HIDDEN = (b"\\u005", b"\\u006", b"\\u007")  # the only escapes that can spell a lower-case letter or an underscore
_SLICE = 2**20
_DIGITS = 4300  # where Python, and so most engines, stops converting an integer


class _Key:
    """A key that equals no other, so that a decoded dict keeps duplicates."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def _keep_key(_type: type, name: str) -> _Key:
    return _Key(name)


_top_level = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_keep_key)


def well_formed(text: str) -> bool:
    """Whether text can be kept and sent anywhere: no NUL, which databases refuse, no half of a surrogate pair."""
    if "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def mended(text: str) -> str:
    """The text without what is not well formed, for words of ours that may quote a stranger's."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def not_json(why: str) -> BadRequest:
    """The answer to a body that is not JSON; `why` must not quote the body."""
    return BadRequest(f"We could not parse the JSON body of your request: {why}. Send one JSON object in UTF-8.")


def check_form(raw: bytes) -> None:
    """Raise BadRequest for invalid UTF-8, duplicate routing keys or an integer longer than 4300 digits.

    `raw` has been decoded once already, so it is JSON but for its encoding.
    """
    if not raw.isascii():
        _check_utf8(raw)
    if len(raw) <= _SLICE:
        keys = _QUOTED.findall(raw)
    else:  # one more than there are keys is one twice
        keys = [found[0] for found in islice(_QUOTED.finditer(raw), len(ROUTING_KEYS) + 1)]
    if len(keys) > len(set(keys)) or (b"\\" in raw and _may_hide_keys(raw)):
        _check_duplicates(raw)
    if len(raw) > _DIGITS:
        _check_numbers(raw)


def _check_utf8(raw: bytes) -> None:
    try:
        if len(raw) <= _SLICE:
            raw.decode()
            return
        view, at = memoryview(raw), 0
        while at < len(raw):
            at += codecs.utf_8_decode(view[at : at + _SLICE], "strict", at + _SLICE >= len(raw))[1]
    except UnicodeDecodeError:
        raise not_json("it is not valid UTF-8") from None


def _may_hide_keys(raw: bytes) -> bool:
    return b"\\u00" in raw and any(escape in raw for escape in _HIDDEN)


def _check_duplicates(raw: bytes) -> None:
    names = [key.name for key in _top_level.decode(raw)]
    for key in ROUTING_KEYS:
        if names.count(key) > 1:
            raise BadRequest(
                f"Duplicate parameter: '{key}' is given more than once. Give it once.", param=key, code="invalid_value"
            )


def _check_numbers(raw: bytes) -> None:
    """A run of 4301 digits covers a position of every stride of 4301 bytes, and half a run on one side of it."""
    half = _DIGITS // 2
    for index, byte in enumerate(raw[:: _DIGITS + 1]):
        if 0x30 <= byte <= 0x39:
            at = index * (_DIGITS + 1)
            if raw[max(0, at - half) : at + 1].isdigit() or raw[at : at + half + 1].isdigit():
                _check_outside_strings(raw)
                return


def _check_outside_strings(raw: bytes) -> None:
    """Decode everything: digits inside a string pass, an integer out of range does not."""
    try:
        if not is_flood(raw):
            msgspec.json.decode(raw)
            return
    except msgspec.ValidationError:
        pass
    raise BadRequest(f"The body holds a number of more than {_DIGITS} digits. Shorten it.", code="invalid_value")
