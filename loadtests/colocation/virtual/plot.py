"""The picture: what batch gets done against how often chat keeps its objective."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from loadtests.colocation.virtual.report import Line

MARKS = "osD^v<>pXP*h"


def pareto(lines: Sequence[Line], title: str, bound: float, path: Path) -> None:
    """One curve a policy, one point a setting of its knob; `bound` in tokens a second. SVG or PNG by suffix."""
    mpl.rcParams["svg.hashsalt"] = "ebbtide"
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(line.policy for line in lines))
    for index, name in enumerate(names):
        points = sorted((line for line in lines if line.policy == name), key=lambda line: line.mean.attained)
        axes.plot(
            [100 * line.mean.attained for line in points],
            [line.mean.good for line in points],
            marker=MARKS[index % len(MARKS)],
            linewidth=2.5 if name == "ebbtide" else 1,
            zorder=3 if name == "ebbtide" else 2,
            label=name,
        )
    axes.axhline(bound, linestyle="--", color="grey", label="fluid bound")
    axes.set_xlabel("chats that keep the objective, %")
    axes.set_ylabel("batch, useful tokens a second")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
