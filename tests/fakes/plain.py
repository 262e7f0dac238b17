"""Answers of endpoints that do not generate text, and error bodies as each engine words them."""

import base64
import hashlib
import struct
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

DIMENSIONS = 8
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


def vector(text: str) -> list[float]:
    """A deterministic embedding whose values survive a round trip through float32."""
    digest = hashlib.sha256(text.encode()).digest()
    return [value / 256 for value in digest[:DIMENSIONS]]


def embeddings(model: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = body.get("input", "")
    many = isinstance(asked, list) and bool(asked) and not isinstance(asked[0], int)
    vectors = [vector(str(item)) for item in (asked if many else [asked])]
    coded: list[Any] = list(vectors)
    if body.get("encoding_format") == "base64":
        coded = [base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *item)).decode() for item in vectors]
    data = [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(coded)]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": 3, "total_tokens": 3}}


def rerank(model: str, body: dict[str, Any]) -> dict[str, Any]:
    results = [
        {"index": index, "document": {"text": document}, "relevance_score": 1 / (1 + index)}
        for index, document in enumerate(body.get("documents", []))
    ]
    return {"id": "rerank-1", "model": model, "usage": {"total_tokens": 7}, "results": results}


def score(model: str, body: dict[str, Any]) -> dict[str, Any]:
    pairs = body.get("text_2") or body.get("documents") or body.get("items") or [""]
    count = len(pairs) if isinstance(pairs, list) else 1
    data = [{"index": index, "object": "score", "score": 0.5} for index in range(count)]
    return {"id": "score-1", "object": "list", "model": model, "data": data, "usage": {"prompt_tokens": 5}}


def multipart_field(content_type: str, body: bytes, name: str) -> str | None:
    """The value of a form field, wherever it stands."""
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    for part in message.iter_parts():
        if part.get_param("name", header="content-disposition") == name:
            return str(part.get_content()).strip()
    return None


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    529: "overloaded_error",
}
_VLLM = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "Service Unavailable"}
_OPENAI = {429: ("rate_limit_error", "rate_limit_exceeded"), 503: ("service_unavailable_error", "server_is_overloaded")}


def error_body(shape: str, status: int, message: str, param: str | None = None) -> tuple[str, Any]:
    """(content type, body) of an error; the body is bytes or JSON. Shapes are those of `Script.shape`."""
    kind = _VLLM.get(status, "Error")
    if shape == "html":
        return "text/html", f"<html><body><h1>{status}</h1>{message}</body></html>".encode()
    if shape == "empty":
        return "text/plain", b""
    openai = _OPENAI.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    said: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    bodies: dict[str, dict[str, Any]] = {
        "vllm": {"error": said},
        "sglang": {"object": "error", **said},
        "detail": {"detail": message},
        "string": {"error": message},
        "llamacpp": {"error": {"code": status, "message": message, "type": "invalid_request_error"}},
        "anthropic": {"type": "error", "error": {"type": _ANTHROPIC.get(status, "api_error"), "message": message}},
        "openai": {"error": {**said, "type": openai[0], "code": openai[1]}},
    }
    return "application/json", bodies[shape]


def too_long(shape: str, limit: int, prompt: int) -> tuple[str, dict[str, Any]]:
    """How each engine refuses a prompt over its context, with status 400."""
    match shape:
        case "sglang":
            text = f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
            return error_body("sglang", 400, text)
        case "llamacpp":
            text = f"request ({prompt} tokens) exceeds the available context size ({limit} tokens), try increasing it"
            kind = "exceed_context_size_error"
            said = {"code": 400, "message": text, "type": kind, "n_prompt_tokens": prompt, "n_ctx": limit}
            return "application/json", {"error": said}
        case "ollama":
            return error_body("openai", 400, "the input length exceeds the context length")
    text = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {prompt} "
        "input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={prompt})"
    )
    return error_body("vllm", 400, text, "input_tokens")
