"""Cases: one policy with one setting of its knob, on one workload, fleet, load and seed.

Each can run in a process alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from loadtests.colocation.virtual import baselines, bounds, elastic, traces
from loadtests.colocation.virtual.ask import Ask
from loadtests.colocation.virtual.product import Product
from loadtests.colocation.virtual.profiles import FLEETS, PROFILES, SLOS, Profile, Slo
from loadtests.colocation.virtual.score import Score, kept
from loadtests.colocation.virtual.traces import Row
from loadtests.colocation.virtual.world import Policy, Window, World, play

BATCH_ONLY_S = 1200.0
"""How long a fleet that does nothing but batch is watched for the ceiling."""
SWITCH_MINUTES = 0.25
"""What a node that changes hands costs the timetable, in node-minutes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all cases of a run share. `load` is the peak of chat as a share of what the fleet holds of chat alone."""

    folder: Path
    workload: str
    fleet: str
    load: float
    slo: int = 0
    warm_s: float = 300.0
    minutes: float | None = None
    grace_s: float = 120.0
    prefill: float = 1.0

    @property
    def profiles(self) -> list[Profile]:
        """The machines."""
        return [PROFILES[name].scaled(self.prefill) for name in FLEETS[self.fleet]]

    @property
    def objective(self) -> Slo:
        """The pair of times chat must keep."""
        return SLOS[FLEETS[self.fleet][0]][self.slo]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`policy` names one of POLICIES, `value` its knob."""

    setting: Setting
    seed: int
    policy: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A policy to compare: how it is made, what its knob is called and which values it is tried at."""

    make: Callable[[float, "Case"], Policy]
    knob: str = ""
    values: Callable[[int], Sequence[float]] = lambda nodes: (0,)
    engine: Callable[[Profile, float], Profile] = lambda profile, value: profile


def _each(*per_node: float) -> Callable[[int], Sequence[float]]:
    return lambda nodes: [many * nodes for many in per_node]


def _same(*values: float) -> Callable[[int], Sequence[float]]:
    return lambda nodes: values


def _ordered(profile: Profile, value: float) -> Profile:
    return replace(profile, priority=True)


POLICIES: dict[str, Kind] = {
    "chat alone": Kind(make=lambda value, case: baselines.Alone()),
    "direct": Kind(
        make=lambda value, case: baselines.Direct(int(value)), knob="lines in flight", values=_each(1, 2, 4, 8, 16)
    ),
    "priority": Kind(
        make=lambda value, case: baselines.Direct(int(value), 10),
        knob="lines in flight",
        values=_each(1, 2, 4, 8, 16),
        engine=_ordered,
    ),
    "priority + threshold": Kind(
        make=lambda value, case: baselines.Direct(4 * len(case.setting.profiles), 10),
        knob="long-prefill threshold",
        values=_same(128, 256, 512, 1024),
        engine=lambda profile, value: replace(profile, priority=True, threshold=int(value)),
    ),
    "one prefill + threshold": Kind(
        make=lambda value, case: baselines.Direct(len(case.setting.profiles), 10),
        knob="long-prefill threshold",
        values=_same(128, 256, 512),
        engine=lambda profile, value: replace(profile, priority=True, threshold=int(value)),
    ),
    "saturation gate": Kind(
        make=lambda value, case: baselines.Gate(8 * len(case.setting.profiles), value),
        knob="opens below",
        values=_same(1.0, 0.8, 0.6, 0.34, 0.2),
    ),
    "probabilistic gate": Kind(
        make=lambda value, case: baselines.Gate(int(value), sheds=True, seed=case.seed),
        knob="lines offered",
        values=_each(4, 8),
    ),
    "static split": Kind(
        make=lambda value, case: baselines.Split(int(value), 8 * (len(case.setting.profiles) - int(value))),
        knob="chat nodes",
        values=lambda nodes: range(1, nodes),
    ),
    "hindsight partition": Kind(
        make=lambda value, case: elastic.Timetable(hindsight(case, value)),
        knob="points given up",
        values=_same(0.5, 1, 3, 10),
    ),
    "prototype": Kind(
        make=lambda value, case: elastic.Pack(int(value)), knob="chats a node", values=_same(8, 12, 16, 24, 32, 48)
    ),
    "ebbtide": Kind(
        make=lambda value, case: Product(value or None),
        knob="ttft_p95_ms",
        values=_same(0, 100, 200, 400, 700, 1000, 2000),
    ),
}


def run(case: Case) -> Score:
    """Play a case."""
    kind = POLICIES[case.policy]
    value = 0.0 if case.value is None else case.value
    profiles = [kind.engine(profile, value) for profile in case.setting.profiles]
    policy = kind.make(value, case)
    setting = case.setting
    chats, backlog = asks(setting, case.seed), lines(setting, case.seed)
    return play(policy, profiles, (chats, backlog), window(setting), setting.objective)


@cache
def rows(setting: Setting) -> tuple[list[Row], list[Row]]:
    """The chat trace and the batch, as read."""
    files = traces.WORKLOADS[setting.workload]
    prefixes = setting.folder / files.prefixes if files.prefixes else None
    return traces.read(setting.folder / files.chat, prefixes), traces.read(setting.folder / files.batch)


@cache
def day(setting: Setting) -> Sequence[float]:
    """The curve over the window, if the workload has one."""
    column = traces.WORKLOADS[setting.workload].curve
    return traces.curve(setting.folder / traces.RATES, column) if column else (1.0,)


def span(setting: Setting) -> float:
    """Seconds of trace that are played."""
    whole = rows(setting)[0][-1].t + 1e-3
    return whole if setting.minutes is None else min(whole, 60 * setting.minutes)


def window(setting: Setting) -> Window:
    """What is measured."""
    until = span(setting)
    return Window(min(setting.warm_s, until / 4), until, setting.grace_s)


@cache
def chat_rates(setting: Setting) -> list[float]:
    """x* of every node."""
    chat = bounds.shape([(row.prompt, row.output) for row in rows(setting)[0]])
    return [bounds.chat_rate(profile, setting.objective, chat) for profile in setting.profiles]


@cache
def asks_chosen(setting: Setting, seed: int) -> list[tuple[int, int, Row]]:
    """The requests of a seed. Those no node could hold are left out for everybody."""
    most = max(profile.holds for profile in setting.profiles)
    trace = [row for row in rows(setting)[0] if row.t < span(setting)]
    factor = setting.load * sum(chat_rates(setting)) / (len(trace) / span(setting))
    chosen = traces.thinned(trace, factor, seed, day(setting), span(setting))
    return [one for one in chosen if one[2].prompt + one[2].output <= most]


def asks(setting: Setting, seed: int) -> list[Ask]:
    """Fresh asks: a play writes into them."""
    return traces.chats(asks_chosen(setting, seed), rows(setting)[0])


def lines(setting: Setting, seed: int) -> Iterator[Ask]:
    """The backlog."""
    return traces.backlog(rows(setting)[1], max(profile.holds for profile in setting.profiles), seed)


@cache
def batch_rates(setting: Setting) -> list[float]:
    """Tokens a second of every node that does nothing but batch, its KV as full as it gets; the best of two depths."""
    found: dict[Profile, float] = {}
    for profile in setting.profiles:
        if profile not in found:
            found[profile] = max(_batch_rate(setting, profile, depth) for depth in (8, 24))
    return [found[profile] for profile in setting.profiles]


def _batch_rate(setting: Setting, profile: Profile, depth: int) -> float:
    line_s = Window(300.0, BATCH_ONLY_S, 0.0)
    lines_of = traces.backlog(rows(setting)[1], profile.holds, 0)
    return play(baselines.Direct(depth), [profile], ([], lines_of), line_s, setting.objective).good


def fluid(setting: Setting, seed: int) -> float:
    """The fluid bound of a seed's load, tokens a second."""
    seen = window(setting)
    rates = bounds.binned([row.t for _, _, row in asks_chosen(setting, seed)], seen.warm_s, seen.until_s)
    return bounds.fluid(rates, chat_rates(setting), batch_rates(setting))


def hindsight(case: Case, points: float) -> list[int]:
    """The timetable that gives up at most so many points of what chat alone attains."""
    met = met_by_minute(case.setting, case.seed)
    given_up = points / 100 * len(asks_chosen(case.setting, case.seed))
    return bounds.timetable(met, SWITCH_MINUTES, round(sum(met[-1]) - given_up))


@cache
def met_by_minute(setting: Setting, seed: int) -> list[list[int]]:
    """For k = 0, 1, ... nodes of chat alone: how many chats of each minute keep the objective."""
    minutes = int(span(setting) // 60) + 1
    table = [[0] * minutes]
    for k in range(1, len(setting.profiles) + 1):
        chats = asks(setting, seed)
        asked = (chats, lines(setting, seed))
        play(baselines.Alone(), setting.profiles[:k], asked, window(setting), setting.objective)
        row = [0] * minutes
        for ask in chats:
            row[int(ask.due // 60)] += kept(ask, setting.objective)
        table.append(row)
    return table


__all__ = ["POLICIES", "Case", "Kind", "Setting", "World", "fluid", "run"]
