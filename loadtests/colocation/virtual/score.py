"""What a play came to: what chat felt and what batch got done.

Rules: a chat that was refused, or has not ended, is a miss of the objective, and it counts in the quantiles of time to
first token as endless. Both tokens and both axes are always told together.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, isinf, nan
from statistics import fmean
from typing import TYPE_CHECKING

from loadtests.colocation.virtual.ask import Ask
from loadtests.colocation.virtual.profiles import Slo

if TYPE_CHECKING:
    from loadtests.colocation.virtual.world import World


@dataclass(frozen=True, kw_only=True)
class Score:
    """Times in seconds, `attained` and `waste` as shares, batch in tokens a second.

    `good` tokens are prompts and answers of ended lines and what live lines have now; `computed` is all that was
    computed for batch. `waste` is the share of it that had been computed before: lost to take-backs and preemptions
    and not given back by the prefix cache.
    """

    chats: int
    attained: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    tpot_p95: float
    stall_p95: float
    refused: int
    unfinished: int
    good: float
    computed: float
    waste: float
    lines: int
    tries: int
    preempted: int
    busy: float

    def told(self) -> dict[str, float]:
        """All of it, for a machine."""
        return asdict(self)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else nan


def kept(ask: Ask, slo: Slo) -> bool:
    """Whether a chat kept both parts of the objective."""
    return ask.ended_at is not None and ask.first_at - ask.due <= slo.ttft and ask.tpot <= slo.tpot


def score(world: "World", chats: Sequence[Ask], slo: Slo, before: dict[str, float], after: dict[str, float]) -> Score:
    """Count what happened between two tallies."""
    window = world.window
    seconds = window.until_s - window.warm_s
    counted = [ask for ask in chats if window.warm_s <= ask.due < window.until_s]
    ended = [ask for ask in counted if ask.ended_at is not None]
    ttft = [inf if ask.ended_at is None else ask.first_at - ask.due for ask in counted]
    grown = {key: after[key] - before[key] for key in after}
    return Score(
        chats=len(counted),
        attained=sum(kept(ask, slo) for ask in counted) / len(counted) if counted else 1.0,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p95=quantile(ttft, 0.95),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p95=quantile([ask.tpot for ask in ended], 0.95),
        stall_p95=quantile([ask.stall for ask in ended], 0.95),
        refused=sum(ask.refused for ask in counted),
        unfinished=sum(ask.ended_at is None and not ask.refused for ask in counted),
        good=grown["good"] / seconds,
        computed=grown["computed"] / seconds,
        waste=_waste(world),
        lines=int(grown["lines"]),
        tries=int(grown["tries"]),
        preempted=int(grown["preempted"]),
        busy=grown["busy_s"] / seconds / len(world.engines),
    )


def _waste(world: "World") -> float:
    """Of all batch tokens computed, how many had been computed before."""
    spent = sum(ask.spent for ask in world.lines)
    again = sum(max(0, ask.spent - ask.prompt - ask.output) for ask in world.lines)
    return again / spent if spent else 0.0


def mean(scores: Sequence[Score]) -> Score:
    """Field by field over seeds."""
    return Score(**{field.name: fmean(getattr(one, field.name) for one in scores) for field in fields(Score)})


def spread(scores: Sequence[Score], name: str) -> tuple[float, float]:
    """The least and the most of one field over seeds."""
    values = [getattr(one, name) for one in scores]
    return min(values), max(values)


def seconds(value: float) -> str:
    """A time for people."""
    if isinf(value):
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
