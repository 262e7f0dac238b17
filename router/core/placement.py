"""Where a call runs: the one place all policy is in.

`place` takes what is known and returns what to do. It has no clock, does no I/O and changes nothing. Order of thought:
which nodes serve the model, which of them hold the prompt, which are shaped for the workload (chat takes others when
none of those is usable), which are usable, which have room; then, with none left, patience, the relay, and the reason
to refuse.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec

from router.core.call import Call, Workload
from router.core.node import PANIC_S, Node, State

UNTOLD_BATCH_SEQUENCES = 4
"""Batch calls at once on a node that tells neither KV tokens nor sequences: it stays fed and is not swamped."""

ASK_AGAIN_S = 0.25
"""A wait that nothing else ends, because a trial call is under way, is looked at again after this long."""


class WaitReason(StrEnum):
    """Why a call waits. What a batch that waits is explained by."""

    NO_ROOM = "no_room"
    CHAT_WAITS = "chat_waits"
    ENGINE_QUEUE = "engine_queue"
    NODES_DOWN = "nodes_down"
    NODES_BUSY = "nodes_busy"


class RelayCause(StrEnum):
    """Why a call goes to the relay. Metric label."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT = "context"
    NODES_DOWN = "nodes_down"
    NO_ROOM = "no_room"
    NODE_FAILED = "node_failed"
    OWNER = "owner"


class RefuseReason(StrEnum):
    """Why a call is refused."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT = "context"
    NO_ROOM = "no_room"
    NODES_DOWN = "nodes_down"
    NODE_FAILED = "node_failed"
    OWNER_GONE = "owner_gone"
    DEADLINE = "deadline"


class Run(msgspec.Struct, frozen=True):
    """Send it to this node now."""

    node: Node


class Wait(msgspec.Struct, frozen=True):
    """Ask again when something changes, or at `until`."""

    reason: WaitReason
    until: float | None = None


class Relay(msgspec.Struct, frozen=True):
    """Send it to the relay now."""

    cause: RelayCause


class Refuse(msgspec.Struct, frozen=True):
    """Nobody will answer it. `context` is the longest there is, in tokens."""

    reason: RefuseReason
    context: int | None = None


Decision = Run | Wait | Relay | Refuse


class Situation(msgspec.Struct, kw_only=True):
    """What is known of one call beside the nodes.

    `waited` and `patience` in seconds; `tried` names nodes that failed this call; `relay` says whether a relay is
    mapped for it; `chat_waits` whether interactive calls for the same model wait for room; `turn` breaks ties.
    """

    waited: float = 0.0
    patience: float = 2.0
    tried: Collection[str] = ()
    relay: bool = False
    chat_waits: bool = False
    turn: int = 0


def place(call: Call, nodes: Sequence[Node], now: float, situation: Situation) -> Decision:
    """Decide what to do with a call. Total: every input has an answer."""
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
    shaped = [node for node in holding if call.workload in node.spec.pools] or holding
    untried = [node for node in shaped if node.name not in situation.tried] if situation.tried else shaped
    if not untried:
        return Relay(RelayCause.NODE_FAILED) if situation.relay else Refuse(RefuseReason.NODE_FAILED)
    ready = [node for node in untried if node.usable(now)]
    if not ready and call.workload is Workload.INTERACTIVE:
        ready = [node for node in holding if node.name not in situation.tried and node.usable(now)]
    if not ready and not situation.relay:
        ready = [node for node in untried if node.usable(now, panic=True)]
    if not ready:
        return _none_usable(untried, situation, now)
    return _fit(call, ready, situation)


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
    contexts = [node.context(call.model) for node in serving]
    holding = [node for context, node in zip(contexts, serving, strict=True) if context is None or context > needed]
    if holding or call.least_tokens >= needed:
        return holding
    longest = max(context or 0 for context in contexts)
    if longest <= call.least_tokens:
        return []
    return [node for context, node in zip(contexts, serving, strict=True) if context == longest]


def _none_usable(nodes: Sequence[Node], situation: Situation, now: float) -> Decision:
    refusing = [node for node in nodes if node.state in (State.READY, State.STARTING)]
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


def _fit(call: Call, ready: Sequence[Node], situation: Situation) -> Decision:
    batch = call.workload is Workload.BATCH
    if not call.sequences:
        return Run(_best(ready, situation.turn))
    fitting = [node for node in ready if node.budget.fits(node.room_for(call), call.workload)]
    yielding = batch and situation.chat_waits
    if batch:
        fitting = [node for node in fitting if _takes_batch(node, chat_waits=yielding)]
    if fitting:
        return Run(_best(fitting, situation.turn))
    if situation.waited >= situation.patience:
        return Relay(RelayCause.NO_ROOM) if situation.relay else Refuse(RefuseReason.NO_ROOM)
    if yielding:
        return Wait(WaitReason.CHAT_WAITS)
    queued = batch and any(node.load.waiting for node in ready)
    return Wait(WaitReason.ENGINE_QUEUE if queued else WaitReason.NO_ROOM)


def _takes_batch(node: Node, *, chat_waits: bool) -> bool:
    if node.load.waiting or (chat_waits and Workload.INTERACTIVE in node.spec.pools):
        return False
    if node.budget.tokens is None and node.budget.sequences is None:
        return node.budget.held(Workload.BATCH).sequences < UNTOLD_BATCH_SEQUENCES
    return True


def _best(nodes: Sequence[Node], turn: int) -> Node:
    """The least used; a queue or failures at the engine count against it; ties go round.

    Shares are compared only where every node tells a capacity, else sequences: unknown is not empty.
    """
    count = len(nodes)
    if count == 1:
        return nodes[0]
    comparable = all(node.budget.told for node in nodes)
    burdens = [
        (_burden(node, comparable=comparable), node.budget.running(), (index - turn) % count, index)
        for index, node in enumerate(nodes)
    ]
    return nodes[min(burdens)[3]]


def _burden(node: Node, *, comparable: bool) -> float:
    used = node.budget.used() if comparable else 0.0
    return used + 0.25 * node.faults + (1.0 if node.load.waiting else 0.0)
