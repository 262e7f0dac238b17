"""The dashboard's streams: everything once, then what changed, as server-sent events.

Rules:
- One loop looks once a second for all readers. The state is built once for each wish, its changes are encoded once,
  and all readers of that wish get the same bytes. With no reader nothing is built.
- A reader who takes nothing is let go: so many frames are held for one, no more. Readers are bounded, and so are the
  wishes they may have together.
- A stream is never silent for longer than `BEAT_S`, so a reader can tell a quiet router from a lost one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.board import Board, Told, Wish
from router.api.terms import TURN
from router.errors import Overloaded

EVERY_S = 1.0
"""Between two looks for changes."""
BEAT_S = 5.0
READERS, WISHES = 32, 8
HELD = 8
"""Frames held for a reader who does not take them."""
STALL_S = 20.0
"""Longest wait for a reader to take a frame."""
KEYED = frozenset(("nodes", "batches", "events", "series"))
"""Parts of the state whose members change one by one."""
_BEAT = b"event: beat\ndata: {}\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
}


def frame(event: str, told: object) -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(told))


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Told:
    """What turns one state into the next: whole parts under `set`, members of keyed parts under `put` and `gone`."""
    whole: Told = {}
    put: Told = {}
    gone: Told = {}
    for name, part in after.items():
        old = before.get(name)
        if part == old:
            continue
        if name not in KEYED or part is None or old is None:
            whole[name] = part
            continue
        if new := {key: value for key, value in part.items() if old.get(key) != value}:
            put[name] = new
        if over := [key for key in old if key not in part]:
            gone[name] = over
    return {name: value for name, value in (("set", whole), ("put", put), ("gone", gone)) if value}


class Reader:
    """One open stream: frames that wait to be sent. `lost` once it took none for too long."""

    def __init__(self, first: bytes) -> None:
        self._frames = deque([first])
        self._more = asyncio.Event()
        self._more.set()
        self.ended = self.lost = False
        self.abort: Callable[[], None] | None = None

    def give(self, one: bytes) -> None:
        """Hold a frame for it, or let it go."""
        if len(self._frames) >= HELD:
            self.lost = True
            self.end()
            if self.abort is not None:
                self.abort()
        else:
            self._frames.append(one)
            self._more.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._more.set()

    async def next(self) -> bytes | None:
        """The next frame, a beat when there was none for a while, None at the end."""
        if not self._frames and not self.ended:
            self._more.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._more.wait()
            except TimeoutError:
                return _BEAT
        return self._frames.popleft() if self._frames and not self.lost else None


class Feed:
    """The state for one wish and who reads it. Those who come before it was built once wait in `begun`."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.state: Told = {}
        self.begun = asyncio.Lock()
        self.readers: set[Reader] = set()

    async def begin(self) -> None:
        """Build the state, if it is not yet."""
        async with self.begun:
            if not self.state:
                self.state = await self._board.state()

    async def look(self, at: float) -> None:
        """See what changed since the last look, and tell it to all readers."""
        async with self.begun:
            await self._look(at)

    async def _look(self, at: float) -> None:
        after = await self._board.state()
        changes = change(self.state, after)
        self.state = after
        if changes:
            told = frame("change", {"at": at, **changes})
            for reader in tuple(self.readers):
                reader.give(told)


class Feeds:
    """All streams. `board` makes what a wish is read from, `wall` gives unix seconds."""

    def __init__(self, board: Callable[[Wish], Board], wall: Callable[[], float]) -> None:
        self._board, self._wall = board, wall
        self._feeds: dict[Wish, Feed] = {}
        self.closed = False

    @property
    def readers(self) -> int:
        """Open streams."""
        return sum(len(feed.readers) for feed in self._feeds.values())

    async def once(self, wish: Wish) -> Told:
        """The state now."""
        return {"at": self._wall(), "state": await self._board(wish).state()}

    async def open(self, wish: Wish, hello: Told) -> "Stream":
        """A stream of that wish. Raises Overloaded when there are too many."""
        if wish not in self._feeds and len(self._feeds) >= WISHES:
            raise _too_many()
        while True:
            if self.closed or self.readers >= READERS:
                raise _too_many()
            feed = self._feeds.setdefault(wish, Feed(self._board(wish)))
            if feed.state:
                break
            await feed.begin()
        reader = Reader(frame("snapshot", {"at": self._wall(), "state": feed.state, **hello}))
        feed.readers.add(reader)
        return Stream(reader, lambda: self._leave(wish, reader))

    async def look(self) -> None:
        """Tell every reader what changed."""
        for wish, feed in tuple(self._feeds.items()):
            if feed.readers:
                await feed.look(self._wall())
            elif feed.state:  # who asked for it left before it was built
                self._feeds.pop(wish, None)

    def close(self) -> None:
        """End every stream, and open none any more."""
        self.closed = True
        self.renew()

    def renew(self) -> None:
        """End every stream that is open: who still may comes back by itself."""
        for feed in self._feeds.values():
            for reader in feed.readers:
                reader.end()

    def _leave(self, wish: Wish, reader: Reader) -> None:
        feed = self._feeds.get(wish)
        if feed is not None:
            feed.readers.discard(reader)
            if not feed.readers:
                del self._feeds[wish]


class Stream(Response):
    """One reader's answer. `left` is called once when it is over."""

    def __init__(self, reader: Reader, left: Callable[[], None]) -> None:
        super().__init__(None, 200, _HEADERS)
        del self.headers["content-length"]
        self._reader, self._left = reader, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._reader
        turn = scope.get("extensions", {}).get(TURN)
        reader.abort = None if turn is None else turn.abort
        leaving = asyncio.ensure_future(_leaves(receive))
        leaving.add_done_callback(lambda _: reader.end())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not leaving.done() and (told := await reader.next()) is not None:
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": told, "more_body": True})
            if not reader.lost:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            if reader.abort is not None:
                reader.abort()
        finally:
            leaving.cancel()
            self._left()
        if reader.lost:
            await asyncio.sleep(0)  # the server hears of the lost connection before we return


def _too_many() -> Overloaded:
    return Overloaded("Too many dashboards are open.", retry_after_s=10)


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
