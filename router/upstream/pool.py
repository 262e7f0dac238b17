"""The connections to one node, lent for the length of a block.

Rules: a connection is picked last-in first-out, so few stay warm and the others expire by their own timer. What leaves
a block fully read goes back; everything else is aborted at once. A picked connection that dies before the first byte of
an answer lost the race with the server's own idle limit: the exchange is made once more on a fresh one. No task, no
lock, no total timeout.
"""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import msgspec

from router.errors import BadAnswer, ConnectFailed, NodeFailed, Overloaded, Stopped, Truncated
from router.upstream.connection import Bounds, Connection
from router.upstream.target import Target

__all__ = ["Bounds", "Exchange", "Pool"]

STARVED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""What this machine lacks when it cannot even try to connect: no fault of the node."""


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer: `async with pool.exchange(...) as answer`. Good for one entry.

    In its block `status` and `headers`, (lower-case name, value) in the order they came, are those of the answer.
    """

    _pool: "Pool"
    _head: bytes
    _body: bytes
    _first_byte_s: float
    _connection: Connection | None = None
    _stopped: NodeFailed | None = None
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []

    def stop(self, error: NodeFailed) -> None:
        """End it from outside: the connection is closed now, and whoever waits for its answer gets the error."""
        self._stopped = error
        if self._connection is not None:
            self._connection.fail(error)

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def open(self) -> None:
        """Enter the block by hand: leave it by `close`, also when this raises."""
        pool = self._pool
        connection = self._connection = pool.waiting.popitem()[0] if pool.waiting else None
        if connection is not None:
            await connection.start(self._head, self._body, self._first_byte_s)
            if not connection.touched and isinstance(connection.error, Truncated):
                connection = None  # the server had closed it meanwhile
        if connection is None:
            self._connection = connection = await pool.connect()
            if self._stopped is not None:
                raise self._stopped
            await connection.start(self._head, self._body, self._first_byte_s)
        self.status = connection.status
        if not self.status and connection.error is not None:
            raise connection.error
        self.headers = connection.headers

    def close(self) -> None:
        """Leave the block: a connection that may be used again waits, with any other its answer is ended."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        pool = self._pool
        if pool.keeps and len(pool.waiting) < pool.bounds.idle_connections and connection.keep():
            pool.waiting[connection] = None
        else:
            connection.abort()

    # The answer

    @property
    def length(self) -> int | None:
        """Bytes of the body as declared, or None."""
        for name, value in self.headers:
            if name == b"content-length":
                return int(value)
        return None

    def read(self, idle_s: float | None = None) -> Coroutine[Any, Any, bytes]:
        """Await body bytes that have come, undecoded, for `idle_s` (the bounds' if None); `b""` at the end.

        Raises Truncated, IdleTimeout, BadAnswer.
        """
        return self._lent().read(idle_s)

    def flow(self, take: Callable[[bytes], bool]) -> Coroutine[Any, Any, bool]:
        """Await that `take`, which must not raise, is given body bytes as they come, until it returns False.

        Tells whether more may come. Raises like `read`.
        """
        return self._lent().flow(take)

    def whole(self) -> bytes | None:
        """The rest of the body if all of it has come, without waiting; else None."""
        connection = self._connection or self._lent()
        return connection.taken() if connection.done else None

    async def all(self, limit: int) -> bytes:
        """The whole body. Raises BadAnswer if it is over `limit` bytes."""
        size = self.length or 0
        pieces: list[bytes] = []
        if size <= limit:
            size = 0
            while size <= limit and (piece := await self.read()):
                pieces.append(piece)
                size += len(piece)
        if size > limit:
            raise BadAnswer(f"the answer is over {limit} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def drain(self, within_s: float) -> None:
        """Read on to the end of the body, at most `within_s`, and drop it, so that the connection can be kept."""
        connection = self._connection
        if connection is None:
            return
        if connection.done:
            connection.taken()
            return
        try:
            async with asyncio.timeout(within_s):
                while await self.read():
                    pass
        except (TimeoutError, NodeFailed):
            return

    def _lent(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the answer was read after its block")
        return self._connection


class Pool:
    """Connections to one target. `open` counts those whose transport is not gone, `idle` those of them that wait.

    `bounds` may be replaced at any time and hold for connections made after. `waiting` are the idle connections, the
    one used last at the end; `keeps` says whether there may be more of them.
    """

    __slots__ = ("_closed", "_emptied", "_open", "_target", "bounds", "keeps", "waiting")

    def __init__(self, target: Target, bounds: Bounds | None = None) -> None:
        self._target = target
        self.bounds = bounds or Bounds()
        self.waiting: dict[Connection, None] = {}
        self._open: set[Connection] = set()
        self._closed = False
        self.keeps = True
        self._emptied: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def idle(self) -> int:
        """Connections that wait to be used again."""
        return len(self.waiting)

    @property
    def open(self) -> int:
        """Connections whose transport is not gone."""
        return len(self._open)

    def exchange(self, head: bytes, body: bytes = b"", *, first_byte_s: float | None = None) -> Exchange:
        """Send a complete request head (with its empty line) and body; the block begins when the answer's head is in.

        `first_byte_s` bounds sending and waiting for that head, and defaults to the bounds'. Entering raises
        ConnectFailed, FirstByteTimeout, Truncated or BadAnswer; Overloaded when this process has no descriptor left.
        """
        return Exchange(self, head, body, self.bounds.first_byte_s if first_byte_s is None else first_byte_s)

    def retire(self) -> None:
        """Close what waits now, and everything else as it is given back. What runs is not touched."""
        self.keeps = False
        waiting, self.waiting = self.waiting, {}
        for connection in waiting:
            connection.abort()

    async def close(self) -> None:
        """Abort every connection, whoever uses it, and wait until the transports are gone. No exchange begins after."""
        self._closed, self.keeps = True, False
        for connection in list(self._open):
            connection.fail(Stopped("The router is shutting down."))
        while self._open:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._emptied)

    # Between an exchange and its connection

    async def connect(self) -> Connection:
        """A fresh connection within `connect_s`, TLS included. Raises ConnectFailed, Overloaded, Stopped."""
        target, bound = self._target, self.bounds.connect_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(bound):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self.bounds, self),
                    target.host,
                    target.port,
                    ssl=target.tls,
                    server_hostname=target.host if target.tls else None,
                    ssl_handshake_timeout=bound if target.tls else None,
                )
        except (OSError, UnicodeError) as exc:
            if isinstance(exc, OSError) and exc.errno in STARVED:
                raise Overloaded("The router is out of file descriptors or memory.", retry_after_s=1) from exc
            raise ConnectFailed(f"no connection to {target.host}:{target.port}: {_reason(exc, bound)}") from exc
        # Counted here and not in connection_made: uvloop closes a connect that is cancelled without connection_lost.
        if not connection.gone:
            self._open.add(connection)
        if self._closed:
            connection.abort()
            raise Stopped("The router is shutting down.")
        return connection

    # What connections tell

    def withdrawn(self, connection: Connection) -> None:
        """It will not be used again: its time ran out, or the server spoke or closed."""
        self.waiting.pop(connection, None)

    def gone(self, connection: Connection) -> None:
        """Its transport is closed."""
        self._open.discard(connection)
        self.waiting.pop(connection, None)
        if self._emptied is not None and not self._open:
            self._emptied.set_result(None)
            self._emptied = None


def _reason(exc: Exception, bound: float) -> str:
    return f"nothing within {bound:g} s" if isinstance(exc, TimeoutError) and not exc.args else str(exc)
