"""Who may run now, and who waits.

Rules:
- A call that can run at once never touches the queue.
- Room that batch gives back passes to the call it was taken for in the same step, so nobody comes between.
- Waiters are served in order of arrival, interactive before batch; a waiter that finds no room holds back those behind
  it that want the same model, so that a large call is not overtaken for ever.
- A waiter is asked again when something changes (room given back, a node seen) or when its moment comes (patience ends,
  a refusing node may be tried again). One timer serves all.
- Queues are bounded in calls and bytes; what does not fit is relayed or refused at once.
- Who leaves while waiting is forgotten at once; room granted to somebody who left is given back.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

from router.core.budget import Permit
from router.core.call import BATCH, INTERACTIVE, Call, Workload
from router.core.node import Node
from router.core.pace import Past
from router.core.packing import Packing
from router.core.placement import (
    Decision,
    Refuse,
    RefuseReason,
    Relay,
    RelayCause,
    Run,
    Situation,
    TakeBack,
    Wait,
    WaitReason,
    packing_order,
    place,
)
from router.core.standing import READY
from router.core.yielding import FOR_CHAT, TRICKLE, TRICKLE_MOST_S, UNTOLD_S, Mode, Policy
from router.dispatch.grant import Grant, RelayGrant
from router.dispatch.queue import Limits, Queue, Waiter
from router.dispatch.refusal import refusal
from router.errors import Answer, Overloaded

__all__ = ["Admission", "Limits", "TakeBacks"]

LATELY_S = 30.0
"""Chat is packed while batch was here within this long."""

PAID = 1.25
"""What the trickle paid for is firm for so many times what it should take: a guess that was wrong holds no longer."""

TakeBacks = Callable[[Node, Permit, float], None]
"""Told of a batch call whose room is taken back, and how many of its prompt tokens were read in vain."""


def _untold(node: Node, permit: Permit, wasted: float) -> None:
    """Nobody wants to know."""


class Admission:
    """Grants room to calls, at once or in order.

    `nodes` are all nodes; `limits` per workload; `clock` seconds of a steady clock; `noticed(workload, calls, bytes)`
    is told when a queue changed; `policy` says how batch makes way for chat, and `took` is told when it does.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        limits: dict[Workload, Limits],
        clock: Callable[[], float],
        noticed: Callable[[Workload, int, int], None],
        policy: Policy = Policy(),  # noqa: B008  # frozen
        took: TakeBacks = _untold,
    ) -> None:
        self.policy = policy
        self._took = took
        self._packings: dict[str, Packing] = {}
        self._batch_at = -math.inf
        self._nodes = nodes
        self._queues = {workload: Queue(limits[workload]) for workload in Workload}
        self._chats, self._lines = self._queues[INTERACTIVE], self._queues[BATCH]
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

    def reasons(self) -> dict[tuple[str, ...], int]:
        """How many calls wait, by workload and why."""
        return dict(Counter((str(waiter.call.workload), str(waiter.reason)) for waiter in self.waiters()))

    async def grant(self, call: Call, situation: Situation, asked_at: float) -> Grant | RelayGrant:
        """Room for the call, when there is some. Raises an Answer when it is refused.

        The room of a Grant is already held: enter its permit without waiting for anything in between.
        """
        granted = self.ask(call, situation, asked_at)
        return await self.wait(granted) if isinstance(granted, Waiter) else granted

    def ask(self, call: Call, situation: Situation, asked_at: float) -> Grant | RelayGrant | Waiter:
        """Room for the call if it may run now, held like that of `grant`; else who has to `wait` at once."""
        if self.closed:
            raise Overloaded("The router is shutting down; send the call again.", retry_after_s=1)
        wait, queue = None, self._chats if call.workload is INTERACTIVE else self._lines
        situation.patience = queue.limits.patience_s
        if not queue.waiters or situation.returned or not self._behind(call):
            now = self._clock()
            decision = self._decide(call, situation, asked_at, now)
            if isinstance(decision, Run):
                return self._run(call, situation.past, decision.node, now, firm=decision.firm)
            if not isinstance(decision, Wait):
                return self._settle(call, situation, decision, now)
            wait = decision
        waiter = Waiter(call, asked_at, situation)
        if wait is not None:
            self._put_off(waiter, wait)
        return waiter

    def serve(self) -> None:
        """Ask again for everybody who waits. Called whenever room or a node changed."""
        wake_at = math.inf
        for workload, queue in self._queues.items():
            held_back: dict[tuple[str, str | None], Waiter] = {}
            for waiter in list(queue.waiters):
                if waiter.gone:
                    continue
                key = (waiter.call.model, waiter.call.bound_to)
                ends = self._ends(waiter)
                if key not in held_back or self._clock() >= ends:
                    wait = self._ask_again(waiter)
                    if wait is None:
                        continue
                    if not waiter.situation.tried and not waiter.returned:
                        held_back[key] = waiter
                    if wait.until is not None:
                        wake_at = min(wake_at, wait.until)
                else:
                    waiter.reason = held_back[key].reason
                wake_at = min(wake_at, ends)
            self._noticed(workload, len(queue.waiters), queue.bytes)
        self._arm(wake_at)

    def changed(self) -> None:
        """Something changed; cheap when nobody waits."""
        if self._chats.waiters or self._lines.waiters:
            self.serve()

    def empty(self, node: Node) -> None:
        """Take batch back from a node that is to get no calls; what somebody reads along is left."""
        now = self._clock()
        for permit in [permit for permit in node.budget.batch if not permit.firm]:
            self._took(node, permit, node.take_back(permit, now))
        self.changed()

    def close(self) -> None:
        """Take no more calls; refuse those that wait."""
        self.closed = True
        for waiter in self.waiters():
            self._fail(waiter, Overloaded("The router is shutting down; send the call again.", retry_after_s=1))
        self._arm(math.inf)

    async def wait(self, waiter: Waiter) -> Grant | RelayGrant:
        """What a call is granted in its turn. Raises an Answer when it is refused."""
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
        return any(
            other.call.model == call.model and other.call.bound_to == call.bound_to and not other.situation.tried
            for other in self._queues[call.workload].waiters
        )

    def ended(self, call: Call, node: Node | None, permit: Permit | None, tokens: int) -> None:
        """A call is over that wrote `tokens` in a stream: what it says of the node that answered it."""
        if tokens and node is not None and permit is not None and call.workload is INTERACTIVE:
            node.chatted(permit, tokens, self._clock(), self.policy.ttft_p95_s)

    def _decide(self, call: Call, situation: Situation, asked_at: float, now: float) -> Decision:
        situation.waited = waited = now - asked_at
        situation.turn = self._turn
        situation.policy = self.policy
        if call.workload is BATCH:
            self._batch_at = now
            self._look_round(call, situation)
        deadline = call.deadline_s
        if deadline is not None and waited >= deadline:
            return Refuse(RefuseReason.DEADLINE)
        situation.packed = self._packed(call, now) if now - self._batch_at < LATELY_S else None
        return place(call, self._nodes, now, situation)

    def _look_round(self, call: Call, situation: Situation) -> None:
        """Who else waits for the model of a batch call."""
        situation.chat_waits = any(
            other.call.model == call.model and other.reason is WaitReason.NO_ROOM for other in self._chats.waiters
        )
        situation.others = situation.returned and any(
            other.call.model == call.model and not other.returned for other in self._lines.waiters
        )

    def _packed(self, call: Call, now: float) -> int | None:
        """On how many nodes chat of that model is placed; None while there is but one that could hold it."""
        nodes = [
            node
            for node in self._nodes
            if node.state is READY and INTERACTIVE in node.spec.pools and node.serves(call.model)
        ]
        if len(nodes) < 2:
            return None
        chats = sum(node.budget.chats for node in nodes) + (call.workload is INTERACTIVE)
        packing = self._packings.get(call.model)
        if packing is None:
            packing = self._packings[call.model] = Packing()
        return packing.fit(chats, [node.bearing.limit for node in packing_order(nodes)], now)

    def _settle(
        self, call: Call, situation: Situation, decision: Run | TakeBack | Relay | Refuse, now: float
    ) -> Grant | RelayGrant:
        match decision:
            case Run(node, firm):
                return self._run(call, situation.past, node, now, firm=firm)
            case TakeBack(node, victims):
                return self._take(call, situation.past, node, now, victims)
            case Relay(cause):
                return RelayGrant(cause)
            case Refuse():
                raise refusal(call, decision, self._retry_after(call.workload))

    def _run(self, call: Call, past: Past | None, node: Node, now: float, *, firm: bool) -> Grant:
        gap_s, self._granted_at = now - self._granted_at, now
        self._turn += 1
        self._grant_gap_s += 0.1 * ((gap_s if gap_s < 10.0 else 10.0) - self._grant_gap_s)
        permit = node.hold(call, now, past)
        if firm:
            left_s = node.left_s(call, past)
            paid_s = UNTOLD_S if left_s is None else left_s
            node.trickle_s = max(0.0, node.trickle_s - paid_s)
            permit.firm, permit.firm_until = True, now + PAID * paid_s
        if node.state is not READY:
            node.try_again(now, permit)
        return Grant(node, permit)

    def _take(self, call: Call, past: Past | None, node: Node, now: float, victims: Sequence[Permit]) -> Grant:
        enforced = self.policy.mode is Mode.ENFORCE
        for victim in victims:
            self._took(node, victim, node.take_back(victim, now) if enforced else 0.0)
        granted = self._run(call, past, node, now, firm=False)
        granted.permit.took = enforced
        return granted

    def _put_off(self, waiter: Waiter, wait: Wait) -> None:
        """A call waits on; what batch waits for chat it gets a share of back, at the node where it waits."""
        now = self._clock()
        if wait.node is not None and waiter.reason in FOR_CHAT:
            wait.node.save(TRICKLE, waiter.looked_at, now, most=TRICKLE_MOST_S)
        waiter.reason, waiter.looked_at = wait.reason, now

    def _ask_again(self, waiter: Waiter) -> Wait | None:
        """Decide again of a waiter, and tell it what is decided. None when it waits no more."""
        call, situation, now = waiter.call, waiter.situation, self._clock()
        decision = self._decide(call, situation, waiter.asked_at, now)
        if isinstance(decision, Wait):
            self._put_off(waiter, decision)
            return decision
        try:
            granted = self._settle(call, situation, decision, now)
        except Answer as answer:
            self._fail(waiter, answer)
            return None
        self._queues[call.workload].drop(waiter)
        assert waiter.future is not None
        waiter.future.set_result(granted)
        return None

    def _fail(self, waiter: Waiter, answer: Answer) -> None:
        self._queues[waiter.call.workload].drop(waiter)
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_exception(answer)

    def _ends(self, waiter: Waiter) -> float:
        patience = waiter.situation.patience
        deadline = waiter.call.deadline_s
        return waiter.asked_at + (patience if deadline is None else min(patience, deadline))

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


def _give_back(future: "asyncio.Future[Grant | RelayGrant]") -> None:
    """Somebody left who may just have been granted room."""
    if future.done() and not future.cancelled() and future.exception() is None:
        granted = future.result()
        if isinstance(granted, Grant):
            with granted.permit:
                pass
