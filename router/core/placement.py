"""Where a call runs: the one place all policy is in.

`place` takes what is known and returns what to do. It has no clock, does no I/O and changes nothing. Order of thought:
which nodes serve the model, which of them hold the prompt, which are shaped for the workload (chat takes others when
none of those is usable), which are usable, which have room, or would have it if batch were taken back; then, with none
left, patience, the relay, and the reason to refuse. Most chats need no more than `at_once` asks.

What may be decided is in `decision`.

What batch may do on a node that chat uses is said in `yielding`, how many nodes chat is packed on in `packing`.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter

from router.core.call import BATCH, INTERACTIVE, Call
from router.core.decision import Decision, Refuse, RefuseReason, Relay, RelayCause, Run, Situation, TakeBack, Wait
from router.core.node import PANIC_S, Node, State
from router.core.standing import READY
from router.core.states import RAMP_S, TERMS, Access
from router.core.yielding import FOR_CHAT, Around, Begin, Mode, Policy, WaitReason, begin, victims

__all__ = [
    "Decision",
    "Refuse",
    "RefuseReason",
    "Relay",
    "RelayCause",
    "Run",
    "Situation",
    "TakeBack",
    "Wait",
    "WaitReason",
    "place",
]

UNTOLD_BATCH_SEQUENCES = 4
"""Batch calls at once on a node that tells neither KV tokens nor sequences: it stays fed and is not swamped."""

UP_OR_STARTING = frozenset((State.STARTING, State.READY, State.BUSY, State.DEGRADED))
LEAST_BAD = frozenset((Access.LAST, Access.CHOSEN))
"""Nodes that get calls when no other has room."""
UNWELL = frozenset(state for state, terms in TERMS.items() if terms.interactive in LEAST_BAD)
"""States in which a node gets chat when no other has room."""
FAITHFUL = 8.0
"""A prompt that was read in part waits for its node up to so many times what was read, while others use the rest."""
ASK_AGAIN_S = 0.25
"""A wait that nothing else ends, because a trial call is under way, is looked at again after this long."""

Burdened = tuple[float, int, Node]
"""A node with how used it is and how many sequences it runs."""
BURDEN = itemgetter(0, 1)


def place(call: Call, nodes: Sequence[Node], now: float, situation: Situation) -> Decision:
    """Decide what to do with a call. Total: every input has an answer."""
    if call.workload is INTERACTIVE and situation.packed is None and call.bound_to is None and not situation.tried:
        found = at_once(call, nodes, now, situation)
        if found is not None:
            return found
    return weigh(call, nodes, now, situation)


def at_once(call: Call, nodes: Sequence[Node], now: float, situation: Situation) -> Run | TakeBack | None:
    """What `weigh` says of a chat that may go to any node and is not packed, found in one pass over the nodes.

    Those that are shaped for chat, well and usable, hold it and have room come before all others. None with no such
    node: then there is more to weigh.
    """
    model, sequences = call.model, call.sequences
    needed = call.context_tokens or call.prompt_tokens
    tokens = call.prompt_tokens + call.output_tokens * sequences
    fitting: list[Burdened] = []
    untold = 0
    for node in nodes:
        if node.chat_contexts.get(model, 0) <= needed:
            continue
        asks = node.state is not READY or now < node.refused_until or now < node.back_at + RAMP_S
        if asks and (node.state in UNWELL or not node.usable(now)):
            continue
        budget = node.budget
        room, places = budget.tokens, budget.sequences
        taken, running = budget.taken_tokens, budget.taken_sequences
        full = (room is not None and taken + tokens > room) or (places is not None and running + sequences > places)
        if full and not budget.fits(node.room_for(call), INTERACTIVE):
            continue  # nor with an answer as short as the context leaves it
        if room is None and places is None:
            untold += 1
        used = taken / room if room else 0.0
        if running and places:
            used = max(used, running / places)
        if node.faults or node.load.waiting:
            used += _strain(node)
        fitting.append((used, running, node))
    if not fitting or not sequences or (untold and untold < len(fitting)):
        return None
    node = _least(fitting, situation.turn)
    return _run_chat(call, node, now, situation.policy) if node.budget.batch else Run(node)


def weigh(call: Call, nodes: Sequence[Node], now: float, situation: Situation) -> Decision:
    """The whole order of thought, for any call."""
    serving = [node for node in nodes if node.serves(call.model)]
    if call.bound_to is not None:
        serving = [node for node in serving if node.name == call.bound_to]
        if not serving:
            return Refuse(RefuseReason.OWNER_GONE)
    if not serving:
        return _unserved(nodes, situation, now)
    holding = _holding(call, serving)
    if not holding:
        longest = max(node.context(call.model) or 0 for node in serving)
        return Relay(RelayCause.CONTEXT) if situation.relay else Refuse(RefuseReason.CONTEXT, longest)
    shaped = _shaped(call, holding, situation)
    untried = [node for node in shaped if node.name not in situation.tried] if situation.tried else shaped
    if not untried:
        return Relay(RelayCause.NODE_FAILED) if situation.relay else Refuse(RefuseReason.NODE_FAILED)
    ready = _usable(call, holding, untried, now, situation)
    if not ready:
        return _none_usable(untried, situation, now)
    if not call.sequences:
        return Run(_best(ready, situation.turn))
    if call.workload is INTERACTIVE:
        return _chat(call, ready, now, situation)
    return _batch(call, ready, now, situation)


def _usable(
    call: Call, holding: Sequence[Node], untried: Sequence[Node], now: float, situation: Situation
) -> Sequence[Node]:
    """Nodes a call may be sent to now. Chat takes others when none of its own is; with no relay, the least bad."""
    ready = [node for node in untried if node.usable(now)]
    if not ready and call.workload is INTERACTIVE:
        ready = [node for node in holding if node.name not in situation.tried and node.usable(now)]
    if not ready and not situation.relay:
        ready = [node for node in untried if node.usable(now, panic=True)]
    return ready


def _unserved(nodes: Sequence[Node], situation: Situation, now: float) -> Decision:
    """No node is known to serve the model. One that never told what it serves may: that is waited for."""
    if situation.relay:
        return Relay(RelayCause.UNKNOWN_MODEL)
    if all(node.spec.models or node.facts.models for node in nodes):
        return Refuse(RefuseReason.UNKNOWN_MODEL)
    if situation.waited >= situation.patience:
        return Refuse(RefuseReason.NODES_DOWN)
    return Wait(WaitReason.NODES_DOWN, now + ASK_AGAIN_S)


def _holding(call: Call, serving: Sequence[Node]) -> Sequence[Node]:
    """Nodes whose context holds the estimate; if none, the longest, unless even the least count is too long."""
    needed = call.context_tokens or call.prompt_tokens
    model = call.model
    holding = [node for node in serving if (context := node.context(model)) is None or context > needed]
    if holding or call.least_tokens >= needed:
        return holding
    contexts = [node.context(model) for node in serving]
    longest = max(context or 0 for context in contexts)
    if longest <= call.least_tokens:
        return []
    return [node for context, node in zip(contexts, serving, strict=True) if context == longest]


def _none_usable(nodes: Sequence[Node], situation: Situation, now: float) -> Decision:
    refusing = [node for node in nodes if node.state in UP_OR_STARTING]
    if situation.relay and (not refusing or situation.waited >= situation.patience):
        return Relay(RelayCause.NO_ROOM if refusing else RelayCause.NODES_DOWN)
    if situation.waited >= situation.patience:
        return Refuse(RefuseReason.NO_ROOM if refusing else RefuseReason.NODES_DOWN)
    until = min(node.refused_until for node in refusing) if refusing else min(node.retry_at for node in nodes)
    if not situation.relay:
        until = min(until, min(node.failed_at for node in nodes) + PANIC_S)
    return Wait(
        WaitReason.NODES_BUSY if refusing else WaitReason.NODES_DOWN, until if until > now else now + ASK_AGAIN_S
    )


def _shaped(call: Call, holding: Sequence[Node], situation: Situation) -> Sequence[Node]:
    """Nodes of the call's own pool, or else all; an interactive pool that lends counts as batch's while it is idle."""
    lent = situation.policy.lend and call.workload is BATCH
    own = [node for node in holding if call.workload in node.spec.pools or (lent and not node.budget.chats)]
    return own or holding


def packing_order(nodes: Sequence[Node]) -> list[Node]:
    """The order in which chat fills nodes.

    Those batch has no use for first, then where chat is, the last it came to first, then without batch, then where
    least of a prompt was read.
    """

    def key(node: Node) -> tuple[bool, bool, bool, float]:
        budget = node.budget
        since = budget.reads_since() if budget.batch_reading else math.inf
        return BATCH in node.spec.pools, not budget.chats, bool(budget.batch), -since

    return sorted(nodes, key=key)


def _chat(call: Call, ready: Sequence[Node], now: float, situation: Situation) -> Decision:
    """An interactive call: where it has room, without batch if that can be had, by taking batch back if not.

    Nodes that are not well come last; degraded ones not at all while others are usable, or a relay that is better, if
    so chosen.
    """
    well = [node for node in ready if node.access(INTERACTIVE) not in LEAST_BAD]
    if len(well) < len(ready) and not situation.policy.degraded_chat:
        better = [node for node in ready if node.access(INTERACTIVE) is not Access.CHOSEN]
        better = better or [node for node in ready if node.outruns_relay]
        if not better and situation.relay:
            return Relay(RelayCause.DEGRADED)
        ready = better or ready
    for nodes in (ready,) if len(well) == len(ready) else (well, [node for node in ready if node not in well]):
        if (found := _chat_among(call, nodes, now, situation)) is not None:
            return found
    if situation.waited >= situation.patience:
        return Relay(RelayCause.NO_ROOM) if situation.relay else Refuse(RefuseReason.NO_ROOM)
    return Wait(WaitReason.NO_ROOM)


def _chat_among(call: Call, nodes: Sequence[Node], now: float, situation: Situation) -> Run | TakeBack | None:
    packed = situation.packed
    for circle in (nodes,) if packed is None else _circles(call, packing_order(nodes), packed, situation.policy):
        fitting = [node for node in circle if node.budget.fits(node.room_for(call), call.workload)]
        if fitting:
            return _run_chat(call, _best(fitting, situation.turn), now, situation.policy)
    if situation.policy.mode is Mode.ENFORCE:
        for node in nodes if packed is None else packing_order(nodes):
            if node.budget.batch and (taken := victims(call, node, situation.policy, now)) is not None:
                return TakeBack(node, taken)
    return None


def _circles(call: Call, ordered: Sequence[Node], packed: int, policy: Policy) -> Iterator[Sequence[Node]]:
    """Nodes chat is packed on that bear one more and answer in time, then others one by one, then past limits."""
    late = {node: _late_s(call, node, policy) for node in ordered}
    yield [node for node in ordered[:packed] if late[node] <= 0.0 and node.budget.chats < node.bearing.limit]
    for node in ordered[packed:]:
        if late[node] <= 0.0:
            yield [node]
    yield [node for node in ordered if late[node] <= 0.0]
    for node in sorted(ordered, key=late.__getitem__):
        yield [node]


def _late_s(call: Call, node: Node, policy: Policy) -> float:
    """How much later than chats there can bear the prompt is read, after those of chats that came before.

    What is borne is the objective for the first token and, beside answers, what stretches not even short ones too much.
    """
    pace, unread = node.pace, node.budget.unread
    objective, own_s = pace.objective_s(policy.ttft_p95_s), pace.prefill_s(call.prompt_tokens)
    if objective is None or own_s is None:
        return 0.0
    read_s = own_s + ((pace.prefill_s(unread) or 0.0) if unread else 0.0)
    borne_s, stall_s = max(objective, own_s), pace.stall_s
    if node.budget.chats and stall_s is not None:
        borne_s = min(borne_s, stall_s)
    return read_s - borne_s


def _run_chat(call: Call, node: Node, now: float, policy: Policy) -> Run | TakeBack:
    if not node.budget.batch:
        return Run(node)
    taken = victims(call, node, policy, now)
    return TakeBack(node, taken) if taken else Run(node)


def _batch(call: Call, ready: Sequence[Node], now: float, situation: Situation) -> Decision:
    """A batch call: where chat would not notice, first on the node that keeps what was read of it."""
    wait: Wait | None = None
    inner = frozenset(node.name for node in packing_order(ready)[: situation.packed or 0]) if len(ready) > 1 else ()
    elsewhere = any(not node.budget.chats and node.name not in inner for node in ready) if len(ready) > 1 else False
    for node in _preferred(ready, inner, situation):
        around = Around(elsewhere=elsewhere, left_over=situation.packed is not None and node.name not in inner)
        beginning = _beginning(call, node, now, situation, around)
        reason = beginning.reason
        if reason is None:
            return Run(node, beginning.firm)
        if reason is WaitReason.CHAT_DECODE and node.name in inner:
            reason = WaitReason.PACKING
        for_chat = reason in FOR_CHAT
        if wait is None or (for_chat and wait.reason not in FOR_CHAT):
            wait = Wait(reason, now + ASK_AGAIN_S if for_chat else None, node if for_chat and not elsewhere else None)
        if _worth_waiting(node, situation, now):
            wait = wait if for_chat else Wait(WaitReason.KEPT_ELSEWHERE, now + ASK_AGAIN_S)
            break
    if situation.waited >= situation.patience:
        return Relay(RelayCause.NO_ROOM) if situation.relay else Refuse(RefuseReason.NO_ROOM)
    assert wait is not None
    return wait


def _beginning(call: Call, node: Node, now: float, situation: Situation, around: Around) -> Begin:
    """Whether a batch call may begin on that node."""
    if not node.budget.fits(node.room_for(call), call.workload) or _swamped(node):
        return Begin(WaitReason.NO_ROOM)
    if node.load.waiting:
        return Begin(WaitReason.ENGINE_QUEUE)
    if situation.chat_waits and INTERACTIVE in node.spec.pools:
        return Begin(WaitReason.CHAT_WAITS)
    return begin(call, node, situation.past, situation.policy, now, around)


def _preferred(ready: Sequence[Node], inner: Collection[str], situation: Situation) -> list[Node]:
    """The node that keeps what was read; then those without chat, least used; `inner`, full of it; the unwell last."""
    kept_at = situation.past.node if situation.past is not None else None
    count, turn = len(ready), situation.turn
    comparable = _comparable(ready)

    def rank(indexed: tuple[int, Node]) -> tuple[object, ...]:
        index, node = indexed
        burden = _burden(node, comparable=comparable), node.budget.taken_sequences, (index - turn) % count
        bad = node.access(BATCH) in LEAST_BAD
        return bad, node.name != kept_at, node.name in inner, node.budget.chats > 0, *burden

    return [node for _, node in sorted(enumerate(ready), key=rank)]


def _worth_waiting(node: Node, situation: Situation, now: float) -> bool:
    """Whether the node keeps so much of the prompt that waiting for it costs less than reading it elsewhere."""
    past = situation.past
    if past is None or past.node != node.name or past.urgent:
        return False
    return now - past.taken_at < past.read_s * (FAITHFUL if situation.others else 1.0)


def _swamped(node: Node) -> bool:
    budget = node.budget
    return budget.tokens is None and budget.sequences is None and len(budget.batch) >= UNTOLD_BATCH_SEQUENCES


def _best(nodes: Sequence[Node], turn: int) -> Node:
    """The least used; a queue or failures at the engine count against it; ties go round.

    Shares are compared only where every node tells a capacity, else sequences: unknown is not empty.
    """
    comparable = _comparable(nodes)
    return _least([(_burden(node, comparable=comparable), node.budget.taken_sequences, node) for node in nodes], turn)


def _least(burdened: list[Burdened], turn: int) -> Node:
    """The one with the least burden, then the fewest sequences; of several, whose turn it is."""
    first = turn % len(burdened)
    return min(burdened[first:] + burdened[:first], key=BURDEN)[2]


def _comparable(nodes: Sequence[Node]) -> bool:
    return all(node.budget.told for node in nodes)


def _burden(node: Node, *, comparable: bool) -> float:
    return (node.budget.used() if comparable else 0.0) + _strain(node)


def _strain(node: Node) -> float:
    return 0.25 * node.faults + (1.0 if node.load.waiting else 0.0)
