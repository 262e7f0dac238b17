"""The corridor every call goes through, whichever door it came in by.

    async with dispatcher.open(call) as reply:
        ...

The block is the life of the call: room is held and the upstream connection is open exactly as long as it lasts. Leaving
it in any way (the end, an error, cancellation because the caller left) gives the room back, aborts what still runs
upstream and wakes those who wait.

A leg that fails before the first meaningful event may be followed by another: a node not yet tried while the retry
budget lasts, then the relay. The old leg is over, its connection closed, before the next begins. What failed through
the caller's own doing (4xx) is passed on and counted against nobody.
"""

from collections.abc import Mapping
from types import TracebackType

import msgspec

from router.core.call import BATCH, Call, Reason
from router.core.decision import RelayCause, Situation
from router.core.node import Node, Sign
from router.core.pace import Past
from router.dispatch import normalise
from router.dispatch.admission import Admission
from router.dispatch.grant import Grant, RelayGrant
from router.dispatch.ledger import Ledger
from router.dispatch.leg import Leg, Way
from router.dispatch.queue import Waiter
from router.dispatch.reply import Reply
from router.dispatch.trip import RELAY, Trip
from router.errors import (
    Answer,
    BadStatus,
    ConnectFailed,
    ErrorInStream,
    FirstByteTimeout,
    NodeFailed,
    NodeRefused,
    Overloaded,
    RelayMisconfigured,
    Stopped,
    TakenBack,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one leg and of trying again: seconds, seconds a prompt token, most legs on nodes, share of retries.

    `first_byte_least_s` is the shortest bound a node that is known to be fast gets.
    """

    first_byte_s: float = 120.0
    first_byte_per_prompt_token_s: float = 0.005
    retries: int = 1
    retry_ratio: float = 0.1
    first_byte_least_s: float = 15.0

    def first_byte(self, call: Call, node: Node | None) -> float:
        """How long the first byte of an answer may take: what the node has shown it needs, within the bounds.

        What is not streamed begins when it ends, so its prompt says nothing of when that is.
        """
        most = self.first_byte_s + self.first_byte_per_prompt_token_s * call.prompt_tokens
        expected = node.silence_s() if node is not None and call.stream else None
        return most if expected is None else min(most, max(expected, self.first_byte_least_s))


JOB = Reason.JOB
"""Under a name of its own: every call is compared with it, and an enum's attribute is a slow look-up in 3.11."""
_SIGNS = {ConnectFailed: Sign.GONE, FirstByteTimeout: Sign.SILENT}
"""What a failure says of the node; any other is a fault."""


class RetryBudget:
    """Retries as a share of calls, so that an outage is not multiplied. A few are always allowed.

    `left` are those that may be made now, at most `FLOOR`.
    """

    FLOOR = 10.0

    def __init__(self) -> None:
        self.left = self.FLOOR

    def earn(self, ratio: float) -> None:
        """A call came in, which allows so much of a retry."""
        self.left = min(self.FLOOR, self.left + ratio)

    def spend(self) -> bool:
        """Whether one more retry may be made; it is counted if so."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Dispatcher:
    """Opens calls. `ledger` is told of every trip that ended.

    `ways` has the way to every node that holds room, one that was let go included; `relay` and `patience` may be
    replaced, and hold for legs that begin after.
    """

    def __init__(
        self, admission: Admission, ways: Mapping[Node, Way], relay: Way | None, patience: Patience, ledger: Ledger
    ) -> None:
        self.admission = admission
        self._ways = ways
        self.relay = relay
        self.patience = patience
        self._ledger = ledger
        self._retries = RetryBudget()
        self.trips: set[Trip] = set()

    def relays(self, call: Call) -> bool:
        """Whether the relay may answer the call."""
        relay = self.relay
        if relay is None or not call.fallback or call.bound_to is not None or call.model not in relay.models:
            return False
        return self._ledger.spending.affords(call)

    def open(self, call: Call, past: Past | None = None) -> "Opening":
        """The call's answer, for as long as the block lasts: `async with dispatcher.open(call) as reply`.

        Entering raises an Answer when there is none. The room of a batch call may be taken back: before its answer
        begins it then waits again, later the block gets TakenBack. `past` is what earlier blocks of it went through.
        """
        return Opening(self, call, past)

    def set_out(self, call: Call, past: Past | None) -> Trip:
        """A block begins."""
        if past is None and call.workload is BATCH:
            past = Past()
        clock = self._ledger.clock
        relay = self.relay is not None and self.relays(call)
        trip = Trip(call, clock, clock(), Situation(relay=relay, past=past))
        self.trips.add(trip)
        if self._retries.left < RetryBudget.FLOOR:
            self._retries.earn(self.patience.retry_ratio)
        return trip

    def come_home(self, trip: Trip, error: BaseException | None) -> None:
        """A block ended."""
        if error is not None:
            trip.broke(error)
        self.trips.discard(trip)
        written = self._ledger.close(trip)
        if written:
            self.admission.ended(trip.call, trip.node, trip.permit, written)

    def leg(self, trip: Trip, grant: Grant | RelayGrant) -> Leg:
        """A leg begins, which is to be opened now. Raises an Answer where the relay will not have it."""
        node = permit = None
        if isinstance(grant, Grant):
            node, permit = grant.node, grant.permit
            way = self._ways[node]
        else:
            self._ledger.relayed(trip, grant.cause)
            way = self._way_to_relay(trip.call)
        trip.leave(node, permit, way.name)
        return Leg(trip, way, self.patience.first_byte(trip.call, node), self.admission.changed)

    async def next_grant(self, trip: Trip, error: NodeFailed) -> Grant | RelayGrant:
        """Where a call goes whose leg failed. Raises the last word when there is nowhere."""
        self._ledger.leg(trip, type(error))
        if isinstance(error, Stopped):
            trip.cut(error)
            raise Overloaded(str(error), retry_after_s=1) from error
        if trip.node is None:
            raise self._last_word(trip, error) from error
        if isinstance(error, TakenBack):
            return await self.admission.grant(trip.call, trip.situation, trip.began_at)
        if isinstance(error, NodeRefused):
            trip.sign(Sign.REFUSED, str(error))
        else:
            trip.sign(_SIGNS.get(type(error), Sign.FAULT), str(error))
            trip.situation.tried = (*trip.situation.tried, trip.place)
            trip.faults += 1
            # A line of a batch has tries of its own, later and elsewhere: it takes no second leg from this one.
            again = trip.call.reason is not JOB and trip.faults <= self.patience.retries
            if not again or not self._retries.spend():
                if trip.situation.relay:
                    return RelayGrant(RelayCause.NODE_FAILED)
                raise self._last_word(trip, error) from error
        try:
            return await self.admission.grant(trip.call, trip.situation, trip.began_at)
        except Answer as answer:
            if isinstance(error, NodeRefused) or not isinstance(answer, UpstreamUnavailable):
                raise
            raise self._last_word(trip, error) from error

    def _last_word(self, trip: Trip, error: NodeFailed) -> Answer:
        retry = False if trip.legs > 1 else None
        match error:
            case FirstByteTimeout():
                return UpstreamTimeout("The node did not begin to answer in time.", retry=False)
            case BadStatus(status=401 | 403):
                return UpstreamUnavailable("The node refuses the router's key.", retry=False)
            case BadStatus():
                found = normalise.complaint(error.status, error.body, trip.call.endpoint.prompt_field)
                return UpstreamError(found.message, error.status, code=found.code, retry=retry)
            case ErrorInStream():
                found = normalise.complaint(error.status, error.body, trip.call.endpoint.prompt_field)
                return UpstreamError(found.message, 503, code=found.code, retry=retry)
            case _:
                return UpstreamUnavailable(str(error), retry=retry)

    def _way_to_relay(self, call: Call) -> Way:
        relay = self.relay
        if relay is None or call.model not in relay.models:
            # It might when the call came. Prompts of a model leave the house while the settings say so, and no longer.
            raise Overloaded("The relay answers for this model no more; send the call again.", retry_after_s=1)
        if relay.target.authorization is None:
            raise RelayMisconfigured("The relay has no key of its own; set relay.api_key.", retry=False)
        return relay


class Opening(msgspec.Struct, eq=False):
    """The block of one call."""

    _dispatcher: Dispatcher
    _call: Call
    _past: Past | None
    _trip: Trip | None = None
    _leg: Leg | None = None

    async def __aenter__(self) -> Reply:
        dispatcher, call, reply = self._dispatcher, self._call, None
        admission = dispatcher.admission
        self._trip = trip = dispatcher.set_out(call, self._past)
        try:
            if call.bound_to == RELAY:
                grant: Grant | RelayGrant | Waiter = RelayGrant(RelayCause.OWNER)
            else:
                grant = admission.ask(call, trip.situation, trip.began_at)
            if isinstance(grant, Waiter):
                grant = await admission.wait(grant)
            while reply is None:
                self._leg = leg = dispatcher.leg(trip, grant)
                try:
                    reply = await leg.open()
                except NodeFailed as error:
                    self._leg = None
                    leg.close()
                    grant = await dispatcher.next_grant(trip, error)
            if trip.permit is not None and call.reason is not JOB:
                trip.permit.firm = True  # somebody reads along: what they have read cannot be taken back
            admission.changed()
        except BaseException as error:
            try:
                if self._leg is not None:
                    self._leg.close()
            finally:
                dispatcher.come_home(trip, error)
            raise
        trip.committed = True
        trip.status = reply.status
        return reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        leg, trip = self._leg, self._trip
        assert leg is not None
        assert trip is not None
        try:
            leg.close()
        finally:
            self._dispatcher.come_home(trip, error)
