"""Who may run now, and who waits.

Rules:
- A call that can run at once never touches the queue.
- Waiters are served in order of arrival, interactive before batch; a waiter that finds no room holds back those behind
  it that want the same model, so that a large call is not overtaken for ever.
- A waiter is asked again when something changes (room given back, a node seen) or when its moment comes (patience ends,
  a refusing node may be tried again). One timer serves all.
- Queues are bounded in calls and bytes; what does not fit is relayed or refused at once.
- Who leaves while waiting is forgotten at once; room granted to somebody who left is given back.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec

from router.core.budget import Permit
from router.core.call import Call, Workload
from router.core.node import Node, State
from router.core.placement import (
    Decision,
    Refuse,
    RefuseReason,
    Relay,
    RelayCause,
    Run,
    Situation,
    Wait,
    WaitReason,
    place,
)
from router.errors import (
    Answer,
    ContextTooLong,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestTimeout,
    UpstreamUnavailable,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how much one workload may wait: seconds, calls, bytes of request bodies."""

    patience_s: float
    queue_calls: int
    queue_bytes: int


class Grant(msgspec.Struct, frozen=True):
    """Room on a node, to be held for a block."""

    node: Node
    permit: Permit


class RelayGrant(msgspec.Struct, frozen=True):
    """The relay is to answer."""

    cause: RelayCause


class Waiter:
    """One call that waits. `asked_at` is when it first asked for room; a retry keeps it."""

    __slots__ = ("asked_at", "call", "future", "reason", "situation")

    def __init__(self, call: Call, asked_at: float, situation: Situation) -> None:
        self.call = call
        self.asked_at = asked_at
        self.situation = situation
        self.future: asyncio.Future[Grant | RelayGrant] | None = None
        self.reason = WaitReason.NO_ROOM

    @property
    def gone(self) -> bool:
        """Whether it left and has had no turn yet to take itself out of the queue."""
        return self.future is not None and self.future.cancelled()


class Queue:
    """Waiters of one workload in order of arrival."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiters: dict[Waiter, None] = {}
        self.bytes = 0

    def full(self, call: Call) -> bool:
        """Whether one more would be over a bound."""
        over_bytes = self.bytes + len(call.body) > self.limits.queue_bytes
        return len(self.waiters) >= self.limits.queue_calls or over_bytes

    def add(self, waiter: Waiter) -> None:
        """Somebody waits from now on, behind all others."""
        self.waiters[waiter] = None
        self.bytes += len(waiter.call.body)

    def drop(self, waiter: Waiter) -> None:
        """Somebody waits no more; again does no harm."""
        if waiter in self.waiters:
            del self.waiters[waiter]
            self.bytes -= len(waiter.call.body)


class Admission:
    """Grants room to calls, at once or in order.

    `nodes` are all nodes; `limits` per workload; `clock` seconds of a steady clock; `noticed(workload, calls, bytes)`
    is told when a queue changed.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        limits: dict[Workload, Limits],
        clock: Callable[[], float],
        noticed: Callable[[Workload, int, int], None],
    ) -> None:
        self._nodes = nodes
        self._queues = {workload: Queue(limits[workload]) for workload in Workload}
        self._clock = clock
        self._noticed = noticed
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0
        self._grant_gap_s = 0.1
        self._granted_at = clock()
        self.closed = False

    def waiting(self, workload: Workload) -> int:
        """Calls of that workload that wait."""
        return len(self._queues[workload].waiters)

    def waiters(self) -> list[Waiter]:
        """Everybody who waits, in the order they are served."""
        return [waiter for workload in Workload for waiter in self._queues[workload].waiters]

    async def grant(self, call: Call, situation: Situation, asked_at: float) -> Grant | RelayGrant:
        """Room for the call, when there is some. Raises an Answer when it is refused.

        The room of a Grant is already held: enter its permit without waiting for anything in between.
        """
        if self.closed:
            raise Overloaded("The router is shutting down; send the call again.", retry_after_s=1)
        waiter = Waiter(call, asked_at, situation)
        situation.patience = self._queues[call.workload].limits.patience_s
        if not self._behind(call):
            granted = self._settle(waiter, self._decide(waiter))
            if granted is not None:
                return granted
        return await self._wait(waiter)

    def serve(self) -> None:
        """Ask again for everybody who waits. Called whenever room or a node changed."""
        wake_at = math.inf
        for workload, queue in self._queues.items():
            held_back: set[tuple[str, str | None]] = set()
            for waiter in list(queue.waiters):
                if waiter.gone:
                    continue
                key = (waiter.call.model, waiter.call.bound_to)
                ends = self._ends(waiter)
                if key not in held_back or self._clock() >= ends:
                    decision = self._decide(waiter)
                    if self._resolve(waiter, decision):
                        continue
                    if not waiter.situation.tried:
                        held_back.add(key)
                    if isinstance(decision, Wait) and decision.until is not None:
                        wake_at = min(wake_at, decision.until)
                wake_at = min(wake_at, ends)
            self._noticed(workload, len(queue.waiters), queue.bytes)
        self._arm(wake_at)

    def changed(self) -> None:
        """Something changed; cheap when nobody waits."""
        for queue in self._queues.values():
            if queue.waiters:
                self.serve()
                return

    def close(self) -> None:
        """Take no more calls; refuse those that wait."""
        self.closed = True
        for waiter in self.waiters():
            self._fail(waiter, Overloaded("The router is shutting down; send the call again.", retry_after_s=1))
        self._arm(math.inf)

    async def _wait(self, waiter: Waiter) -> Grant | RelayGrant:
        queue = self._queues[waiter.call.workload]
        if queue.full(waiter.call):
            if waiter.situation.relay:
                return RelayGrant(RelayCause.NO_ROOM)
            raise Overloaded("The queue is full.", retry_after_s=self._retry_after(waiter.call.workload))
        future: asyncio.Future[Grant | RelayGrant] = asyncio.get_running_loop().create_future()
        waiter.future = future
        queue.add(waiter)
        self.serve()
        try:
            return await future
        except asyncio.CancelledError:
            _give_back(future)
            raise
        finally:
            # a refusal's traceback holds this frame: with the future in it that would be a circle
            waiter.future = None
            del future
            queue.drop(waiter)
            self._noticed(waiter.call.workload, len(queue.waiters), queue.bytes)
            self.changed()

    def _behind(self, call: Call) -> bool:
        """Whether somebody who came earlier waits for the same thing."""
        waiters = self._queues[call.workload].waiters
        return bool(waiters) and any(
            other.call.model == call.model and other.call.bound_to == call.bound_to and not other.situation.tried
            for other in waiters
        )

    def _decide(self, waiter: Waiter) -> Decision:
        now = self._clock()
        situation = waiter.situation
        situation.waited = now - waiter.asked_at
        situation.turn = self._turn
        if waiter.call.workload is Workload.BATCH:
            situation.chat_waits = any(
                other.call.model == waiter.call.model and other.reason is WaitReason.NO_ROOM
                for other in self._queues[Workload.INTERACTIVE].waiters
            )
        if self._overdue(waiter):
            return Refuse(RefuseReason.DEADLINE)
        return place(waiter.call, self._nodes, now, situation)

    def _settle(self, waiter: Waiter, decision: Decision) -> Grant | RelayGrant | None:
        if isinstance(decision, Run):
            return self._run(waiter.call, decision.node)
        match decision:
            case Relay(relay_cause):
                return RelayGrant(relay_cause)
            case Wait(wait_reason):
                waiter.reason = wait_reason
                return None
            case Refuse(refusal, context):
                raise self._refusal(waiter, refusal, context)

    def _run(self, call: Call, node: Node) -> Grant:
        now = self._clock()
        self._turn += 1
        self._grant_gap_s += 0.1 * (min(10.0, now - self._granted_at) - self._grant_gap_s)
        self._granted_at = now
        permit = node.budget.hold(node.room_for(call), call.workload)
        if node.state is not State.READY:
            node.try_again(now, permit)
        return Grant(node, permit)

    def _resolve(self, waiter: Waiter, decision: Decision) -> bool:
        """Tell a waiter; True when it waits no more."""
        try:
            granted = self._settle(waiter, decision)
        except Answer as answer:
            self._fail(waiter, answer)
            return True
        if granted is None:
            return False
        self._queues[waiter.call.workload].drop(waiter)
        assert waiter.future is not None
        waiter.future.set_result(granted)
        return True

    def _fail(self, waiter: Waiter, answer: Answer) -> None:
        self._queues[waiter.call.workload].drop(waiter)
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_exception(answer)

    def _ends(self, waiter: Waiter) -> float:
        patience = waiter.situation.patience
        deadline = waiter.call.deadline_s
        return waiter.asked_at + (patience if deadline is None else min(patience, deadline))

    def _overdue(self, waiter: Waiter) -> bool:
        deadline = waiter.call.deadline_s
        return deadline is not None and waiter.situation.waited >= deadline

    def _arm(self, wake_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at < math.inf:
            delay = max(0.001, wake_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self.serve)

    def _retry_after(self, workload: Workload) -> int:
        """Seconds until the queue as it stands would be through, at the pace of recent grants."""
        return max(1, min(60, math.ceil(self.waiting(workload) * self._grant_gap_s)))

    def _refusal(self, waiter: Waiter, reason: RefuseReason, context: int | None) -> Answer:
        call = waiter.call
        match reason:
            case RefuseReason.UNKNOWN_MODEL:
                message = f"The model `{call.model}` does not exist or you do not have access to it."
                return ModelNotFound(message, param="model")
            case RefuseReason.CONTEXT:
                message = (
                    f"This model's maximum context length is {context} tokens. However, your prompt contains about"
                    f" {call.prompt_tokens} tokens. Please reduce the length of the prompt."
                )
                return ContextTooLong(message, param=call.endpoint.prompt_field)
            case RefuseReason.OWNER_GONE:
                return NotFound("The node that holds this response is gone.", param="response_id")
            case RefuseReason.DEADLINE:
                return RequestTimeout("No room came before the client's own deadline.", retry_after_s=1)
            case RefuseReason.NODE_FAILED:
                return UpstreamUnavailable("Every node that serves this model failed.")
            case RefuseReason.NODES_DOWN | RefuseReason.NO_ROOM:
                why = "No node is up" if reason is RefuseReason.NODES_DOWN else "No node has room"
                retry_after_s = self._retry_after(call.workload)
                return Overloaded(f"{why} for this model; try again later.", retry_after_s=retry_after_s)


def _give_back(future: "asyncio.Future[Grant | RelayGrant]") -> None:
    """Somebody left who may just have been granted room."""
    if future.done() and not future.cancelled() and future.exception() is None:
        granted = future.result()
        if isinstance(granted, Grant):
            with granted.permit:
                pass
