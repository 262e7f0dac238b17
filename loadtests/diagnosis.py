"""How soon a fault of a node is diagnosed, and how often one is that is not there, on seeded days.

    python loadtests/diagnosis.py                       67 nodes for three days of load alone; each fault on 12 nodes
    python loadtests/diagnosis.py --quiet 4 --nodes 2   shorter
    python loadtests/diagnosis.py --seed 5000           other nodes

A node is judged every ten minutes from its fifth hour on: what it is judged by changes no sooner. Of the load-only
ones every fourth has its load doubled at the middle of the second day, every fourth memory that fills for hours, every
fourth memory that goes up and down. Faults begin at any hour of the second day. Exit status 1 when a load-only node
raised an alarm.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from router.core.drift import ALARMS
from router.core.robust import median
from tests.fakes.days import FAULTS, Day, verdicts

DAYS = 3
EVERY_MIN = 10


def quiet_day(seed: int) -> tuple[int, Counter[str]]:
    """One node without a fault: how often each verdict was held."""
    kinds = ({}, {"busier": 2.0, "onset": 36.0}, {"fills_h": 1.0 + seed % 3}, {"tooth_h": 1.5 + seed % 3})
    day = Day(**{"seed": seed, "hours": DAYS * 24.0, "onset": 99.0, **kinds[seed % 4]})
    return seed, Counter(str(one.verdict) for one in verdicts(day, since_h=5, every_min=EVERY_MIN))


def faulty(job: tuple[str, int]) -> tuple[str, float | None, float | None, tuple[str, ...]]:
    """A fault on one node: hours until anything, and until the right thing was told; what else was told after."""
    name, seed = job
    onset = 24.0 + seed * 7 % 24
    day = replace(FAULTS[name], seed=seed, hours=onset + 12, onset=onset)
    held = [(one.at / 3600 - onset, one.verdict) for one in verdicts(day, since_h=onset, every_min=EVERY_MIN)]
    told = [(at, str(verdict)) for at, verdict in held if verdict in ALARMS or verdict == name]
    right = [at for at, verdict in told if verdict == name]
    others = tuple(sorted({verdict for _, verdict in told} - {name}))
    return name, told[0][0] if told else None, right[0] if right else None, others


def main() -> int:
    """Run it all and print what was found."""
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--quiet", type=int, default=67, help="load-only nodes")
    told.add_argument("--nodes", type=int, default=12, help="nodes for each fault")
    told.add_argument("--seed", type=int, default=0, help="of the first load-only node; faults begin 1000 later")
    told.add_argument("--workers", type=int, default=1, help="processes")
    arguments = told.parse_args()
    began, first = time.monotonic(), arguments.seed + 1000
    with ProcessPoolExecutor(arguments.workers) as pool:
        alarms = list(_quiet(pool.map(quiet_day, range(arguments.seed, arguments.seed + arguments.quiet))))
        jobs = [(name, seed) for name in FAULTS for seed in range(first, first + arguments.nodes)]
        _faults(list(pool.map(faulty, jobs)))
    print(f"took {time.monotonic() - began:.0f} s")
    return 1 if alarms else 0


def _quiet(days: Iterator[tuple[int, Counter[str]]]) -> Iterator[int]:
    whole: Counter[str] = Counter()
    bad = 0
    for seed, held in days:
        whole += held
        wrong = {verdict: count for verdict, count in held.items() if verdict in ALARMS}
        if wrong:
            bad += 1
            print(f"false alarm: seed {seed} {wrong}", flush=True)
            yield seed
    print(f"load alone: {bad} nodes with a false alarm; judged {sum(whole.values())} times: {dict(whole)}", flush=True)


def _faults(found: list[tuple[str, float | None, float | None, tuple[str, ...]]]) -> None:
    print(
        "\n| fault | nodes | right | within 6 h | median h | slowest h | told besides |\n|---|---|---|---|---|---|---|"
    )
    for name in FAULTS:
        mine = [one for one in found if one[0] == name]
        delays = sorted(one[2] for one in mine if one[2] is not None)
        soon = sum(delay <= 6 for delay in delays)
        besides = Counter(word for one in mine for word in one[3])
        cells = (name, len(mine), len(delays), soon)
        times = (f"{median(delays):.1f}", f"{delays[-1]:.1f}") if delays else ("", "")
        print(f"| {' | '.join(map(str, (*cells, *times, dict(besides) or '')))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
