"""Where the room went: one play of Ebbtide's policy, told by the minute.

    python -m loadtests.colocation.virtual.explain --traces FOLDER --workload W2 --fleet F4

Of every stretch of time: chats a second, how many kept the objective, on how many nodes they were packed and what one
is believed to bear, batch calls in prefill and in decode over the fleet, and why batch that waited did so, by share.
"""

from collections import Counter
from collections.abc import Sequence

from loadtests.colocation.virtual import cases
from loadtests.colocation.virtual.__main__ import arguments, setting_of
from loadtests.colocation.virtual.ask import Ask
from loadtests.colocation.virtual.cases import Setting
from loadtests.colocation.virtual.product import Product
from loadtests.colocation.virtual.score import kept, seconds
from loadtests.colocation.virtual.world import World, play
from router.core.budget import Phase

LOOK_S = 1.0


class Stretch:
    """What was seen in one stretch of time, a look a second."""

    def __init__(self) -> None:
        self.looks = 0
        self.sums: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def mean(self, name: str) -> float:
        """Of one thing over the looks."""
        return self.sums[name] / max(1, self.looks)


class Watched(Product):
    """The product, looked at once a second."""

    def __init__(self, every_s: float, ttft_p95_ms: float | None) -> None:
        super().__init__(ttft_p95_ms)
        self.every_s = every_s
        self.stretches: list[Stretch] = []

    def begin(self, world: World) -> None:
        super().begin(world)
        world.loop.call_later(LOOK_S, self.look)

    def look(self) -> None:
        """Count what there is."""
        now = self.world.loop.time()
        while len(self.stretches) <= now // self.every_s:
            self.stretches.append(Stretch())
        here = self.stretches[-1]
        here.looks += 1
        for node in self.nodes:
            phases = Counter(permit.phase for permit in node.budget.batch)
            here.sums["prefill"] += phases[Phase.PREFILL]
            here.sums["decode"] += phases[Phase.DECODE]
            here.sums["chats"] += node.budget.chats
            here.sums["chat nodes"] += node.budget.chats > 0
            here.sums["limit"] += node.bearing.limit / len(self.nodes)
        for (workload, reason), count in self.admission.reasons().items():
            if workload == "batch":
                here.waits[reason] += count
        self.world.loop.call_later(LOOK_S, self.look)


def told(setting: Setting, seed: int, ttft_p95_ms: float | None, every_s: float) -> str:
    """Play it and tell."""
    policy, chats = Watched(every_s, ttft_p95_ms), cases.asks(setting, seed)
    asked = (chats, cases.lines(setting, seed))
    score = play(policy, setting.profiles, asked, cases.window(setting), setting.objective)
    rows = [
        "| from | chats/s | kept % | chats at once | on nodes | one bears | batch: prefill, decode | batch waits for |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, stretch in enumerate(policy.stretches):
        here = [ask for ask in chats if number * every_s <= ask.due < (number + 1) * every_s]
        if here:
            rows.append(_row(number * every_s, stretch, here, setting, every_s))
    bound = cases.fluid(setting, seed)
    end = (
        f"SLO {100 * score.attained:.1f} %, TTFT p50 / p95 {seconds(score.ttft_p50)} / {seconds(score.ttft_p95)}, batch"
        f" {score.good:,.0f} tok/s = {100 * score.good / bound:.0f} % of the bound, waste {100 * score.waste:.1f} %,"
        f" refused {score.refused}, taken back {dict(policy.taken)}"
    )
    return "\n".join([*rows, "", end])


def _row(start: float, stretch: Stretch, here: Sequence[Ask], setting: Setting, every_s: float) -> str:
    share = sum(kept(ask, setting.objective) for ask in here) / len(here)
    waits = sum(stretch.waits.values()) or 1
    why = ", ".join(f"{reason} {100 * count / waits:.0f} %" for reason, count in stretch.waits.most_common(4))
    cells = (
        f"{start / 60:.0f} min",
        f"{len(here) / every_s:.2f}",
        f"{100 * share:.1f}",
        f"{stretch.mean('chats'):.1f}",
        f"{stretch.mean('chat nodes'):.1f}",
        f"{stretch.mean('limit'):.0f}",
        f"{stretch.mean('prefill'):.1f}, {stretch.mean('decode'):.1f}",
        why,
    )
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    """One play."""
    parser = arguments()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ttft-p95-ms", type=float, default=None, help="default: auto")
    parser.add_argument("--every", type=float, default=300.0, help="seconds a row")
    said = parser.parse_args(argv)
    print(told(setting_of(said), said.seed, said.ttft_p95_ms, said.every))


if __name__ == "__main__":
    main()
