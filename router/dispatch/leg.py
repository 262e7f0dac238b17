"""One attempt of a call on one target.

Opening it sends the request and reads the answer as far as it must be held; closing it closes the exchange, gives the
room back and lets those who wait ask again, in this order, so that room is never given to two.

What the target says is sorted here: an answer to show, the caller's own error (shown too), or a failure of the node.
"""

from collections.abc import Callable, Mapping

import msgspec

from router.core.call import BATCH, Outcome
from router.core.node import Node, Sign
from router.dispatch import normalise, request
from router.dispatch.reply import Reply, clean
from router.dispatch.trip import Trip
from router.errors import (
    BadAnswer,
    BadStatus,
    ErrorInStream,
    FirstByteTimeout,
    IdleTimeout,
    NodeRefused,
    RelayMisconfigured,
    TakenBack,
)
from router.upstream.pool import Exchange, Pool
from router.upstream.target import Target

_TAKEN = "The room was taken back for an interactive call."
ERROR_BODY_BYTES = 65536
"""So much of an error's body is read; what follows says nothing new."""


_UNKNOWN_FIELD = frozenset((400, 422, 503))
"""Statuses by which engines refuse a field they do not know, or a priority they were not started for."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one target: a node or the relay.

    `starts` are the beginnings of its request heads by endpoint path; `models` maps public names to the target's own.
    """

    name: str
    target: Target
    pool: Pool
    starts: Mapping[str, bytes]
    models: Mapping[str, str] = {}


class Leg(msgspec.Struct, eq=False):
    """One attempt, at the node of its trip with the permit the trip has, or else at the relay.

    `open` it for the Reply, and `close` it in any case.
    """

    _trip: Trip
    _way: Way
    _first_byte_s: float
    _freed: Callable[[], None]
    _exchange: Exchange | None = None
    _hinted: bool = False

    async def open(self) -> Reply:
        """Send the request and read as much of the answer as must be held. Raises NodeFailed or an Answer."""
        way, trip = self._way, self._trip
        call, permit = trip.call, trip.permit
        if permit is not None and permit.taken:
            raise TakenBack(_TAKEN)  # between the grant and this task's turn
        body, own_name = call.body, call.model
        if way.models:
            own_name = way.models.get(own_name, own_name)
        if call.stream or call.workload is BATCH or own_name != call.model:
            body = self._body(own_name)
        head = request.head(call, way.target, way.starts, len(body))
        self._exchange = exchange = way.pool.exchange(head, body, first_byte_s=self._first_byte_s)
        if permit is not None and call.workload is BATCH:
            permit.left = lambda: exchange.stop(TakenBack(_TAKEN))
        await exchange.open()
        if exchange.status >= 300:
            return await self._refused(exchange)
        reply = Reply(exchange.status, clean(exchange.headers), trip, way.name, trip.queued_s)
        try:
            renamed = None if own_name == call.model else (own_name.encode(), call.model.encode())
            coming = reply.hold(exchange, renamed, self._first_byte_s)
            if coming is not None:
                await coming
        except IdleTimeout as error:
            raise FirstByteTimeout("The answer began and nothing of it came within the bound.") from error
        except ErrorInStream as error:
            if error.status >= 500:
                raise
            return self._complaint(error.status, exchange, error.body)
        return reply

    def close(self) -> None:
        """Close the exchange, give the room back, and let those who wait ask again."""
        exchange, permit = self._exchange, self._trip.permit
        try:
            if exchange is not None:
                exchange.close()
        finally:
            if permit is not None:
                permit.__exit__(None, None, None)
                self._freed()

    def _body(self, own_name: str) -> bytes:
        """The body as this target gets it."""
        trip, call, node = self._trip, self._trip.call, self._trip.node
        trip.asks_usage = asks_usage = call.ask_usage and (node is None or node.facts.streams_usage)
        trip.asks_progress = asks_progress = request.asks_progress(call, node)
        behind = request.behind(call, node) if call.workload is BATCH else None
        self._hinted = behind is not None
        if own_name != call.model or asks_usage or asks_progress or behind is not None:
            return request.body(call, own_name, asks_usage=asks_usage, asks_progress=asks_progress, behind=behind)
        return call.body

    async def _refused(self, upstream: Exchange) -> Reply:
        status, node = upstream.status, self._trip.node
        if status < 400:
            raise BadAnswer(f"The node answered {status}: a redirect is no answer.")
        raw = await _some(upstream)
        if self._hinted and node is not None and status in _UNKNOWN_FIELD and b"priority" in raw.lower():
            return await self._ask_plainly(node)
        if node is None:
            if status in (401, 403):
                raise RelayMisconfigured("The relay refuses the key it was given.", retry=False)
        elif status in (429, 503):
            raise NodeRefused(f"The node answered {status}.")
        elif status in (401, 403) or (status >= 500 and status != 501):
            raise BadStatus(f"The node answered {status}.", status, raw)
        return self._complaint(status, upstream, raw)

    async def _ask_plainly(self, node: Node) -> Reply:
        """Once more, and from now on, without a priority: the node will not have one."""
        node.takes_priority = False
        if self._exchange is not None:
            self._exchange.close()
        self._trip.leave(node, self._trip.permit, self._way.name)
        return await self.open()

    def _complaint(self, status: int, upstream: Exchange, raw: bytes) -> Reply:
        trip = self._trip
        trip.sign(Sign.NEITHER, "the caller's own error")
        trip.outcome = Outcome.CALLER_ERROR if status < 500 else Outcome.FAILED
        found = normalise.complaint(status, raw, trip.call.endpoint.prompt_field)
        headers = normalise.retry_headers(status, found, upstream.headers)
        return Reply.error(status, headers, found.encode(), trip)


async def _some(upstream: Exchange) -> bytes:
    """The beginning of a body."""
    parts, size = [], 0
    while size < ERROR_BODY_BYTES and (data := await upstream.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)
