"""What a router costs: CPU a request and a streamed event, side by side in one run.

    python loadtests/overhead/run.py --rounds 3 [NAME='shell command' ...]

Ebbtide is always measured: two nodes, keys, counting, metrics and probes on, its log of calls off. A command starts one
peer in the foreground; it finds PORT (to listen on, at 127.0.0.1) and NODE1, NODE2 (nodes' URLs without `/v1`) in its
environment and is ready when `GET /v1/models` answers 200.

    json   32 clients, a small chat answered by a small JSON               CPU us a request
    burst  the same, streamed: 65 events in one write                      CPU us a request
    paced  96 streams at a time, one event each 20 ms, 65 events           CPU us an event

CPU time is the kernel's run time of the router's threads (schedstat). The router is pinned to the last core, nodes and
clients to the first; routers take turns in every round, and medians are shown. Nodes are in C where there is gcc,
clients are wrk where there is one; else both are in Python, which changes latencies and hardly the router's CPU.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY = "sk-bench"
EVENTS, GAP_MS = 64, 20
BODY = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are an assistant that answers briefly and precisely."},
        {
            "role": "user",
            "content": "What is the capital of France, and what is it known for? Answer in two sentences.",
        },
    ],
    "max_tokens": 256,
    "temperature": 0.2,
}
SETTINGS = """\
server: {{host: 127.0.0.1, port: {port}}}
store: {{url: "sqlite:///{home}/ebbtide.db"}}
nodes:
  - {{name: one, url: "{one}"}}
  - {{name: two, url: "{two}"}}
keys: [{{name: bench, key: {key}}}]
log: {{calls: false}}
"""


class Load(NamedTuple):
    """One kind of traffic. `parts`: what the CPU time of one answer is divided by."""

    clients: int
    streamed: bool
    gap_ms: int
    parts: int
    extra_s: int


LOADS = {
    "json": Load(32, False, 0, 1, 0),
    "burst": Load(32, True, 0, 1, 0),
    "paced": Load(96, True, GAP_MS, EVENTS + 1, 3),
}


class Run(NamedTuple):
    """One measurement."""

    cpu_us: float
    per_second: float
    p50_ms: float
    p99_ms: float
    wrong: int


def pinned(core: int):
    """Run in the child before it becomes the command."""
    return lambda: os.sched_setaffinity(0, {core})


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found, ahead = [], [pid]
    while ahead:
        found.append(ahead.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            ahead += map(int, text(task).split())
    return found


def cpu_us(pid: int) -> float:
    """Run time of all threads of a process and those below it."""
    paths = [path for one in family(pid) for path in Path(f"/proc/{one}/task").glob("*/schedstat")]
    return sum(int((text(path) or "0").split()[0]) for path in paths) / 1e3


def text(path: Path) -> str:
    """A file of /proc; empty when its owner is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def child(command: list[str], core: int, **options) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, ended at the end of the block."""
    with subprocess.Popen(command, start_new_session=True, text=True, preexec_fn=pinned(core), **options) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def nodes(home: Path, gap_ms: int) -> Iterator[list[str]]:
    """Two nodes; their URLs."""
    if shutil.which("gcc"):
        binary = home / "node"
        if not binary.exists():
            subprocess.run(["gcc", "-O2", "-w", "-o", str(binary), str(HERE / "node.c")], check=True)
        commands = [[str(binary), str(EVENTS), str(gap_ms)]] * 2
    else:
        paced = [sys.executable, str(HERE.parent / "paced_node.py")]
        commands = [[*paced, "--events", str(EVENTS), "--gap", str(gap_ms / 1000)]]
    with ExitStack() as block:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started = [block.enter_context(child(command, 0, **pipes)) for command in commands]
        ports = " ".join(one.stdout.readline() for one in started if one.stdout is not None).split()
        yield [f"http://127.0.0.1:{port}" for port in ports]


def asked(url: str, load: Load, seconds: float, home: Path) -> tuple[int, float, float, int]:
    """Clients for so long: answers, p50 and p99 in milliseconds, wrong answers."""
    body = json.dumps(BODY | ({"stream": True} if load.streamed else {}), separators=(",", ":"))
    if shutil.which("wrk"):
        return wrk(url, load, seconds, script(home, body))
    told = [sys.executable, str(HERE / "clients.py"), url, str(load.clients), str(seconds), body]
    said = subprocess.run(told, capture_output=True, text=True, check=True, preexec_fn=pinned(0)).stdout
    seen = json.loads(said)
    return seen["done"], seen["p50_ms"], seen["p99_ms"], seen["wrong"]


def script(home: Path, body: str) -> Path:
    """What wrk is told in Lua."""
    path = home / "ask.lua"
    headers = f'wrk.headers["Content-Type"]="application/json"\nwrk.headers["Authorization"]="Bearer {KEY}"\n'
    path.write_text(f'wrk.method="POST"\n{headers}wrk.body={json.dumps(body)}\n')
    return path


def wrk(url: str, load: Load, seconds: float, lua: Path) -> tuple[int, float, float, int]:
    told = [
        "wrk",
        "-t1",
        f"-c{load.clients}",
        f"-d{seconds:.0f}s",
        "--timeout",
        "20s",
        "--latency",
        "-s",
        str(lua),
        url,
    ]
    said = subprocess.run([*told, url], capture_output=True, text=True, check=True, preexec_fn=pinned(0)).stdout
    done = re.search(r"(\d+) requests in", said)
    bad = sum(int(number) for number in re.findall(r"Non-2xx or 3xx responses: (\d+)", said))
    bad += sum(int(n) for line in re.findall(r"Socket errors: (.*)", said) for n in re.findall(r"\d+", line))
    p50, p99 = (milliseconds(said, share) for share in ("50%", "99%"))
    return int(done[1]) if done else 0, p50, p99, bad


def milliseconds(said: str, share: str) -> float:
    found = re.search(rf"(?m)^\s+{share}\s+([\d.]+)(us|ms|s)\s*$", said)
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]] if found else 0.0


def ready(url: str, process: subprocess.Popen[str]) -> bool:
    ends = time.monotonic() + 60
    question = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(question, timeout=2) as answer:
                return answer.status == 200
        except OSError:
            time.sleep(0.1)
    return False


def measure(command: str, load: Load, urls: list[str], options: argparse.Namespace, home: Path) -> Run:
    """One router under one load."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (home / "ebbtide.yaml").write_text(SETTINGS.format(port=port, home=home, one=urls[0], two=urls[1], key=KEY))
    told = {"PORT": str(port), "NODE1": urls[0], "NODE2": urls[1], "SETTINGS": str(home / "ebbtide.yaml")}
    log = home / "router.log"
    with log.open("wb") as sink, child(["sh", "-c", command], os.cpu_count() - 1, env=os.environ | told, cwd=ROOT,
                                       stdout=sink, stderr=sink) as process:  # fmt: skip
        if not ready(url, process):
            raise SystemExit(f"not ready: {command}\n{log.read_text()[-2000:]}")
        path = f"{url}/v1/chat/completions"
        asked(path, load, 2, home)
        seconds = options.seconds + load.extra_s
        before = cpu_us(process.pid)
        done, p50_ms, p99_ms, wrong = asked(path, load, seconds, home)
        spent = cpu_us(process.pid) - before
    return Run(spent / max(1, done) / load.parts, done / seconds, p50_ms, p99_ms, wrong)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def show(results: dict[tuple[str, str], list[Run]]) -> None:
    """A table: medians, ranges, and each cost beside Ebbtide's."""
    names = ("cpu us", "range", "x ours", "per s", "p50 ms", "p99 ms")
    print(f"{'router':16} {'load':6}" + "".join(f"{name:>16}" if name == "range" else f"{name:>9}" for name in names))
    for (name, kind), runs in results.items():
        costs = [run.cpu_us for run in runs]
        cost, ours = statistics.median(costs), statistics.median(run.cpu_us for run in results["ebbtide", kind])
        middle = sorted(runs)[len(runs) // 2]
        spread, wrong = f"{min(costs):.1f}-{max(costs):.1f}", sum(run.wrong for run in runs)
        line = f"{name:16} {kind:6}{cost:9.1f}{spread:>16}{cost / ours:9.2f}"
        line += f"{middle.per_second:9.0f}{middle.p50_ms:9.1f}{middle.p99_ms:9.1f}"
        print(line + (f"  {wrong} WRONG" if wrong else ""))


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--loads", default="json,burst,paced")
    parser.add_argument("peers", nargs="*", metavar="NAME=COMMAND")
    options = parser.parse_args()
    routers = {"ebbtide": f"exec {sys.executable} -m router serve --config $SETTINGS"}
    routers |= dict(peer.split("=", 1) for peer in options.peers)
    results: dict[tuple[str, str], list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for _ in range(options.rounds):
            for kind in options.loads.split(","):
                with nodes(home, LOADS[kind].gap_ms) as urls:
                    for name, command in routers.items():
                        run = measure(command, LOADS[kind], urls, options, home)
                        results.setdefault((name, kind), []).append(run)
    show(dict(sorted(results.items(), key=lambda one: list(LOADS).index(one[0][1]))))
    return 1 if any(run.wrong for runs in results.values() for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
