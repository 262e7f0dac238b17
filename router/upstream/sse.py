"""An answer as server-sent events: whole events out, and a side look at what they say. Pure.

Rules. Bytes are split at byte level and never decoded; any chunking of a stream gives the same output and the same
attributes. An event is forwarded when its blank line is there, and as it came unless the client could not read it
(openai-python 2.0 to 3.57 and openai-node 6 and 7 were measured):
- `id:` and `retry:` fields break SDKs, `event:` lines mean nothing on chat and completion, and an event without data
  is read as broken JSON: such fields and events are dropped. Comments pass.
- CR and CRLF become LF; a BOM is dropped; the end mark is exactly `data: [DONE]`, and nothing follows it.
- on chat and completion an error event becomes `{"error":{"message","type","param","code"}}` with a string code, the
  only shape every SDK raises.
An event over the cap is passed as it comes and not looked at.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from router.core.call import Protocol, Usage
from router.upstream.meaning import Reader, Said, TokenReader, reader_for

__all__ = ["KEEP_ALIVE", "Events", "failure_events"]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client ignores."""

_BOM = b"\xef\xbb\xbf"
_DONE = b"data: [DONE]"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')


class Events(msgspec.Struct, eq=False):
    """Reads one answer's stream. `rename` is (from, to) model names.

    `drop_usage` keeps the usage-only chunk back, `drop_progress` what tells how much of the prompt has been read.

    `meaningful`: something a person would see has come. `failure`: data of an error event that came before that.
    `errored`: one came after it. `done`: the `[DONE]` mark has come. `complete`: the answer's own end has.
    `tokens`: events that bear content. `oversized`: events over `cap` bytes. `response_id` and `sequence_number`: of
    the Responses protocol only.
    """

    protocol: Protocol
    drop_usage: bool = False
    drop_progress: bool = False
    rename: tuple[bytes, bytes] | None = None
    cap: int = 8 * 2**20
    meaningful: bool = False
    errored: bool = False
    done: bool = False
    complete: bool = False
    failure: bytes | None = None
    usage: Usage | None = None
    tokens: int = 0
    oversized: int = 0
    _data_only: bool = True
    _reader: Reader = msgspec.field(default_factory=TokenReader)
    _model: "_Model | None" = None
    _parts: list[bytes] = []
    _held: int = 0
    _fresh: bool = True
    _cr: bool = False
    _passing: bool = False
    _newline: bool = False

    def __post_init__(self) -> None:
        if self.protocol not in (Protocol.CHAT, Protocol.COMPLETION):
            self._data_only, self._reader = False, reader_for(self.protocol)
        if self.rename is not None:
            self._model = _Model(*self.rename)

    @property
    def response_id(self) -> str | None:
        """The id of the response, once told."""
        return self._reader.response_id

    @property
    def sequence_number(self) -> int | None:
        """The number of the last event that had one."""
        return self._reader.sequence_number

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come; return the whole, cleaned events they complete."""
        if self._cr or b"\r" in data:
            data = self._newlines(data)
        elif self.rename is None and not (self._parts or self._passing or self.done) and self._bears_a_token(data):
            self.tokens += 1
            return data
        return self._pass(data) if self._passing else self._take(data)

    def end(self) -> None:
        """The upstream ended. A fragment is dropped, but a last `[DONE]` that lacks its blank line counts."""
        if b"".join(self._parts).strip() == _DONE:
            self.done = self.complete = True
        self._parts.clear()
        self._held = 0

    # Bytes to events

    def _take(self, data: bytes) -> bytes:
        if not self._parts and data.endswith(b"\n\n"):
            end = len(data) - 2
            if data.find(b"\n") == end or data.find(b"\n\n") == end:
                block = data[:end]
                event = self._event(block)
                if not event:
                    return b""
                return data if event is block else event + b"\n\n"
        return self._several(data)

    def _bears_a_token(self, data: bytes) -> bool:
        """Whether it is what most reads bring: one event, whole, with the next token and nothing else."""
        return data.endswith(b"\n\n") and len(data) <= self.cap and self._reader.known(data[:-2])

    def _newlines(self, data: bytes) -> bytes:
        if not data:
            return data
        if self._cr and data.startswith(b"\n"):
            data = data[1:]
        self._cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _several(self, data: bytes) -> bytes:
        parts = self._parts
        if parts:
            if b"\n\n" not in data and not (data.startswith(b"\n") and parts[-1].endswith(b"\n")):
                return self._hold(data)
            data = b"".join((*parts, data))
            parts.clear()
            self._held = 0
        if not self._data_only:
            return self._each(data)
        first, end = 0, self._run(data)
        if not end:  # what surrounds a token may be learnt from the first event
            first = data.find(b"\n\n") + 2
            if first == 1:
                return self._hold(data)
        before = self._each(data[:first]) if first else b""
        end = end or first + self._run(data[first:])
        shown = b"".join((before, data[first:end], self._each(data[end:])))
        return data if shown == data else shown

    def _run(self, data: bytes) -> int:
        """How many bytes at the beginning are events with a token each and nothing else, which pass as they came."""
        if self.rename is not None or self.done or len(data) > self.cap:
            return 0
        count, size = self._reader.run(data)
        self.tokens += count
        return size

    def _each(self, data: bytes) -> bytes:
        blocks = data.split(b"\n\n")
        rest = blocks.pop()
        events = [self._event(block) for block in blocks]
        if all(map(_same, events, blocks)):
            whole = data[: len(data) - len(rest)] if rest else data
        else:
            whole = b"".join([event + b"\n\n" for event in events if event])
        return whole + self._hold(rest) if rest else whole

    def _hold(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._parts.append(data)
        self._held += len(data)
        if self._held <= self.cap + 1:
            return b""
        # One more than the cap could be the first half of the blank line; two more cannot.
        block = b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        self._passing = True
        self._newline = block.endswith(b"\n")
        return self._swollen(block)

    def _pass(self, data: bytes) -> bytes:
        """Forward an oversized event until its blank line, then go on as before."""
        if self._newline and data.startswith(b"\n"):
            end = 1
        else:
            end = data.find(b"\n\n") + 2
            if end == 1:
                self._newline = data.endswith(b"\n") if data else self._newline
                return data
        self._passing = False
        return data[:end] + self._take(data[end:])

    # One event

    def _event(self, block: bytes) -> bytes:
        """What to forward of an event: the very same object, other bytes, or nothing."""
        if len(block) > self.cap:
            return self._swollen(block)
        if self._fresh:
            block = self._unmarked(block)
        if self.done and self._data_only:
            return b""
        if not self._data_only:
            return self._named(block)
        if not block.startswith(b"data:") or b"\n" in block:
            return self._lines(block)
        if self._reader.known(block):
            self.tokens += 1
            return block if self._model is None else self._model.renamed(block)
        event = self._judged(block, block[5:].strip(), b"")
        if not self.done:
            self._reader.learn(block)
        return event

    def _named(self, block: bytes) -> bytes:
        """The usual two lines, `event: ...` and `data: ...`, or any others."""
        end = block.find(b"\n") if block.startswith(b"event:") else -1
        if end > 0 and block.startswith(b"data:", end + 1) and block.find(b"\n", end + 1) < 0:
            payload = block[end + 6 :].strip()
            if payload:
                return self._judged(block, payload, block[6:end].strip())
        return self._lines(block)

    def _unmarked(self, block: bytes) -> bytes:
        self._fresh = False
        return block.removeprefix(_BOM)

    def _swollen(self, block: bytes) -> bytes:
        if self._fresh:
            block = self._unmarked(block)
        self.oversized += 1
        self.tokens += 1
        self.meaningful = True
        if self._model is None:
            return block
        return self._model.renamed(block[: self.cap]) + block[self.cap :]

    def _lines(self, block: bytes) -> bytes:
        """Keep the fields the protocol knows and the comments; judge by the data."""
        kept: list[bytes] = []
        kept_fields = (b"data",) if self._data_only else (b"data", b"event")
        data: list[bytes] = []
        name = b""
        lines = block.split(b"\n")
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.strip()
            if line and (not field or field in kept_fields):
                kept.append(line)
        payload = b"\n".join(data).strip()
        if not payload:
            kept = [line for line in kept if line.startswith(b":")]
        if len(kept) < len(lines):
            block = b"\n".join(kept)
        if not payload or (self._data_only and name == b"ping"):
            return b"" if payload else block
        return self._judged(block, payload, name)

    def _judged(self, block: bytes, payload: bytes, name: bytes) -> bytes:
        if payload == b"[DONE]":
            self.done = self.complete = True
            return block if block == _DONE or not self._data_only else _DONE
        if not payload:
            return b""
        said = self._reader.read(payload, name)
        self._note(said, payload)
        if said.spare and self.drop_usage:
            return b""
        if said.progress and self.drop_progress:
            if not said.shown:
                return b""
            block = _without("prompt_progress", payload)
        if said.error and self._data_only:
            return _readable(payload)
        return block if self._model is None else self._model.renamed(block)

    def _note(self, said: Said, payload: bytes) -> None:
        if said.usage is not None:
            self.usage = said.usage
        if said.ended is not None:
            self.complete = said.ended or self.done
        self.tokens += said.token
        if not said.error:
            self.meaningful = self.meaningful or said.shown
        elif self.meaningful:
            self.errored = True
        elif self.failure is None:
            self.failure = payload


class _Model:
    """Replaces the value of the first `"model"` key of an event when it is the name to be replaced.

    The events of a stream mostly begin alike, up to that value: the beginning last replaced is remembered.
    """

    __slots__ = ("_after", "_before", "_from", "_to")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._from = before.decode()
        self._to = msgspec.json.encode(after.decode())
        self._before: bytes | None = None
        self._after = b""

    def renamed(self, block: bytes) -> bytes:
        if self._before is not None and block.startswith(self._before):
            return self._after + block[len(self._before) :]
        found = _MODEL.search(block) if b'"model"' in block else None
        if found is None or not self._meant(found[1]):
            return block
        start, stop = found.span(1)
        self._before = block[: stop + 1]
        self._after = block[: start - 1] + self._to
        return self._after + block[stop + 1 :]

    def _meant(self, written: bytes) -> bool:
        try:
            return bool(msgspec.json.decode(b'"' + written + b'"') == self._from)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


def _same(event: bytes, block: bytes) -> bool:
    return event is block and block != b""


def _without(key: str, payload: bytes) -> bytes:
    """An event without that key of its data, every other value as it came; with it where a name cannot be read."""
    try:
        members = _members.decode(payload)
    except msgspec.DecodeError:
        return b"data: " + payload
    del members[key]
    return b"data: " + msgspec.json.encode(members)


def _readable(payload: bytes) -> bytes:
    """An error event in the one shape every SDK raises; the error's other keys are kept."""
    try:
        said = msgspec.json.decode(payload)
        inner = said.get("error") or said if isinstance(said, dict) else said
        fields: Mapping[str, Any] = inner if isinstance(inner, dict) else {"message": inner}
        return b"data: " + msgspec.json.encode({"error": _shaped(fields)})
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return b"data: " + msgspec.json.encode({"error": _shaped({})})


def _shaped(fields: Mapping[str, Any]) -> dict[str, Any]:
    code = fields.get("code")
    return {
        **fields,
        "message": str(fields.get("message") or "the node reported an error"),
        "type": str(fields.get("type") or "server_error"),
        "param": fields.get("param"),
        "code": None if code is None else str(code),
    }


def failure_events(
    protocol: Protocol,
    message: str,
    code: str,
    *,
    response_id: str | None = None,
    sequence_number: int | None = None,
) -> bytes:
    """The events that tell a client its answer failed midway, with the protocol's end mark.

    For Responses `response_id` is the one already sent, if any, and `sequence_number` the last one sent.
    """
    match protocol:
        case Protocol.RESPONSES:
            return _response_failure(message, code, response_id, -1 if sequence_number is None else sequence_number)
        case Protocol.MESSAGES:
            return _named("error", {"type": "error", "error": {"type": "api_error", "message": message}})
        case _:
            error = {"message": message, "type": "server_error", "param": None, "code": code}
            return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n" + _DONE + b"\n\n"


def _response_failure(message: str, code: str, response_id: str | None, last: int) -> bytes:
    error = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": last + 1}
    events = _named("error", error)
    if response_id is None:
        return events
    response = {
        "id": response_id,
        "object": "response",
        "status": "failed",
        "error": {"code": code, "message": message},
        "output": [],
    }
    kind = "response.failed"
    return events + _named(kind, {"type": kind, "sequence_number": last + 2, "response": response})


def _named(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
