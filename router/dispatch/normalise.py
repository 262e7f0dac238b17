"""Errors of nodes and relays, put into OpenAI's shape.

What arrives: vLLM's object with an integer code, its `{"error": "Unauthorized"}`, SGLang's flat object, llama.cpp's
`exceed_context_size_error`, FastAPI's `{"detail": ...}`, Ollama's string, HTML, nothing. What leaves is always
`{"error": {"message", "type", "param", "code"}}` with `code` a string or null. Agents match on the sentence OpenAI uses
for a prompt that is too long, so that message begins with it whoever refused.
"""

import re

import msgspec

_TYPES = {
    401: "invalid_request_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    429: "rate_limit_exceeded",
    501: "unsupported_endpoint",
    503: "server_is_overloaded",
}
_SPENT = frozenset(
    (
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "project_spend_limit_exceeded",
    )
)
"""Codes of OpenAI's 429 that no wait mends."""
_TOO_LONG = re.compile(
    r"maximum context length|longer than the model's context length|exceeds the available context size"
    r"|exceeds the context (?:size|length)|exceed_context_size",
    re.IGNORECASE,
)
_CONTEXT = (
    re.compile(r"maximum context length is (\d+)"),
    re.compile(r"context length \((\d+) tokens\)"),
    re.compile(r"available context size \((\d+) tokens\)"),
)
_OPENAI_SENTENCE = "This model's maximum context length is"


class Complaint(msgspec.Struct):
    """An upstream's error, read from whatever shape it had."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    context: int | None = None

    def encode(self) -> bytes:
        """As OpenAI writes it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def complaint(status: int, raw: bytes, prompt_field: str) -> Complaint:
    """Read an error body of any shape. `prompt_field` is named as the param of a prompt that is too long."""
    found = _read(raw) or Complaint(_text(raw) or f"The node answered with status {status}.")
    if status == 400 and _is_too_long(found):
        return _too_long(found, prompt_field)
    if found.type is None or not re.fullmatch(r"[a-z]+(_[a-z]+)+|tokens|requests", found.type):
        found.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if found.code is None or found.code.lstrip("-").isdigit():
        missing_model = status == 404 and (found.param == "model" or "model" in found.message.lower())
        found.code = "model_not_found" if missing_model else _CODES.get(status)
    return found


def retry_headers(status: int, found: Complaint, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The error's headers with what SDKs go by when they decide to try again.

    A Retry-After is 1 to 60 whole seconds (openai-node 6 sleeps whatever it is told, openai-python gives up above 120);
    what another try cannot mend says `x-should-retry: false`, which every SDK obeys.
    """
    kept = [pair for pair in headers if pair[0] != b"retry-after"]
    if status in (429, 503):
        told = next((value for name, value in headers if name == b"retry-after"), b"")
        kept.append((b"retry-after", b"%d" % max(1, min(60, int(told) if told.isdigit() else 1))))
    final = status == 501 or found.type == "insufficient_quota" or found.code in _SPENT
    if final and all(name != b"x-should-retry" for name, _ in headers):
        kept.append((b"x-should-retry", b"false"))
    return kept


def status_inside(raw: bytes) -> int:
    """The status an error event carries as its code, or 500: engines put it there once 200 is out."""
    found = _read(raw)
    if found is not None and found.code is not None and found.code.isdigit() and 400 <= int(found.code) < 600:
        return int(found.code)
    return 500


def _read(raw: bytes) -> Complaint | None:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    inner = value.get("error", value)
    if isinstance(inner, str):
        return Complaint(inner)
    if not isinstance(inner, dict):
        return None
    message = inner.get("message", inner.get("detail"))
    if message is None:
        return None
    return Complaint(
        message if isinstance(message, str) else msgspec.json.encode(message).decode(),
        type=_string(inner.get("type")),
        param=_string(inner.get("param")),
        code=_string(inner.get("code")),
        context=inner["n_ctx"] if isinstance(inner.get("n_ctx"), int) else None,
    )


def _string(value: object) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _text(raw: bytes) -> str:
    text = re.sub(r"<[^>]*>", " ", raw[:2000].decode("utf-8", "replace"))
    return " ".join(text.split())[:500]


def _is_too_long(found: Complaint) -> bool:
    return found.param in ("input_tokens", "input_text") or bool(
        _TOO_LONG.search(found.message) or _TOO_LONG.search(found.type or "")
    )


def _too_long(found: Complaint, prompt_field: str) -> Complaint:
    message = found.message
    if not message.startswith(_OPENAI_SENTENCE):
        numbers = (pattern.search(message) for pattern in _CONTEXT)
        context = found.context or next((int(number.group(1)) for number in numbers if number), None)
        known = f"{context} tokens" if context is not None else "shorter than this prompt"
        message = f"{_OPENAI_SENTENCE} {known}. However, {message[:1].lower()}{message[1:]}"
    return Complaint(message, "invalid_request_error", prompt_field, "context_length_exceeded")
