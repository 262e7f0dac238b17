"""What must be right about a line of a batch.

Rules:
- What spoils a batch is what OpenAI's Batch API lists, under its codes. A value that only the endpoint would refuse
  (`max_tokens: -1`) does not: that line fails alone when it runs.
- Each field at fault is told, not only the first of a line.
- Keys nobody knows are let be: files written for other services are taken as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from router.core.body import MODEL_CHARACTERS, read_body
from router.core.call import ENDPOINTS, Endpoint
from router.core.wellformed import well_formed
from router.errors import BadRequest
from router.jobs.findings import Findings

CUSTOM_ID_CHARACTERS = 512
BATCHED = ("chat/completions", "completions", "embeddings", "responses", "messages", "score", "rerank")
"""Endpoints a batch may name, without version."""
MODELS_KEPT = 1000
_NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat/completions": (("messages",),),
    "messages": (("messages",),),
    "completions": (("prompt", "prompt_embeds"),),
    "embeddings": (("input", "messages"),),
    "responses": (("input", "prompt"),),
    "rerank": (("query",), ("documents",)),
}
"""Fields without which no engine serves a body; of each group one is enough."""
_FRAME = ("custom_id", "method", "url")
_PREFIX_BYTES = 1024
_MOST = 2**31 - 1
_UNSET = msgspec.UNSET
_ABSENT = msgspec.Raw(b"")
_NOTHING = (b"", b"null")


class _Line(msgspec.Struct):
    custom_id: Any = _UNSET
    method: Any = _UNSET
    url: Any = _UNSET
    body: msgspec.Raw = _ABSENT


class _Said(msgspec.Struct):
    """What a body says that `read_body` does not ask about, undecoded where it may be long."""

    model: Any = None
    stream: Any = None
    background: Any = None
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    query: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT


class _Message(msgspec.Struct):
    role: Any = None


class Asked(msgspec.Struct, frozen=True):
    """What a good line asks. `prefix` hashes how its prompt begins (0: nothing to share); `size` is in tokens."""

    custom_id: str
    model: str
    prefix: int
    size: int


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_said = msgspec.json.Decoder(_Said).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_message = msgspec.json.Decoder(_Message).decode


def batched(url: str) -> Endpoint | None:
    """The endpoint that a url of a batch or of a line means: `/v1/chat/completions`, `/rerank`, `/v2/rerank`."""
    path = "/rerank" if url == "/v2/rerank" else url.removeprefix("/v1")
    name = path.removeprefix("/")
    return ENDPOINTS[name] if path.startswith("/") and name in BATCHED else None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a file may hold. `models` knows the names that may be asked for; `line_bytes` bounds what is held."""

    models: Callable[[str], bool]
    several_models: bool = True
    lines: int = 50_000
    line_bytes: int = 32 * 2**20


class Checks:
    """Checks the lines of one file, whose batch has the endpoint `url`, and adds to `found` what is wrong."""

    def __init__(self, url: str, rules: Rules, found: Findings) -> None:
        endpoint = batched(url)
        assert endpoint is not None, url
        self._endpoint, self._url, self._rules, self._found = endpoint, url, rules, found
        self._known: dict[str, bool] = {}
        self._ids: dict[int, int] = {}
        self._line = 0

    @property
    def model(self) -> str | None:
        """The one model asked for, None when there are several or none."""
        return next(iter(self._known)) if len(self._known) == 1 else None

    def line(self, raw: bytes, number: int) -> Asked | None:
        """Check one line; None when something is wrong with it."""
        self._line = number
        before = self._found.count
        try:
            line = _decode_line(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._unreadable()
            return None
        self._check_frame(line)
        asked = self._check_body(line.body)
        if asked is None or self._found.count > before:
            return None
        return Asked(line.custom_id, *asked)

    def _check_frame(self, line: _Line) -> None:
        for name in _FRAME:
            value = getattr(line, name)
            if value is _UNSET or value is None:
                self._missing(name)
            elif type(value) is not str:
                self._bad("invalid_type", f"Invalid type for '{name}': expected a string.", name)
            elif name == "custom_id":
                self._check_id(value)
        if type(line.method) is str and line.method != "POST":
            self._bad("invalid_method", "Invalid method. The only method of a batch is 'POST'.", "method")
        if type(line.url) is str and batched(line.url) is not self._endpoint:
            self._bad("invalid_url", f"The url of this line is not the batch's endpoint '{self._url}'.", "url")

    def _check_id(self, custom_id: str) -> None:
        if not custom_id or len(custom_id) > CUSTOM_ID_CHARACTERS or not well_formed(custom_id):
            wanted = f"1 to {CUSTOM_ID_CHARACTERS} characters without NUL"
            self._bad("invalid_value", f"Invalid value for 'custom_id': expected {wanted}.", "custom_id")
            return
        first = self._ids.setdefault(hash(custom_id), self._line)
        if first != self._line:
            used = f"The custom_id '{custom_id[:64]}' was used before, on line {first}."
            self._bad("duplicate_custom_id", f"{used} Each must be unique in the file.", "custom_id")

    def _check_body(self, raw: msgspec.Raw) -> tuple[str, int, int] | None:
        """Model, prefix and size of a body that can be run."""
        body = bytes(raw)
        if body in _NOTHING:
            self._missing("body")
            return None
        if not body.startswith(b"{"):
            self._bad("invalid_type", "Invalid type for 'body': expected an object.", "body")
            return None
        try:
            said = _decode_said(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._unreadable()
            return None
        if not self._may_run(said):
            return None
        size = self._size(body)
        if size is None or not self._check_model(said.model):
            return None
        return said.model, _prefix(said), min(size, _MOST)

    def _may_run(self, said: _Said) -> bool:
        before = self._found.count
        if said.stream is True:
            self._bad("streaming_unsupported", "A batch cannot stream. Leave out 'stream'.", "body.stream")
        if said.background is True:
            self._bad("invalid_request", "A batch waits for its answers. Leave out 'background'.", "body.background")
        if bytes(said.previous_response_id) not in _NOTHING:
            alone = "A batch does not go on from an earlier response. Send the whole conversation as 'input'."
            self._bad("invalid_request", alone, "body.previous_response_id")
        if said.model is None:
            self._bad("invalid_request", "You must provide a model parameter.", "body.model")
        elif type(said.model) is not str or not 0 < len(said.model) <= MODEL_CHARACTERS or not well_formed(said.model):
            wanted = f"a name of 1 to {MODEL_CHARACTERS} characters"
            self._bad("invalid_request", f"Invalid value for 'model': expected {wanted}.", "body.model")
        for group in _NEEDED.get(self._endpoint.path, ()):
            if all(bytes(getattr(said, name)) in _NOTHING for name in group):
                self._bad("invalid_request", f"Missing required parameter: '{group[0]}'.", f"body.{group[0]}")
        return self._found.count == before

    def _size(self, body: bytes) -> int | None:
        """Tokens of the prompt, guessed from its bytes; None for what cannot be JSON or names two models."""
        try:
            return read_body(self._endpoint, body).guess
        except BadRequest as error:
            if error.param == "model":
                self._bad("invalid_request", error.message, "body.model")
            elif error.param is None:
                self._bad("invalid_json_line", error.message)
            else:
                return len(body) // 4
        return None

    def _check_model(self, model: str) -> bool:
        known = self._known.get(model)
        if known is None:
            if self._known and not self._rules.several_models:
                wanted = next(iter(self._known))
                self._bad("mismatched_model", f"Every line must ask for the first line's '{wanted}'.", "body.model")
                return False
            known = self._rules.models(model)
            if known or len(self._known) < MODELS_KEPT:
                self._known[model] = known
        if not known:
            message = f"The model '{model}' does not exist or you do not have access to it."
            self._bad("model_not_found", message, "body.model")
        return known

    def _unreadable(self) -> None:
        self._bad("invalid_json_line", "This line is not parseable as valid JSON.")

    def _missing(self, name: str) -> None:
        self._bad("missing_required_parameter", f"Missing required parameter: '{name}'.", name)

    def _bad(self, code: str, message: str, param: str | None = None) -> None:
        self._found.add(code, message, param, self._line)


def _prefix(said: _Said) -> int:
    """A hash of the prompt's instructions, or else of its first KiB; 0 when there is nothing to share."""
    for raw in (said.system, said.instructions):
        if raw is not _ABSENT and bytes(raw) not in _NOTHING:
            return _hash(bytes(raw))
    if said.messages is not _ABSENT:
        return _hash(_first_message(bytes(said.messages)))
    for raw in (said.prompt, said.input):
        if raw is not _ABSENT:
            return _hash(bytes(memoryview(raw)[:_PREFIX_BYTES]))
    return 0


def _first_message(messages: bytes) -> bytes:
    """A system message whole, another message's beginning."""
    try:
        listed = _decode_list(messages)
        first = bytes(listed[0]) if listed else b""
        role = _decode_message(first).role if first.startswith(b"{") else None
    except msgspec.DecodeError:
        return messages[:_PREFIX_BYTES]
    return first if role in ("system", "developer") else first[:_PREFIX_BYTES]


def _hash(opening: bytes) -> int:
    return int.from_bytes(blake2b(opening, digest_size=8).digest(), "little", signed=True) or 1
