"""One node as the dashboard shows it: its room as parts of a bar, what runs on it in which phase, its pace.

And what it gave back, in words.
"""

from collections.abc import Callable
from typing import Any

from router.core.budget import Budget, Permit, Phase, kept_back
from router.core.call import Workload
from router.core.node import Node
from router.core.yielding import Mode

MOST_CALLS = 24
"""Running calls of one node that are shown one by one."""
MOST_MODELS = 16
_PHASES = {
    (workload is Workload.INTERACTIVE, phase is Phase.PREFILL): f"{workload}_{phase}"
    for workload in Workload
    for phase in Phase
}


class Clock:
    """Tells moments of a steady clock in unix seconds. A step of the wall clock of over a second is followed."""

    def __init__(self, steady: Callable[[], float], wall: Callable[[], float]) -> None:
        self.steady, self.wall = steady, wall
        self._offset = wall() - steady()

    def follow(self) -> None:
        """Look whether the wall clock was set."""
        offset = self.wall() - self.steady()
        if abs(offset - self._offset) > 1.0:
            self._offset = offset

    def unix(self, steady: float) -> float:
        """When a moment of the steady clock was."""
        return round(steady + self._offset, 1)


def card(node: Node, clock: Clock, owns: Callable[[str], bool]) -> dict[str, Any]:
    """How a node stands. `owns` says whether a caller's name may be told."""
    permits = list(node.budget)
    contexts = [context for model in node.models() if (context := node.context(model)) is not None]
    load, pace = node.load, node.pace
    return {
        "engine": node.facts.engine,
        "version": node.facts.version,
        "pools": sorted(node.spec.pools),
        "models": node.models()[:MOST_MODELS],
        "context": max(contexts, default=None),
        "state": str(node.state),
        "cause": node.cause[:512],
        "since": clock.unix(node.since) if node.since > 0 else None,
        "room": room(node.budget, permits),
        "phases": phases(permits),
        "foreign": node.budget.foreign.sequences,
        "load": [load.running, load.waiting, None if load.used is None else round(load.used, 3)],
        "unloaded_s": _rounded(pace.unloaded_s),
        "objective_s": _rounded(pace.objective_s(None)),
        "calls": [_shown(permit, clock, owns) for permit in sorted(permits, key=_began)[:MOST_CALLS]],
    }


def room(budget: Budget, permits: list[Permit]) -> dict[str, Any]:
    """Who holds what of it, in KV tokens, or in sequences where the node tells no tokens; `unit` None: it tells none.

    `reserve` is what batch leaves alone and nobody holds now, `free` the rest.
    """
    by_tokens = budget.tokens is not None
    capacity = budget.tokens if by_tokens else budget.sequences
    parts = {"interactive": 0, "prefill": 0, "decode": 0}
    for permit in permits:
        size = permit.room.tokens if by_tokens else permit.room.sequences
        parts["interactive" if permit.workload is Workload.INTERACTIVE else permit.phase] += size
    foreign = budget.foreign.tokens if by_tokens else budget.foreign.sequences
    told: dict[str, Any] = {"unit": None, "capacity": capacity, "foreign": foreign, **parts}
    if capacity is not None:
        told["unit"] = "tokens" if by_tokens else "sequences"
        left = max(0, capacity - sum(parts.values()) - foreign)
        kept = max(0, kept_back(capacity, budget.reserve) - parts["interactive"] - foreign)
        told["reserve"] = min(left, kept)
        told["free"] = left - told["reserve"]
    return told


def phases(permits: list[Permit]) -> dict[str, int]:
    """How many calls run, by workload and phase."""
    counts = dict.fromkeys(_PHASES.values(), 0)
    for permit in permits:
        counts[_PHASES[permit.workload is Workload.INTERACTIVE, permit.spoke_at is None]] += 1
    return counts


def take_back(node: Node, permit: Permit, line: str | None, mode: Mode) -> str:
    """A take-back in words: what made way, and how much of its prompt the node has kept."""
    past, whole_s = permit.past, node.pace.prefill_s(permit.prompt_tokens)
    what = line or "a batch call"
    if mode is not Mode.ENFORCE:
        return f"shadow: would have taken back {what} in {permit.phase} for chat"
    if past is None or not whole_s:
        return f"took back {what} in {permit.phase} for chat"
    kept = round(permit.prompt_tokens * min(1.0, past.read_s / whole_s))
    return f"took back {what} in {permit.phase} for chat, {kept:,} of {permit.prompt_tokens:,} prompt tokens kept"


def _began(permit: Permit) -> float:
    return permit.began_at


def _shown(permit: Permit, clock: Clock, owns: Callable[[str], bool]) -> list[Any]:
    """Workload, phase, when it began, prompt tokens, model, whose it is."""
    call = permit.call
    model, caller = ("", "") if call is None else (call.model[:128], call.caller if owns(call.caller) else "")
    return [permit.workload, permit.phase, clock.unix(permit.began_at), permit.prompt_tokens, model, caller]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
