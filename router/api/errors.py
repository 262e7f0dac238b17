"""How an `Answer` is told: OpenAI's object, or Anthropic's envelope on its paths.

`code` is a string or null, never a number. What may be tried again carries a Retry-After of 1 to 60 whole seconds,
which every SDK obeys; what must not, `x-should-retry: false`.
"""

import msgspec

from router.errors import Answer

Headers = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
_TRY_AGAIN = (429, 503)
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Inner(msgspec.Struct):
    """What stands under `error`, as far as it is told on."""

    message: str = ""
    code: str | None = None


class _Outer(msgspec.Struct):
    error: Inner


_outer = msgspec.json.Decoder(_Outer)


def inner(raw: bytes) -> Inner:
    """The error in a body of OpenAI's shape."""
    try:
        return _outer.decode(raw).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Inner("The node answered with an error.")


def body(answer: Answer, *, anthropic: bool) -> bytes:
    """The JSON a caller is told."""
    if anthropic:
        return envelope(answer.status, answer.message)
    told = {"message": answer.message, "type": answer.type, "param": answer.param, "code": answer.code}
    return msgspec.json.encode({"error": told})


def envelope(status: int, message: str) -> bytes:
    """Anthropic's form: the type follows from the status."""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def headers(answer: Answer, length: int) -> Headers:
    """Header lines that go with it; `length` is the body's."""
    lines: Headers = [_JSON, (b"content-length", b"%d" % length)]
    wait_s = answer.retry_after_s
    if wait_s is None and answer.status in _TRY_AGAIN:
        wait_s = 1
    if wait_s is not None:
        lines.append((b"retry-after", b"%d" % wait_s))
    again = False if answer.retry is None and answer.status == 501 else answer.retry
    if again is not None:
        lines.append((b"x-should-retry", b"true" if again else b"false"))
    if answer.status == 401:
        lines.append((b"www-authenticate", b"Bearer"))
    return lines
