"""An open answer: status, headers, and bytes to come.

Rules:
- The head is held until the first meaningful event of a stream, or the whole of a JSON answer, is here: until then
  another node may be tried, afterwards never, and two answers are never spliced.
- Bytes pass as they came, in whole events; a side copy is parsed for the first token, usage, errors and the end.
- An upstream that dies after the head was let go ends the answer with an error event and its protocol's end mark.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from router.core.call import Protocol, Usage
from router.dispatch.normalise import status_inside
from router.dispatch.trip import Trip
from router.dispatch.unpack import Unpacked
from router.errors import ErrorInStream, FirstByteTimeout, NodeFailed, TakenBack, Truncated
from router.upstream.pool import Exchange
from router.upstream.sse import Events, failure_events

JSON_HELD_BYTES = 8 * 2**20
"""A JSON answer up to this size is read whole before its head is let go; a longer one is passed on as it comes."""
LAST_CHUNK_S = 0.05
"""How long the end of the body may come after the answer's own end mark, so that the connection can be kept."""

_KEPT_HERE = frozenset(
    (
        b"cache-control",
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",
        b"server",
        b"set-cookie",
        b"content-length",
        b"x-accel-buffering",
        b"x-ebbtide-node",
        b"x-ebbtide-queue-ms",
        b"x-ebbtide-reason",
        b"x-ebbtide-workload",
        b"x-request-id",
    )
)
"""Headers of the connection, and those the router says itself."""

_MARKLESS = (Protocol.RESPONSES, Protocol.MESSAGES)
"""Protocols whose last event is their end; the others send `[DONE]` after it."""


class _Counted(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Counted | None = None
    id: str | None = None


_body = msgspec.json.Decoder(_Body)


class Reply(msgspec.Struct, eq=False):
    """What the caller gets. Iterate it once for its bytes.

    `status` and `headers` are ready to send (without those of the connection, and the router's own); `length` is the
    body's size when it is known; `node` the name of the node, or `relay`; `queued_s` how many seconds the call waited
    for room; `stream` whether the bytes are server-sent events.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    trip: Trip
    node: str
    queued_s: float
    stream: bool = False
    length: int | None = None
    response_id: str | None = None
    _held: bytes = b""
    _upstream: Exchange | Unpacked | None = None
    _events: Events | None = None

    def __aiter__(self) -> "Reply":
        return self

    async def __anext__(self) -> bytes:
        came: list[bytes] = []

        def keep(data: bytes) -> bool:
            came.append(data)
            return False

        while not came and await self.flow(keep):
            pass
        if not came:
            raise StopAsyncIteration
        return came[0]

    def whole(self) -> bytes | None:
        """The body, if all of it is here; else None."""
        if self._upstream is not None:
            return None
        held, self._held = self._held, b""
        return held

    async def flow(self, write: Callable[[bytes], bool]) -> bool:
        """Give `write`, which must not raise, the answer's bytes as they come, until it returns False: once more, then.

        Returns whether there may be more: call it again when `write` can take some. Nothing wakes up for what comes in
        between; it passes from the node's callback to `write`.
        """
        if self._held:
            held, self._held = self._held, b""
            if not write(held):
                return True
        if self._upstream is None:
            return False
        if self._events is None:
            return await self._flow_bytes(self._upstream, write)
        return await self._flow_events(self._upstream, self._events, write)

    @classmethod
    def error(cls, status: int, headers: list[tuple[bytes, bytes]], body: bytes, trip: Trip) -> "Reply":
        """An upstream's own refusal of the call, its body already in OpenAI's shape."""
        kept = [pair for pair in clean(headers) if pair[0] not in (b"content-type", b"content-encoding")]
        reply = cls(status, [*kept, (b"content-type", b"application/json")], trip, trip.place, trip.queued_s)
        reply._held, reply.length = body, len(body)
        return reply

    def hold(
        self, upstream: Exchange, rename: tuple[bytes, bytes] | None, within_s: float
    ) -> Coroutine[Any, Any, None] | None:
        """Take in a 2xx answer as far as it must be held: None if that is here, else what to await.

        Awaiting raises NodeFailed when the node fails before that point: IdleTimeout when it is silent for `within_s`,
        FirstByteTimeout when a stream that is not has no token within it. So does a coding nobody knows.
        """
        told = dict(self.headers)
        kind, coding = told.get(b"content-type", b"").lower(), told.get(b"content-encoding", b"")
        coded = coding != b"" and coding.lower() != b"identity"
        if kind.startswith(b"application/json"):
            rename = None if coded else rename
            whole = upstream.whole()
            if whole is None:
                return self._some_json(upstream, rename, within_s)
            self._hold_json(whole, rename)
            return None
        if kind.startswith(b"text/event-stream"):
            self.stream = True
            if coded:
                self.headers = [pair for pair in self.headers if pair[0] != b"content-encoding"]
            return self._hold_events(Unpacked(upstream, coding) if coded else upstream, rename, within_s)
        return self._hold_bytes(upstream, within_s)

    async def _hold_bytes(self, upstream: Exchange, within_s: float) -> None:
        self._held = await upstream.read(within_s)
        self._upstream = upstream
        self.trip.first_token()

    async def _hold_events(
        self, upstream: Exchange | Unpacked, rename: tuple[bytes, bytes] | None, within_s: float
    ) -> None:
        trip = self.trip
        protocol = trip.call.endpoint.protocol
        events = trip.events = Events(
            protocol, drop_usage=trip.asks_usage, drop_progress=trip.asks_progress, rename=rename
        )
        held = [await _event(upstream, events, within_s)]
        if not events.meaningful:
            # Comments and roles keep the connection alive for ever; they do not make an answer.
            try:
                async with asyncio.timeout(within_s):
                    while not events.meaningful:
                        held.append(await _event(upstream, events, within_s))
            except TimeoutError:
                raise FirstByteTimeout("The stream began and no token came within the bound.") from None
        trip.first_token()
        self.response_id = events.response_id
        self._held = b"".join(held)
        self._upstream, self._events = upstream, events

    def _hold_json(self, whole: bytes, rename: tuple[bytes, bytes] | None) -> None:
        """Take in a JSON answer that is here."""
        trip = self.trip
        trip.first_token()
        if rename is not None:
            whole = rename_model(whole, *rename)
        self._held, self.length = whole, len(whole)
        try:
            found = _body.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        self.response_id = found.id
        counted = found.usage
        if counted is not None:
            prompt, completion = counted.prompt_tokens, counted.completion_tokens
            trip.usage = Usage(prompt or counted.input_tokens, completion or counted.output_tokens)

    async def _some_json(self, upstream: Exchange, rename: tuple[bytes, bytes] | None, within_s: float) -> None:
        """Take in the body, or as much as is held of a long one: that is passed on as it is."""
        parts, size = [], 0
        while data := await upstream.read(within_s):
            parts.append(data)
            size += len(data)
            if size > JSON_HELD_BYTES:
                self.trip.first_token()
                self._held, self.length, self._upstream = b"".join(parts), upstream.length, upstream
                return
        self._hold_json(b"".join(parts), rename)

    async def _flow_bytes(self, upstream: Exchange | Unpacked, write: Callable[[bytes], bool]) -> bool:
        """More of a body we do not read. It cannot say it failed, so a failure breaks the connection to the caller."""
        try:
            more = await upstream.flow(write)
        except TakenBack:
            raise
        except NodeFailed as error:
            self.trip.cut(error)
            raise
        if not more:
            self._upstream = None
            self.trip.ended()
        return more

    async def _flow_events(self, upstream: Exchange | Unpacked, events: Events, write: Callable[[bytes], bool]) -> bool:
        clock, node = self.trip.clock, self.trip.node
        markless = self.trip.call.endpoint.protocol in _MARKLESS

        def take(data: bytes) -> bool:
            if node is not None:
                node.heard_at = clock()  # whoever sends is alive
            shown = events.feed(data)
            return (not shown or write(shown)) and not (events.done or (markless and events.complete))

        try:
            if not self._ended(events) and await upstream.flow(take) and not self._ended(events):
                return True
            await self._close_stream(upstream, events)
        except TakenBack:
            self._upstream = None
            raise
        except NodeFailed as error:
            self._upstream = None
            if events.complete:
                self.trip.ended()
            else:
                self.trip.cut(error)
                write(self._last_words(events, str(error)))
        return False

    async def _close_stream(self, upstream: Exchange | Unpacked, events: Events) -> None:
        if self._ended(events):
            await upstream.drain(LAST_CHUNK_S)
        events.end()
        if not events.complete and not events.errored:
            raise Truncated("The stream ended before the answer did.")
        self._upstream = None
        self.trip.ended(errored=events.errored)

    def _ended(self, events: Events) -> bool:
        """Whether nothing may follow: the end mark was seen, or the last event where there is none."""
        return events.done or (events.complete and self.trip.call.endpoint.protocol in _MARKLESS)

    def _last_words(self, events: Events, message: str) -> bytes:
        protocol = self.trip.call.endpoint.protocol
        sequence = events.sequence_number
        return failure_events(
            protocol, message, "upstream_error", response_id=events.response_id, sequence_number=sequence
        )


async def _event(upstream: Exchange | Unpacked, events: Events, within_s: float) -> bytes:
    """The next bytes to show. Raises ErrorInStream, or Truncated when the stream ends before it said anything."""
    data = await upstream.read(within_s)
    shown = events.feed(data) if data else b""
    if not data:
        events.end()
    if events.failure is not None:
        failure = events.failure
        raise ErrorInStream("The node reported an error in its stream.", failure, status_inside(failure))
    if not data and not events.complete:
        raise Truncated("The stream ended before it said anything.")
    events.meaningful = events.meaningful or not data
    return shown


def clean(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that may go to the caller: none of the connection's own, nor those it names, nor ours."""
    kept, names = [], False
    for pair in headers:
        if pair[0] not in _KEPT_HERE:
            kept.append(pair)
        elif pair[0] == b"connection":
            names = True
    if names:
        named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
        return [pair for pair in kept if pair[0] not in named]
    return kept


def rename_model(raw: bytes, found: bytes, shown: bytes) -> bytes:
    """The same JSON with the first `"model"` value `found` shown as `shown`."""
    for spaced in (b'"model":', b'"model": '):
        old = spaced + b'"' + found + b'"'
        if old in raw:
            return raw.replace(old, spaced + b'"' + shown + b'"', 1)
    return raw
