"""One answer on its way to one client.

Rules:
- A head is sent once. Before it, a failure is a status and a JSON error; after it, in a stream, an error event and the
  protocol's end mark; after it, in anything else, a broken connection, so that half an answer never looks whole.
- A streaming caller that waits is sent a head and a comment after `heartbeat_s`, and a comment each `heartbeat_s` until
  the answer's first bytes. Only comments: every SDK skips them, and nothing else.
- Events go out one for one as they come, each counted so that a client that stops reading is seen.
- Whole bodies are collected while room is held and sent after it was given back.
"""

import asyncio
from contextlib import AbstractContextManager

import msgspec

from router.api import errors
from router.api.presence import Presence
from router.api.turn import Turn, lines
from router.core.call import Call, Outcome, Protocol
from router.dispatch.reply import Reply
from router.errors import Answer, NodeFailed, UpstreamUnavailable
from router.upstream.sse import KEEP_ALIVE, failure_events

HELD_BYTES = 8 * 2**20
"""A body of known size up to this is collected before it is sent; a longer one is passed on as it comes."""
LINGER_S, LINGER_BYTES = 2.0, 64 * 2**20
"""How long and how much is read of a body that is not wanted, so that the refusal arrives before the end."""

_STREAMED = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
_EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8\r\n"


class Answering(msgspec.Struct, eq=False):
    """Sends one answer. `id` is the request's; `protocol` says how errors look; `streams` counts open streams."""

    _turn: Turn
    _presence: Presence
    _protocol: Protocol
    id: str
    _streams: AbstractContextManager[object]
    _said: bytes = b""
    _beat: asyncio.Task[None] | None = None
    streaming: bool = False

    def expect(self, call: Call) -> None:
        """The call is about to wait: from now on a streaming caller hears a heartbeat."""
        said = self.id.encode(), call.workload.encode(), call.reason.encode()
        self._said = b"x-request-id: %b\r\nx-ebbtide-workload: %b\r\nx-ebbtide-reason: %b\r\n" % said
        if call.stream and self._protocol is not Protocol.PLAIN:
            self._presence.beat = self._heartbeat

    async def pour(self, reply: Reply) -> bytes | None:
        """Send what comes while room is held; returns a whole body that is still to be sent, or None."""
        if self._presence.beat is not None:
            await self._still()
        if reply.stream:
            await self._events(reply)
            return None
        whole = reply.whole()
        if whole is not None:
            return whole
        if self._turn.started or (reply.length is not None and reply.length <= HELD_BYTES):
            return b"".join([chunk async for chunk in reply])
        await self._opaque(reply)
        return None

    def finish(self, reply: Reply, held: bytes | None) -> None:
        """Send the rest, after room was given back and the client has `drained` what came before."""
        turn = self._turn
        if held is None:
            turn.end()
        elif turn.started:
            turn.end(self._late(reply.status, held))
        else:
            if reply.status >= 400 and self._protocol is Protocol.MESSAGES:
                held = errors.envelope(reply.status, errors.inner(held).message)
            turn.answer(reply.status, self._about(reply), held)

    async def fail(self, answer: Answer) -> None:
        """Tell the caller why there is no answer, in whatever way is still open."""
        await self._still()
        self._presence.finishing = True
        if self.streaming:
            await self._end(failure_events(self._protocol, answer.message, answer.code or "upstream_error"))
        elif self._turn.started:
            self._presence.abort()
            await asyncio.sleep(0)  # the server hears of the lost connection before we return
        else:
            await self._refuse(answer)

    async def cut(self, error: NodeFailed) -> None:
        """The node failed inside a body that cannot say so."""
        await self.fail(UpstreamUnavailable(f"The node failed inside its answer: {error}"))

    async def _refuse(self, answer: Answer) -> None:
        body = errors.body(answer, anthropic=self._protocol is Protocol.MESSAGES)
        unread = not self._presence.body_read
        if unread:
            self._turn.keep_alive = False
        self._turn.head(answer.status, [(b"x-request-id", self.id.encode()), *errors.headers(answer, len(body))])
        self._presence.headed = True
        if unread:
            self._turn.write(body)
            await self._presence.linger(LINGER_S, LINGER_BYTES)
            body = b""
        await self._end(body)

    async def _events(self, reply: Reply) -> None:
        if not self._turn.started:
            self._start(reply.status, self._about(reply) + _STREAMED, None)
            self.streaming = True
        with self._streams:
            await self._pass_on(reply)

    async def _opaque(self, reply: Reply) -> None:
        self._start(reply.status, self._about(reply), reply.length)
        await self._pass_on(reply)

    async def _pass_on(self, reply: Reply) -> None:
        """Send what comes as it comes; while the client does not take it, the node is not read."""
        turn = self._turn
        while True:
            if turn.connection.stuffed:
                await self.drained()
            if not await reply.flow(turn.write):
                return

    def _late(self, status: int, held: bytes) -> bytes:
        """A stream was promised, and what came is one JSON body: the events that say so."""
        error = errors.inner(held)
        message = error.message if status >= 400 else "The node did not stream its answer."
        return failure_events(self._protocol, message, error.code or "upstream_error")

    def _start(self, status: int, said: bytes, length: int | None) -> None:
        self._turn.begin(status, said, length)
        self._presence.headed = True

    async def _end(self, body: bytes) -> None:
        if self._turn.connection.stuffed:
            await self.drained()
        self._turn.end(body)

    async def drained(self) -> None:
        """Wait until the client has read enough; one that reads nothing ends the call."""
        self._presence.pending = Outcome.CLIENT_STALLED
        await self._turn.drain()
        self._presence.pending = None
        self._presence.moves += 1

    def _about(self, reply: Reply) -> bytes:
        told = lines(reply.headers), self._said, reply.node.encode(), reply.queued_s * 1000
        return b"%b%bx-ebbtide-node: %b\r\nx-ebbtide-queue-ms: %d\r\n" % told

    def _heartbeat(self) -> None:
        if self._beat is None or self._beat.done():
            self._beat = asyncio.get_running_loop().create_task(self._comment())

    async def _comment(self) -> None:
        if self._turn.connection.stuffed:
            await self.drained()
        if not self._turn.started:
            self._start(200, _EVENT_STREAM + self._said + _STREAMED, None)
            self.streaming = True
        self._turn.write(KEEP_ALIVE)
        self._presence.moves += 1

    async def _still(self) -> None:
        """No heartbeat from here on. One that waits for the client is dropped whole: sending writes all or nothing."""
        self._presence.beat = None
        beat, self._beat = self._beat, None
        if beat is not None and not beat.done():
            beat.cancel()
            await asyncio.wait((beat,))
            self._presence.pending = None
