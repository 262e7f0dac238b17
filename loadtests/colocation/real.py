"""Chat beside a long batch on one real engine: alone, uncontrolled, through peers, and through Ebbtide.

    python loadtests/colocation/real.py --engine http://127.0.0.1:8101 [--rounds 3] [NAME='shell command' ...]
    python loadtests/colocation/real.py --start 'vllm serve ... --port $PORT'

The engine is in both of Ebbtide's pools, and every system gets the same load on the same engine, in turn, in every
round: open-loop chat, and either one batch of long lines (Ebbtide) or the same lines in a closed loop of one call (who
has no batches). A command starts one peer in the foreground; it finds PORT and ENGINE (a URL without `/v1`) in its
environment. Medians over the rounds are shown with their range, and written as JSON and, where matplotlib is there, as
a plot. Load, routers and engine share the machine: stop everything else.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from loadtests.colocation.load import Endpoint, Result, Shape, run  # noqa: E402

SETTINGS = """\
server: {{host: 127.0.0.1, port: {port}}}
store: {{url: "sqlite:///{home}/ebbtide.db"}}
nodes: [{{name: shared, url: "{engine}"}}]
log: {{level: warning, calls: false}}
"""
Chats = dict[str, list[tuple[float, float]]]
"""By system: when each chat was due, in seconds of the run, and how long its first token took."""
FIGURES = ("first_p50", "first_p95", "first_p99", "gap_p50", "gap_p95", "busy", "batch", "failed")


def arguments() -> argparse.Namespace:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--engine", help="an engine that runs, without /v1")
    told.add_argument("--start", help="or the command of one; it finds PORT in its environment")
    told.add_argument("--model", default="tiny")
    told.add_argument("--rates", type=float, nargs="+", default=[4.0], help="chats a second")
    told.add_argument("--burst", type=int, default=0, help="chats at once, half-way through each run")
    told.add_argument("--seconds", type=float, default=40)
    told.add_argument("--rounds", type=int, default=3)
    told.add_argument("--batch-prompt", type=int, default=20_000)
    told.add_argument("--seed", type=int, default=1)
    told.add_argument("--only", nargs="+", help="only these systems")
    told.add_argument("--out", type=Path, help="a directory for results.json and plot.svg")
    told.add_argument("peers", nargs="*", metavar="NAME=COMMAND")
    return told.parse_args()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: str | list[str], answers: str, **environment: str) -> Iterator[None]:
    """A process that runs for a block; the block begins when `answers` gives 200."""
    child = subprocess.Popen(
        command, shell=isinstance(command, str), env={**os.environ, **environment}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(answers, child)
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself, and its status says more
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def wait_for(url: str, child: subprocess.Popen[bytes], within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise SystemExit(f"it ended with {child.returncode} before {url} answered")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.25)
    raise SystemExit(f"{url} did not answer within {within_s:g} s")


@contextmanager
def ebbtide(engine: str) -> Iterator[str]:
    """Ebbtide in front of the engine, with a store of its own."""
    with tempfile.TemporaryDirectory() as home:
        port = free_port()
        path = Path(home) / "ebbtide.yaml"
        path.write_text(SETTINGS.format(port=port, home=home, engine=engine))
        url = f"http://127.0.0.1:{port}"
        with process([sys.executable, "-m", "router", "serve", "--config", str(path)], f"{url}/readyz"):
            yield url


@contextmanager
def peer(command: str, engine: str) -> Iterator[str]:
    """Another router in front of the engine."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/v1/models", PORT=str(port), ENGINE=engine):
        yield url


async def measured(url: str, shape: Shape, batch: str, seed: int) -> Result:
    endpoint = Endpoint(url)
    try:
        return await run(endpoint, shape, batch, seed)
    finally:
        await endpoint.pool.close()


def at(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, round(share * (len(values) - 1)))] if values else math.nan


def figures(result: Result) -> dict[str, float]:
    """Milliseconds, a share, tokens a second, calls."""
    first, gaps = [value * 1e3 for value in result.first], [value * 1e3 for value in result.gaps]
    firsts = at(first, 0.5), at(first, 0.95), at(first, 0.99)
    told = *firsts, at(gaps, 0.5), at(gaps, 0.95), result.busy, result.batch_pace, float(result.failed)
    return dict(zip(FIGURES, told, strict=True))


def one_run(name: str, batch: str, url: str, shape: Shape, seed: int, chats: Chats) -> dict[str, float]:
    result = asyncio.run(measured(url, shape, batch, seed))
    chats[name] = sorted(result.chats)
    found = figures(result)
    shown = "  ".join(f"{key} {value:.4g}" for key, value in found.items())
    print(f"  {name:14s} {shown}", file=sys.stderr, flush=True)
    time.sleep(2)  # what the run left in the engine ends
    return found


def rounds(told: argparse.Namespace, engine: str, shape: Shape, chats: Chats) -> dict[str, list[dict[str, float]]]:
    """Every system in every round. `chats` holds those of the last."""
    found: dict[str, list[dict[str, float]]] = {}
    named = dict(item.split("=", 1) for item in told.peers)
    with ExitStack() as stack:
        systems = {"chat alone": ("none", engine), "uncontrolled": ("calls", engine), "batch alone": ("calls4", engine)}
        for name, command in named.items():
            systems[name] = ("calls", stack.enter_context(peer(command, engine)))
        systems["ebbtide"] = ("batches", stack.enter_context(ebbtide(engine)))
        for number in range(told.rounds):
            print(f"round {number + 1}: {shape.rate:g} chats a second", file=sys.stderr)
            for place, (name, (batch, url)) in enumerate(systems.items()):
                if told.only and name not in told.only:
                    continue
                silent = Shape(**{**vars(shape), "rate": 0.0, "burst": 0}) if name == "batch alone" else shape
                found.setdefault(name, []).append(
                    one_run(name, batch, url, silent, told.seed + 1000 * number + 10 * place, chats)
                )
    return found


def spread(runs: list[dict[str, float]], key: str, form: str = ".0f") -> str:
    values = [run[key] for run in runs if not math.isnan(run[key])]
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown: medians and ranges, and batch as a share of what chat leaves free."""
    lines = [
        "| | chat TTFT p50 | p95 | p99 ms | gap p95 ms | chat under way | batch tokens/s | of what is free | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    free = statistics.median(run["batch"] for run in found["uncontrolled"]) if "uncontrolled" in found else math.nan
    for name, runs in found.items():
        shares = [run["batch"] / (free * (1 - run["busy"])) for run in runs if free and name == "ebbtide"]
        share = f"{statistics.median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%})" if shares else ""
        cells = [spread(runs, key) for key in ("first_p50", "first_p95", "first_p99")]
        cells += [spread(runs, "gap_p95", ".1f"), spread(runs, "busy", ".2f"), spread(runs, "batch"), share]
        lines.append(f"| {name} | {' | '.join([*cells, spread(runs, 'failed')])} |")
    return lines


def ratios(found: dict[str, list[dict[str, float]]]) -> str:
    """What the issue of the matter asks: the same load with and without us."""

    def middle(name: str, key: str) -> float:
        return statistics.median(run[key] for run in found[name]) if name in found else math.nan

    below = middle("uncontrolled", "first_p95") / middle("ebbtide", "first_p95")
    above = middle("ebbtide", "first_p95") / middle("chat alone", "first_p95")
    gaps = middle("ebbtide", "gap_p95") / middle("chat alone", "gap_p95")
    return (
        f"Chat TTFT p95 beside batch: {below:.0f}x below uncontrolled, {above:.1f}x chat alone; "
        f"gap between tokens p95 {gaps:.1f}x chat alone."
    )


def plot(results: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """Chat against batch: the lower right is where one wants to be."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no matplotlib: no plot", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    marks = iter("osD^vP*X" * 4)
    for rate, found in results.items():
        for name, runs in found.items():
            chat = [run["first_p95"] for run in runs if not math.isnan(run["first_p95"])]
            if chat:
                batch = statistics.median(run["batch"] for run in runs)
                axes.plot(batch, statistics.median(chat), next(marks), label=f"{name}, {rate} chats/s")
    axes.set_yscale("log")
    axes.set_xlabel("batch, tokens a second")
    axes.set_ylabel("chat, time to first token p95, ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight")


def timeline(chats: Chats, path: Path) -> None:
    """Each chat of the last round: when it was due, and how long its first token took."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    marks = {"chat alone": ("o", "tab:gray"), "uncontrolled": ("x", "tab:red"), "ebbtide": (".", "tab:blue")}
    for name, found in chats.items():
        if found:
            mark, colour = marks.get(name, ("+", None))
            axes.plot([at for at, _ in found], [took * 1e3 for _, took in found], mark, color=colour, label=name, ms=4)
    axes.set_yscale("log")
    axes.set_xlabel("the chat was due, seconds into the run")
    axes.set_ylabel("time to first token, ms")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    told = arguments()
    if not (told.engine or told.start):
        raise SystemExit("say --engine URL or --start COMMAND")
    with ExitStack() as stack:
        engine = told.engine
        if engine is None:
            port = free_port()
            engine = f"http://127.0.0.1:{port}"
            stack.enter_context(process(told.start, f"{engine}/health", PORT=str(port)))
        results, chats = {}, {}
        for rate in told.rates:
            shape = Shape(
                rate=rate, seconds=told.seconds, batch_prompt=told.batch_prompt, burst=told.burst, model=told.model
            )
            last = chats[f"{rate:g}"] = {}
            found = results[f"{rate:g}"] = rounds(told, engine.rstrip("/"), shape, last)
            print(f"\n{rate:g} chats a second, {told.rounds} rounds of {told.seconds:g} s\n")
            print("\n".join([*table(found), "", ratios(found)]), flush=True)
    if told.out:
        told.out.mkdir(parents=True, exist_ok=True)
        (told.out / "results.json").write_text(json.dumps(results, indent=1))
        (told.out / "chats.json").write_text(json.dumps(chats))
        plot(results, told.out / "plot.svg")
        for rate, last in chats.items():
            timeline(last, told.out / f"timeline-{rate}.svg")


if __name__ == "__main__":
    main()
