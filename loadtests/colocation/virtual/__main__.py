"""Chat and batch together in virtual time: Ebbtide's policy beside all that it is compared with.

    python -m loadtests.colocation.virtual --traces FOLDER --workload W2 --fleet F4 --seeds 5

Traces are CSV files of `t_seconds,prompt_tokens,output_tokens`; without a folder the small sample that comes with the
repository is played. Writes report.md, report.json and pareto.svg.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from loadtests.colocation.virtual import cases, report, traces
from loadtests.colocation.virtual.cases import POLICIES, Case, Setting
from loadtests.colocation.virtual.profiles import FLEETS
from loadtests.colocation.virtual.score import Score, seconds

TRACES = "EBBTIDE_TRACES"


def main(argv: Sequence[str] | None = None) -> None:
    """Play, tell, write down."""
    parser = arguments()
    parser.add_argument("--only", action="append", choices=list(POLICIES), help="one policy; may be given again")
    parser.add_argument("--value", type=float, action="append", help="a setting of the knob, with one --only")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("var/colocation"))
    told = parser.parse_args(argv)
    setting = setting_of(told)
    seeds = range(told.first_seed, told.first_seed + told.seeds)
    print(report.title(setting), flush=True)
    values = {name: _values(name, setting, told) for name in told.only or POLICIES}
    all_cases = [
        Case(setting=setting, seed=seed, policy=name, value=value)
        for name, knob in values.items()
        for value in knob
        for seed in seeds
    ]
    lines: dict[tuple[str, float | None], list[Score]] = {}
    for case, score in _played(all_cases, told.jobs):
        lines.setdefault((case.policy, case.value), []).append(score)
        _say(case, score)
    found = report.Found(
        setting,
        list(seeds),
        [report.Line(name, POLICIES[name].knob, value, scores) for (name, value), scores in lines.items()],
        [cases.fluid(setting, seed) for seed in seeds],
        sum(cases.batch_rates(setting)),
    )
    report.write(found, told.out)
    print(report.markdown(found).split("### Every setting")[0])
    _picture(found, told.out / "pareto.svg")


def arguments() -> argparse.ArgumentParser:
    """What says which setting is played."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.colocation.virtual",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=os.environ.get(TRACES), help=f"folder of CSV files; or {TRACES}")
    parser.add_argument("--workload", choices=list(traces.WORKLOADS), default=None, help="default: W2, or sample")
    parser.add_argument("--fleet", choices=list(FLEETS), default="F4")
    parser.add_argument("--load", type=float, default=0.6, help="peak of chat as a share of what the fleet holds: 0.6")
    parser.add_argument("--slo", type=int, choices=(0, 1, 2), default=0, help="1: looser; 2: for long prompts")
    parser.add_argument("--minutes", type=float, default=None, help="play only the first minutes of the trace")
    parser.add_argument("--prefill", type=float, default=1.0, help="cost of a prompt token times this (0.7, 1.3)")
    return parser


def setting_of(told: argparse.Namespace) -> Setting:
    """The setting that was said. Exits when its traces are not there."""
    folder = traces.SAMPLE if told.traces is None else told.traces
    workload = told.workload or ("sample" if told.traces is None else "W2")
    chat = folder / traces.WORKLOADS[workload].chat
    if not chat.is_file():
        sys.exit(f"{chat} is not there; name the folder of the traces with --traces or {TRACES}")
    return Setting(
        folder=folder,
        workload=workload,
        fleet=told.fleet,
        load=told.load,
        slo=told.slo,
        minutes=told.minutes,
        prefill=told.prefill,
    )


def _values(name: str, setting: Setting, told: argparse.Namespace) -> Sequence[float]:
    return told.value or POLICIES[name].values(len(setting.profiles))


def _played(all_cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, Score]]:
    if jobs == 1:
        yield from ((case, cases.run(case)) for case in all_cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from zip(all_cases, pool.map(cases.run, all_cases), strict=True)


def _say(case: Case, score: Score) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {case.policy} {case.value:g} seed {case.seed}: SLO {100 * score.attained:.1f} %,"
        f" TTFT p95 {seconds(score.ttft_p95)}, batch {score.good:,.0f} tok/s, waste {100 * score.waste:.1f} %",
        flush=True,
    )


def _picture(found: report.Found, path: Path) -> None:
    try:
        from loadtests.colocation.virtual import plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("no picture: matplotlib is not installed (pip install --group loadtests)")
        return
    plot.pareto(found.lines, report.title(found.setting), found.bound, path)
    print(f"{path.parent}/report.md, report.json, {path.name}")


if __name__ == "__main__":
    main()
