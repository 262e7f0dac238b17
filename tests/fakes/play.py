"""Plays one script over one connection: paces the answer and misbehaves exactly where told.

Rules: everything is written through the wire, so a peer that stops reading blocks the play and a peer that leaves
cancels it; a cut marks the request as cut *before* it is made; an answer that was written to its end is completed,
whatever the peer did with it.
"""

import asyncio
import gzip
import zlib
from typing import Any

from tests.fakes.dialects import SHAPES
from tests.fakes.plain import REASONS, error_body
from tests.fakes.script import Headers, Script
from tests.fakes.seen import CUT, Seen
from tests.fakes.streams import Answer, compact, data_event
from tests.fakes.wire import Wire

FLOOD_PIECE = 65536


class Finished(Exception):
    """The play closed its connection itself."""


def head(status: int, headers: Headers) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Play:
    """One request's answer."""

    def __init__(self, wire: Wire, seen: Seen, script: Script, dialect: str) -> None:
        self.wire = wire
        self.seen = seen
        self.script = script
        self.dialect = dialect
        self._zip = zlib.compressobj(wbits=31) if script.gzip else None
        self._head_sent = False

    # whole answers

    async def page(self, status: int, content_type: str, body: Any, headers: Headers = ()) -> None:
        """One unstreamed answer with a Content-Length."""
        raw = body if isinstance(body, bytes) else compact(body)
        if self.script.gzip and raw:
            raw, headers = gzip.compress(raw), (*headers, ("content-encoding", "gzip"))
        length = (("content-length", str(len(raw))), ("content-type", self.script.content_type or content_type))
        await self.wire.send(head(status, (*length, *headers, *self._extra())) + raw[: self._share(raw)])
        await self._end_whole(raw)

    def _extra(self) -> Headers:
        closing: Headers = (("connection", "close"),) if self.script.close else ()
        return (*self.script.headers, *closing)

    def _share(self, raw: bytes) -> int:
        broken = self.script.cut is not None or self.script.cut_clean is not None or self.script.stall is not None
        return len(raw) // 2 if broken else len(raw)

    async def _end_whole(self, raw: bytes) -> None:
        if self.script.cut is not None:
            self._reset()
        if self.script.cut_clean is not None:
            self._hang_up()
        if self.script.stall is not None:
            await asyncio.sleep(self.script.stall[1])
            await self.wire.send(raw[len(raw) // 2 :])

    async def refuse(self) -> None:
        """Status, body and Retry-After as scripted."""
        script = self.script
        assert script.status is not None
        content_type, body = error_body(script.shape or SHAPES[self.dialect], script.status, script.message)
        if script.body is not None:
            body = script.body.encode() if isinstance(script.body, str) else script.body
        await self.page(script.status, content_type, body, (("retry-after", script.ra),) if script.ra else ())

    async def raw(self) -> None:
        """Exact pieces of the whole response, one segment each, then FIN."""
        for piece in self.script.raw or ():
            await self.wire.send(piece)
            await asyncio.sleep(self.script.piece_gap)
        await self._linger()
        self.wire.hang_up()

    async def whole(self, answer: Answer, tokens: int) -> None:
        """An unstreamed generation: as long as its tokens take."""
        script = self.script
        await asyncio.sleep(script.ttft + script.gap * max(0, tokens - 1))
        self.seen.tokens = tokens
        if script.pieces is not None:
            await self._send_pieces("application/json")
        else:
            body = answer.whole() if script.answer is None else script.answer
            await self.page(200, "application/json", body)

    # streams

    async def open(self, answer: Answer) -> None:
        """What a stream sends before a token is thought of."""
        if self.script.head_first and self.script.pieces is None:
            await self._open(answer)

    async def _open(self, answer: Answer) -> None:
        if not self._head_sent:
            await self._stream_head()
            await self._events([*self.script.prelude, *answer.early()])

    async def stream(self, answer: Answer, tokens: int) -> None:
        """A streamed generation, with the faults of the script at their tokens."""
        script = self.script
        if script.pieces is not None:
            await asyncio.sleep(script.ttft)
            return await self._send_pieces("text/event-stream; charset=utf-8")
        await asyncio.sleep(script.ttft)
        await self._open(answer)
        if await self._tokens(answer, tokens):
            await self._flood(answer)
            await self._events([] if script.events is not None else answer.closing())
        await self._end_chunks()
        return None

    async def _tokens(self, answer: Answer, tokens: int) -> bool:
        """Sends the tokens; False when the script ended the stream among them."""
        script = self.script
        events = None if script.events is None else list(script.events)
        count = tokens if events is None else len(events)
        for index in range(count + 1):
            if not await self._fault_at(index, answer):
                return False
            if index == count:
                break
            if index:
                await asyncio.sleep(script.gap)
            elif events is None:
                await self._events(answer.opening())
            event = events[index] if events is not None else answer.token(index, last=index == count - 1)
            await self._events([event])
            self.seen.sent_token()
        return True

    async def _fault_at(self, index: int, answer: Answer) -> bool:
        script = self.script
        if script.stall is not None and script.stall[0] == index:
            await asyncio.sleep(script.stall[1])
        if script.errframe == index:
            _, body = error_body(script.shape or "openai", script.status or 500, script.message)
            await self._events([answer.failure(body) if isinstance(body, dict) else data_event({"error": "failed"})])
            return False
        if script.cut == index:
            await asyncio.sleep(script.piece_gap)
            self._reset()
        if script.cut_inside == index:
            event = answer.token(index, last=False)
            await self._chunk(event[: len(event) // 2])
        if index in (script.cut_clean, script.cut_inside):
            self._hang_up()
        return script.eof_chunked != index

    async def _stream_head(self) -> None:
        self._head_sent = True
        coding: Headers = (("content-encoding", "gzip"),) if self.script.gzip else ()
        trailer: Headers = (("trailer", ", ".join(name for name, _ in self.script.trailers)),) * bool(
            self.script.trailers
        )
        kind = self.script.content_type or "text/event-stream; charset=utf-8"
        framing: Headers = (("content-type", kind), ("transfer-encoding", "chunked"))
        await self.wire.send(head(200, (*framing, *coding, *trailer, *self._extra())))

    async def _events(self, events: list[bytes]) -> None:
        for event in events:
            await self._chunk(event.replace(b"\n", b"\r\n") if self.script.crlf else event)

    async def _chunk(self, data: bytes) -> None:
        if self._zip is not None:
            data = self._zip.compress(data) + self._zip.flush(zlib.Z_SYNC_FLUSH)
        if data:
            await self.wire.chunk(data)

    async def _send_pieces(self, content_type: str) -> None:
        headers: Headers = (
            ("content-type", self.script.content_type or content_type),
            ("transfer-encoding", "chunked"),
        )
        await self.wire.send(head(200, (*headers, *self._extra())))
        for piece in self.script.pieces or ():
            await self.wire.chunk(piece)
            await asyncio.sleep(self.script.piece_gap)
        await self.wire.send(b"0\r\n\r\n")

    async def _flood(self, answer: Answer) -> None:
        if not self.script.flood:
            return
        event = answer.token(1, last=False)
        piece = event.replace(answer.asked.word(1).encode(), b"x" * FLOOD_PIECE)
        while self.seen.pushed < self.script.flood:
            await self._chunk(piece)
            self.seen.pushed += len(piece)

    async def _end_chunks(self) -> None:
        last = self._zip.flush() if self._zip is not None else b""
        if last:
            await self.wire.chunk(last)
        trailers = "".join(f"{name}: {value}\r\n" for name, value in self.script.trailers)
        await self._linger()
        await self.wire.send(b"0\r\n" + trailers.encode() + b"\r\n")

    async def _linger(self) -> None:
        if self.script.linger:
            await asyncio.sleep(self.script.linger)

    def _reset(self) -> None:
        self.seen.end(CUT)
        self.wire.reset()
        raise Finished

    def _hang_up(self) -> None:
        self.seen.end(CUT)
        self.wire.hang_up()
        raise Finished
