"""The table, and the same for a machine.

Rules: of every policy the best setting is shown, chosen in hindsight: the most batch among those that cost chat at most
a point, else the one that costs chat least. All settings are in the JSON and in the picture. Figures are means over
seeds with the least and the most. Batch is told as a share of the fluid bound too, and the fleet's ceiling with no chat
at all is told once.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.colocation.virtual.cases import Setting
from loadtests.colocation.virtual.score import Score, mean, seconds, spread

POINT = 0.01

HEAD = (
    "| policy | knob | chat SLO % | TTFT p50 / p95 / p99 | TPOT p95 | stall p95 | missed: refused + unfinished "
    "| batch tok/s | of the bound | computed tok/s | waste % |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Line:
    """One policy at one setting of its knob: a score for each seed."""

    policy: str
    knob: str
    value: float | None
    scores: list[Score]

    @property
    def mean(self) -> Score:
        """Over seeds."""
        return mean(self.scores)


@dataclass(frozen=True)
class Found:
    """Everything of one run.

    `bounds` is the fluid bound of each seed, `ceiling` what the fleet does without chat, both in tokens a second.
    """

    setting: Setting
    seeds: Sequence[int]
    lines: Sequence[Line]
    bounds: Sequence[float]
    ceiling: float

    @property
    def bound(self) -> float:
        """The fluid bound, over seeds."""
        return sum(self.bounds) / len(self.bounds)


def best(lines: Sequence[Line], alone: float | None) -> Line:
    """The setting to show of one policy."""
    cheap = [line for line in lines if alone is not None and line.mean.attained >= alone - POINT]
    if cheap:
        return max(cheap, key=lambda line: line.mean.good)
    return max(lines, key=lambda line: (line.mean.attained, line.mean.good))


def shown(found: Found) -> list[Line]:
    """One line a policy."""
    names = list(dict.fromkeys(line.policy for line in found.lines))
    alone = next((line.mean.attained for line in found.lines if line.policy == "chat alone"), None)
    return [best([line for line in found.lines if line.policy == name], alone) for name in names]


def table(lines: Sequence[Line], bound: float) -> str:
    """Markdown."""
    return "\n".join([HEAD, *(_row(line, bound) for line in lines)])


def _row(line: Line, bound: float) -> str:
    one = line.mean
    low, high = (100 * share for share in spread(line.scores, "attained"))
    least, most = spread(line.scores, "good")
    knob = f"{line.knob} {line.value:g}" if line.knob and line.value is not None else ""
    knob = f"{line.knob} auto" if line.policy == "ebbtide" and not line.value else knob
    cells = (
        line.policy,
        knob,
        f"{100 * one.attained:.1f} ({low:.1f}-{high:.1f})",
        f"{seconds(one.ttft_p50)} / {seconds(one.ttft_p95)} / {seconds(one.ttft_p99)}",
        seconds(one.tpot_p95),
        seconds(one.stall_p95),
        f"{one.refused:.0f} + {one.unfinished:.0f}",
        f"{one.good:,.0f} ({least:,.0f}-{most:,.0f})",
        f"{100 * one.good / bound:.0f} %",
        f"{one.computed:,.0f}",
        f"{100 * one.waste:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


def title(setting: Setting) -> str:
    """What was played."""
    slo = setting.objective
    cost = "" if setting.prefill == 1 else f", prefill x{setting.prefill:g}"
    return (
        f"{setting.workload} on {setting.fleet}, chat at {100 * setting.load:.0f} % of what the fleet holds{cost};"
        f" SLO: TTFT {slo.ttft:g} s and {1e3 * slo.tpot:g} ms a token"
    )


def markdown(found: Found) -> str:
    """The report of one run."""
    seen = found.lines[0].mean
    return (
        f"## {title(found.setting)}\n\n"
        f"{len(found.seeds)} seeds, {seen.chats:,.0f} chats in the window (mean over seeds). "
        f"Fluid bound {found.bound:,.0f} tok/s of batch; the fleet with no chat at all does {found.ceiling:,.0f}.\n\n"
        f"{table(shown(found), found.bound)}\n\n"
        "### Every setting\n\n"
        f"{table(found.lines, found.bound)}\n"
    )


def write(found: Found, folder: Path) -> None:
    """`report.md` and `report.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(found))
    told = {
        "setting": {**asdict(found.setting), "folder": found.setting.folder.name},
        "seeds": list(found.seeds),
        "fluid_bound": list(found.bounds),
        "ceiling": found.ceiling,
        "lines": [
            {
                "policy": line.policy,
                "knob": line.knob,
                "value": line.value,
                "scores": [one.told() for one in line.scores],
            }
            for line in found.lines
        ],
    }
    (folder / "report.json").write_text(json.dumps(told, indent=1))
