"""What one event of a stream says, protocol by protocol. Pure; the bytes are only looked at.

Strategy: a reader per protocol takes the JSON of an event and answers with a `Said`. Only the fields that routing needs
are decoded, by typed structs. JSON that cannot be read is taken for something a person would see: it is the client's to
judge.
"""

from operator import itemgetter
from typing import Any

import msgspec

from router.core.call import Protocol, Usage

__all__ = ["Reader", "Said", "reader_for"]

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: Events of the Responses protocol that come before the model has said anything.
_PRELUDE = frozenset({"response.created", "response.queued", "response.in_progress", "ping", "keepalive"})
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
#: Keys whose string is the token, as engines write them: mostly without a space, Python's `json` with one.
_TEXTS = tuple(
    b'"%b":%b"' % (key, space)
    for space in (b"", b" ")
    for key in (b"content", b"text", b"reasoning_content", b"reasoning")
)
_BACKSLASH = 0x5C
#: Bytes on either side of the end of an event by which one token is told from the next.
_SEAM = 8
#: No event begins so.
_NEVER = b"\n"
_QUIET = frozenset({"ping", "message_start", "content_block_start", "content_block_delta", "content_block_stop"})


class Said(msgspec.Struct, gc=False):
    """`shown`: a person would see it; `token`: it bears content; `spare`: it only carries usage; `progress`: it tells
    how much of the prompt has been read.

    `ended`: whether the answer's own end has been seen by now; None if the event does not bear on it.
    """

    shown: bool = False
    token: bool = False
    error: bool = False
    ended: bool | None = None
    spare: bool = False
    progress: bool = False
    usage: Usage | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    def told(self, before: Usage | None = None) -> Usage | None:
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        completion = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if prompt is None and completion is None:
            return before
        known = before or Usage(0, 0)
        return Usage(known.prompt if prompt is None else prompt, known.completion if completion is None else completion)


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None

    def said(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.function_call
            or self.refusal
            or self.audio
        )


class _Choice(msgspec.Struct):
    index: int | None = 0
    delta: _Delta | None = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    prompt_progress: Any = None


class _Response(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


class _Step(msgspec.Struct):
    type: str | None = None
    sequence_number: int | None = None
    response: _Response | None = None
    error: Any = None
    object: Any = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Piece(msgspec.Struct):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None


class _Part(msgspec.Struct):
    type: str | None = None
    message: _Message | None = None
    content_block: _Piece | None = None
    delta: _Piece | None = None
    usage: _Usage | None = None
    error: Any = None
    object: Any = None


_chunk = msgspec.json.Decoder(_Chunk)
_step = msgspec.json.Decoder(_Step)
_part = msgspec.json.Decoder(_Part)


def _failed(name: bytes, error: object, kind: object) -> bool:
    return name == b"error" or kind == "error" or (error is not None and error is not False and error != "")


def _unread(payload: bytes, name: bytes) -> Said:
    """What can be said of an event whose shape is not the protocol's."""
    try:
        loose = msgspec.json.decode(payload)
    except _UNREADABLE:
        loose = None
    if not isinstance(loose, dict):
        loose = {}
    error = _failed(name, loose.get("error"), loose.get("object")) or loose.get("type") == "error"
    return Said(shown=not error, token=not error, error=error)


class TokenReader(msgspec.Struct, eq=False):
    """Chat and text completion. The answer has ended when every choice seen has its finish_reason.

    Most events of a stream differ from the one before in one string only. What stands around that string is remembered
    from an event that was read and bore one token and nothing else; an event with the same surroundings is known
    without being read.
    """

    response_id: str | None = None
    sequence_number: int | None = None
    _seen: set[int] = set()
    _finished: set[int] = set()
    _single: bool = False
    _before: bytes = _NEVER
    _after: bytes = _NEVER

    def known(self, block: bytes) -> bool:
        """Whether a block is one event that bears a token and surely says nothing else.

        The string of the token holds neither a quote nor the end of a line, so nothing else can hide in it.
        """
        before, after = self._before, self._after
        if not (block.startswith(before) and block.endswith(after)):
            return False
        start, stop = len(before), len(block) - len(after)
        return block.find(b'"', start) == stop > start and block.find(b"\n", start, stop) < 0

    def run(self, data: bytes) -> tuple[int, int]:
        """How many events at the beginning of `data` each bear a token and surely say nothing else; their bytes.

        What stands between their tokens is the same each time, so the tokens fall out by splitting at it: at a few
        bytes of it, because each find prepares a long needle anew. What falls out is put together again to see whether
        the rest was there too.
        """
        before, between = self._before, self._after + b"\n\n"
        if before is _NEVER or not data.startswith(before):
            return 0, 0
        head, right, left = before[:_SEAM], before[_SEAM:], between[:-_SEAM]
        seam, body = between[-_SEAM:] + head, data[len(head) :]
        *whole, last = body.split(seam)
        tokens = list(map(itemgetter(slice(len(right), -len(left) or None)), whole))
        if right + (between + before).join([*tokens, b""]) != body[: len(body) - len(last)] + right:
            return 0, 0
        rest, found = head + last, b""
        if last.startswith(right):
            token, found, after = last[len(right) :].partition(between)
        if found:
            tokens.append(token)
            rest = after
        told = b"".join(tokens)
        if b'"' in told or b"\n" in told or b"" in tokens:
            return 0, 0
        return len(tokens), len(data) - len(rest)

    def learn(self, block: bytes) -> None:
        """Remember the surroundings of the token in an event just read.

        Quotes inside a JSON string are escaped, so a quoted key followed by a colon is a key.
        """
        if not self._single:
            return
        for key in _TEXTS:
            start = block.find(key) + len(key)
            stop = block.find(b'"', start)
            if start >= len(key) and stop > start and block[stop - 1] != _BACKSLASH:
                self._before, self._after = block[:start], block[stop:]
                return

    def read(self, payload: bytes, name: bytes) -> Said:
        """What an event says; `payload` is its data, `name` its event field, or empty."""
        self._single = False
        try:
            chunk = _chunk.decode(payload)
        except _UNREADABLE:
            return _unread(payload, name)
        if _failed(name, chunk.error, chunk.object):
            return Said(error=True)
        usage = None if chunk.usage is None else chunk.usage.told()
        if not chunk.choices:
            return Said(spare=usage is not None and chunk.choices is not None, usage=usage)
        token = finish = False
        for choice in chunk.choices:
            index = choice.index or 0
            self._seen.add(index)
            if choice.finish_reason is not None:
                self._finished.add(index)
                finish = True
            token = token or bool(choice.text) or (choice.delta is not None and choice.delta.said())
        progress = chunk.prompt_progress is not None
        self._single = token and not (finish or progress) and usage is None and len(chunk.choices) == 1
        ended = self._finished == self._seen
        return Said(shown=token or finish, token=token, ended=ended, progress=progress, usage=usage)


class ResponsesReader:
    """The Responses protocol. Remembers the response's id and the last sequence number."""

    __slots__ = ("response_id", "sequence_number")

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.sequence_number: int | None = None

    def known(self, block: bytes) -> bool:
        return False

    def run(self, data: bytes) -> tuple[int, int]:
        return 0, 0

    def learn(self, block: bytes) -> None:
        pass

    def read(self, payload: bytes, name: bytes) -> Said:
        try:
            step = _step.decode(payload)
        except _UNREADABLE:
            return _unread(payload, name)
        kind = step.type or name.decode("utf-8", "replace")
        if step.sequence_number is not None:
            self.sequence_number = step.sequence_number
        usage = None
        if step.response is not None:
            self.response_id = self.response_id or step.response.id
            usage = None if step.response.usage is None else step.response.usage.told()
        ended = True if kind in _ENDS else None
        if kind in ("error", "response.failed") or _failed(name, step.error, step.object):
            return Said(error=True, ended=ended, usage=usage)
        return Said(shown=kind not in _PRELUDE, token=kind.endswith(".delta"), ended=ended, usage=usage)


class MessagesReader:
    """Anthropic's Messages. Input tokens come with the start, output tokens with the deltas."""

    __slots__ = ("_usage",)

    response_id: str | None = None
    sequence_number: int | None = None

    def __init__(self) -> None:
        self._usage: Usage | None = None

    def known(self, block: bytes) -> bool:
        return False

    def run(self, data: bytes) -> tuple[int, int]:
        return 0, 0

    def learn(self, block: bytes) -> None:
        pass

    def read(self, payload: bytes, name: bytes) -> Said:
        try:
            part = _part.decode(payload)
        except _UNREADABLE:
            return _unread(payload, name)
        kind = part.type or name.decode("utf-8", "replace")
        if kind == "error" or _failed(name, part.error, part.object):
            return Said(error=True)
        counted = part.message.usage if part.message is not None else part.usage
        usage = None
        if counted is not None:
            usage = self._usage = counted.told(self._usage)
        token = _bears(kind, part)
        ended = True if kind == "message_stop" else None
        return Said(shown=token or kind not in _QUIET, token=token, ended=ended, usage=usage)


def _bears(kind: str, part: _Part) -> bool:
    """Whether a block or delta has content: non-empty text, or something that is not text."""
    if kind == "content_block_delta":
        piece = part.delta
    elif kind == "content_block_start":
        piece = part.content_block
    else:
        return False
    if piece is None:
        return False
    if piece.text or piece.thinking or piece.partial_json:
        return True
    return piece.text is None and piece.thinking is None and piece.partial_json is None


class PlainReader:
    """Any other stream: every event is the client's; only a top-level error is told apart."""

    __slots__ = ()

    response_id: str | None = None
    sequence_number: int | None = None

    def known(self, block: bytes) -> bool:
        return False

    def run(self, data: bytes) -> tuple[int, int]:
        return 0, 0

    def learn(self, block: bytes) -> None:
        pass

    def read(self, payload: bytes, name: bytes) -> Said:
        try:
            step = _step.decode(payload)
        except _UNREADABLE:
            return _unread(payload, name)
        error = step.type == "error" or _failed(name, step.error, step.object)
        return Said(shown=not error, token=not error, error=error)


Reader = TokenReader | ResponsesReader | MessagesReader | PlainReader


def reader_for(protocol: Protocol) -> Reader:
    """A fresh reader for one answer."""
    match protocol:
        case Protocol.CHAT | Protocol.COMPLETION:
            return TokenReader()
        case Protocol.RESPONSES:
            return ResponsesReader()
        case Protocol.MESSAGES:
            return MessagesReader()
        case _:
            return PlainReader()
