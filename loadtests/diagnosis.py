"""How soon a fault of a node is diagnosed, and how often one is that is not there, on seeded days.

    python loadtests/diagnosis.py                        200 days of load alone, and each fault on 20 nodes
    python loadtests/diagnosis.py --days 20 --nodes 5    shorter

Every day is judged every ten minutes. A load-only series is two days long: the node learns on the first and is judged
on both; every fourth has its load doubled at the middle of the second day, every fourth memory that fills for hours,
every fourth memory that goes up and down. Exit status 1 when a load-only day raised an alarm.
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

ONSET_H = 24.0


def quiet_day(seed: int) -> tuple[int, Counter[str]]:
    """One node without a fault: how often each verdict was held."""
    kinds = ({}, {"busier": 2.0, "onset": 36.0}, {"fills_h": 1.0 + seed % 3}, {"tooth_h": 1.5 + seed % 3})
    day = Day(**{"seed": seed, "hours": 48.0, "onset": 99.0, **kinds[seed % 4]})
    return seed, Counter(str(one.verdict) for one in verdicts(day))


def faulty(job: tuple[str, int]) -> tuple[str, float | None, float | None, tuple[str, ...]]:
    """A fault on one node: hours until anything, and until the right thing was told; what else was told after."""
    name, seed = job
    day = replace(FAULTS[name], seed=seed, hours=ONSET_H + 12, onset=ONSET_H)
    held = [(one.at / 3600 - ONSET_H, one.verdict) for one in verdicts(day, since_h=ONSET_H)]
    told = [(at, str(verdict)) for at, verdict in held if verdict in ALARMS or verdict == name]
    right = [at for at, verdict in told if verdict == name]
    others = tuple(sorted({verdict for _, verdict in told} - {name}))
    return name, told[0][0] if told else None, right[0] if right else None, others


def main() -> int:
    """Run it all and print what was found."""
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--days", type=int, default=200, help="load-only nodes")
    told.add_argument("--nodes", type=int, default=20, help="nodes for each fault")
    told.add_argument("--workers", type=int, default=1, help="processes")
    arguments = told.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        alarms = list(_quiet(pool.map(quiet_day, range(arguments.days))))
        jobs = [(name, seed) for name in FAULTS for seed in range(1000, 1000 + arguments.nodes)]
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
    print(f"load alone: {bad} nodes with a false alarm, judged {sum(whole.values())} times: {dict(whole)}", flush=True)


def _faults(found: list[tuple[str, float | None, float | None, tuple[str, ...]]]) -> None:
    print(
        "\n| fault | nodes | right at all | within 6 h | median h | slowest h | told besides |\n|---|---|---|---|---|---|---|"
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
