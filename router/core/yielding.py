"""How batch makes way for chat on a node both use: what is taken back, and when batch may begin.

A prompt that is being read delays whoever comes after it, a call that writes its answer hardly does. So batch in
prefill is taken back when chat comes, batch in decode only when there is no room without it; and a long batch prompt
begins only where nobody in a chat would notice. Where chat hardly pauses, batch gets a trickle: a small share of the
time it waited, less what pauses let it read, saved up until it lasts for one prompt, which then is not taken back.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from router.core.budget import Permit, Phase, Room
from router.core.call import Call, Workload
from router.core.node import Node
from router.core.pace import GAP, Past

__all__ = ["Around", "Begin", "Mode", "Policy", "WaitReason", "begin", "victims"]

SMALL_TOKENS = 512
"""A prompt of no more than this many tokens, all batch prompts in prefill together, is read in one step."""
TRICKLE = 0.03
"""Share of the time batch waits for chat that it gets back. Below 1 - 0.95, so that a p95 objective bears it."""
TRICKLE_MOST_S = 120.0
"""So much is saved up at most."""
STRETCH = 2.0
"""Answers left over on a node chat has moved from may take so many times their usual time. Below GAP."""
UNTOLD_S = 10.0
"""So much is saved up for a prompt of a length that was never read here, so that once it is."""
LOSSES_MOST = 3.0
"""A call whose prompt was read for nothing this many times is not taken back again."""
TIMES_MOST = 200
"""Nor is one that was taken back this often, whatever was kept."""
LIKELY = 0.5
"""Where nothing of a taken-back prompt is kept, batch begins when it is more likely to get through than not."""


class WaitReason(StrEnum):
    """Why a call waits. What a batch that waits is explained by. Metric label."""

    NO_ROOM = "no_room"
    CHAT_WAITS = "chat_waits"
    CHAT_PREFILL = "chat_prefill"
    CHAT_DECODE = "chat_decode"
    CHAT_EXPECTED = "chat_expected"
    BATCH_PREFILL = "batch_prefill"
    PACKING = "packing"
    KEPT_ELSEWHERE = "kept_elsewhere"
    ENGINE_QUEUE = "engine_queue"
    NODES_DOWN = "nodes_down"
    NODES_BUSY = "nodes_busy"


FOR_CHAT = frozenset((WaitReason.CHAT_DECODE, WaitReason.CHAT_EXPECTED, WaitReason.PACKING, WaitReason.CHAT_PREFILL))
"""Waits that count towards the trickle."""


class Mode(StrEnum):
    """Whether take-backs are done, or only counted."""

    ENFORCE = "enforce"
    SHADOW = "shadow"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator says of yielding.

    `ttft_p95_s` is the objective for an interactive call's first token in seconds, None to derive it from what the node
    does unloaded; `lend` lets batch use idle nodes of the interactive pool; `degraded_chat` lets chat use degraded
    nodes when no other has room.
    """

    ttft_p95_s: float | None = None
    mode: Mode = Mode.ENFORCE
    lend: bool = False
    degraded_chat: bool = True


class Begin(msgspec.Struct, frozen=True):
    """Whether a batch call may begin on a node: not if there is a `reason`; `firm` if it is not to be taken back."""

    reason: WaitReason | None = None
    firm: bool = False


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """How a node stands among others.

    `elsewhere`: batch has nodes that chat does not use, so it needs no trickle here; `left_over`: chat is packed on
    others, and the chats here get no new ones.
    """

    elsewhere: bool = False
    left_over: bool = False


ALONE = Around()
NOW = Begin()
FIRMLY = Begin(firm=True)


def protected(past: Past | None) -> bool:
    """Whether a call has been taken back enough, or has no time for it."""
    return past is not None and (past.urgent or past.losses >= LOSSES_MOST or past.times >= TIMES_MOST)


def begin(  # what is known, one by one
    call: Call, node: Node, past: Past | None, policy: Policy, now: float, around: Around = ALONE
) -> Begin:
    """Whether a batch call that has room may begin on that node, for what chat there would notice.

    Chats that are left over bear a prompt beside them once they have written for long enough.
    """
    elsewhere = around.elsewhere
    budget = node.budget
    if not budget.chats and Workload.INTERACTIVE not in node.spec.pools:
        return NOW
    if budget.reading:
        return Begin(WaitReason.CHAT_PREFILL)
    reading = sum(other.prompt_tokens for other in budget.batch if other.phase is Phase.PREFILL)
    if reading and reading + call.prompt_tokens > SMALL_TOKENS:
        return Begin(WaitReason.BATCH_PREFILL)
    firm = protected(past)
    left_s = node.left_s(call, past)
    if budget.chats:
        if _unnoticed(node, left_s) or (not elsewhere and (firm or _saved(node, left_s))):
            return FIRMLY
        return NOW if around.left_over and _borne(node, left_s, now) else Begin(WaitReason.CHAT_DECODE)
    if firm:
        return FIRMLY
    begins = _between_chats(node, left_s, policy, now)
    return FIRMLY if begins.reason is not None and not elsewhere and _saved(node, left_s) else begins


def _between_chats(node: Node, left_s: float | None, policy: Policy, now: float) -> Begin:
    """Nobody chats here now; somebody may come while the prompt is read."""
    pace = node.pace
    if left_s is None:
        return NOW
    objective, unloaded = pace.objective_s(policy.ttft_p95_s), pace.unloaded_s
    slow = objective is not None and unloaded is not None and unloaded + pace.residue_s > objective
    wanted = 1.0 - TRICKLE if slow else LIKELY if pace.kept is not None and pace.kept < LIKELY else 0.0
    if not wanted or pace.silence(left_s, now) >= wanted:
        return NOW
    return Begin(WaitReason.CHAT_EXPECTED)


def _unnoticed(node: Node, left_s: float | None) -> bool:
    """Whether reading fits between two tokens of the chats that run."""
    gap_s = node.pace.gap_s
    return left_s is not None and gap_s is not None and left_s <= (GAP - 1.0) * gap_s


def _borne(node: Node, left_s: float | None, now: float) -> bool:
    """Whether every answer written there, with this prompt read beside it, stays below STRETCH times its usual time."""
    return left_s is not None and all(
        permit.spoke_at is not None
        and permit.stalled_s + left_s <= (STRETCH - 1.0) * (now - permit.spoke_at - permit.stalled_s)
        for permit in node.budget.chatting()
    )


def _saved(node: Node, left_s: float | None) -> bool:
    """Whether the trickle has saved up what reading takes."""
    return node.trickle_s >= min(UNTOLD_S if left_s is None else left_s, TRICKLE_MOST_S)


def victims(call: Call, node: Node, policy: Policy, now: float) -> tuple[Permit, ...] | None:
    """Batch permits to take back so that an interactive call runs well on the node; None if it has no room even then.

    Those in prefill, unless they are through before the objective is missed; then, while room is short, the rest: what
    reads before what writes, least progress first, newest first.
    """
    budget, room = node.budget, node.room_for(call)
    free = [one for one in budget.batch if not protected(one.past) and not (one.firm and now < one.firm_until)]
    reading = [permit for permit in free if permit.phase is Phase.PREFILL]
    taken = reading if _felt(node, reading, policy, now) else []
    if budget.fits(room, call.workload, _room(taken)):
        return tuple(taken)
    rest = [permit for permit in free if permit not in taken]
    for permit in sorted(rest, key=_progress, reverse=True):
        taken = [*taken, permit]
        if budget.fits(room, call.workload, _room(taken)):
            return tuple(taken)
    return None


def _felt(node: Node, reading: Sequence[Permit], policy: Policy, now: float) -> bool:
    """Whether chat would wait too long for what is left of these prompts."""
    if sum(permit.prompt_tokens for permit in reading) <= SMALL_TOKENS:
        return False
    pace = node.pace
    objective, unloaded = pace.objective_s(policy.ttft_p95_s), pace.unloaded_s
    if objective is None or unloaded is None:
        return True
    left = 0.0
    for permit in reading:
        whole = pace.known_s(permit.prompt_tokens)
        if whole is None:
            return True
        kept_s = 0.0 if permit.past is None else permit.past.read_s
        rest = whole - kept_s - (now - permit.began_at)
        if rest <= 0.0:
            return True  # it takes longer than was thought, and nobody knows how long
        left += rest
    return unloaded + left > objective


def _progress(permit: Permit) -> tuple[bool, float, float]:
    """Larger for what has done less."""
    return permit.spoke_at is None, permit.began_at if permit.spoke_at is None else permit.spoke_at, permit.began_at


def _room(permits: Iterable[Permit]) -> Room:
    rooms = [permit.room for permit in permits]
    return Room(sum(room.tokens for room in rooms), sum(room.sequences for room in rooms))
