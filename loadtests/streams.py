"""So many streams at once through one router, for so long: `python loadtests/streams.py`.

A process of paced nodes, a router as operators run it (keys, metrics, probes and its log on), and this process, which
holds `--streams` chats open: whoever has heard all of an answer asks again on the same connection. It ends with exit
status 0 if every answer was whole, the router's memory stayed level once it was warm, and nothing was left when all
had gone: no open stream, waiter or room, and no connection but its own listener.
"""

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvloop

HERE = Path(__file__).resolve().parent
KEY = "sk-streams-of-the-load-test"
MB = 2**20
SETTINGS = """\
server: {{host: 127.0.0.1, port: {port}}}
store: {{url: "sqlite:///{home}/ebbtide.db"}}
nodes:
  - {{name: one, url: "http://127.0.0.1:{one}", engine: vllm}}
  - {{name: two, url: "http://127.0.0.1:{two}", engine: vllm}}
keys: [{{name: load, key: {key}}}]
"""
SETTLE_S = 10.0
"""The router keeps idle connections to its nodes for 4 s."""


class Crowd:
    """What became of all streams."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.open = self.most = self.whole = self.heard = 0
        self.wrong: list[str] = []
        self.asking = True

    def judge(self, answer: bytes) -> None:
        """One whole answer."""
        self.heard += answer.count(b"data: {")
        status = answer[:12]
        # usage was asked for by nobody, so nobody may see its event
        if status != b"HTTP/1.1 200" or answer.count(b"data: {") != self.events or b"data: [DONE]\n\n" not in answer:
            self.wrong.append(answer[-300:].decode(errors="replace"))
        else:
            self.whole += 1


class Chat(asyncio.Protocol):
    """One client: asks, listens to the end, asks again."""

    def __init__(self, crowd: Crowd, port: int) -> None:
        body = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Tell me."}]})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {KEY}\r\n"
        self.request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        self.crowd = crowd
        self.answer = bytearray()
        self.listening = False
        self.transport = None

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.crowd.open += 1
        self.crowd.most = max(self.crowd.most, self.crowd.open)
        self.listening = True
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if self.answer.endswith(b"0\r\n\r\n") or (b"\r\n\r\n" in self.answer and self.answer[:12] != b"HTTP/1.1 200"):
            self.ended()

    def ended(self) -> None:
        self.crowd.judge(bytes(self.answer))
        self.answer.clear()
        self.crowd.open -= 1
        self.listening = False
        if self.crowd.asking and not self.crowd.wrong:
            self.ask()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.listening:
            self.crowd.open -= 1
            self.crowd.wrong.append(f"the connection broke: {exc!r}, after {bytes(self.answer[-200:])!r}")


class Watch:
    """The router's memory, CPU time and connections, each second."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = psutil.Process(process.pid)
        self.seen: list[tuple[float, float]] = []
        self.began = time.monotonic()
        self.cpu_s = 0.0

    async def run(self, crowd: Crowd, every: int) -> None:
        began_cpu = self.cpu()
        print(f"{'s':>4} {'open':>6} {'whole':>7} {'events/s':>9} {'CPU %':>6} {'RSS MB':>7}")
        heard, spent, second = 0, began_cpu, 0
        while True:
            await asyncio.sleep(self.began + second + 1 - time.monotonic())
            second += 1
            self.seen.append((time.monotonic() - self.began, self.rss_mb()))
            self.cpu_s = self.cpu() - began_cpu
            if second % every == 0:
                rate, share = (crowd.heard - heard) / every, (self.cpu() - spent) / every
                heard, spent = crowd.heard, self.cpu()
                print(f"{second:4} {crowd.open:6} {crowd.whole:7} {rate:9.0f} {share:6.0%} {self.rss_mb():7.1f}")

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def rss_mb(self) -> float:
        return self.process.memory_info().rss / MB

    def connections(self) -> int:
        return sum(one.status == psutil.CONN_ESTABLISHED for one in self.process.net_connections("tcp"))

    def since(self, second: float) -> list[tuple[float, float]]:
        return [(at, size) for at, size in self.seen if at >= second]

    def slope(self, second: float) -> float:
        """MB a minute from then on, by least squares."""
        seen = self.since(second)
        return 60 * statistics.linear_regression(*zip(*seen, strict=True)).slope if len(seen) > 1 else 0.0


def metrics(port: int) -> dict[str, float]:
    """Every sample of the router's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def left(port: int, watch: Watch) -> list[str]:
    """What is still held, in words."""
    found = metrics(port)
    held = ("ebbtide_open_streams", "ebbtide_queue_calls", "ebbtide_queue_bytes", "ebbtide_node_running")
    kept = [f"{name} is {value:g}" for name, value in found.items() if name.partition("{")[0] in held and value]
    # probes come and go on connections of their own, at most a few a node
    connections = watch.connections()
    return kept + [f"{connections} connections"] * (connections > 8)


def lag(port: int) -> str:
    """How late the event loop ran its timer, as the share of times within each bound."""
    name = 'ebbtide_event_loop_lag_seconds_bucket{le="'
    buckets = {key[len(name) : -2]: value for key, value in metrics(port).items() if key.startswith(name)}
    shares = {bound: value / max(1.0, buckets["+Inf"]) for bound, value in buckets.items()}
    return ", ".join(f"{shares[bound]:.0%} {float(bound) * 1000:g} ms" for bound in ("0.005", "0.025", "0.1", "1.0"))


async def crowd_in(options: argparse.Namespace, port: int, watch: Watch) -> Crowd:
    """Hold the streams open for the time asked for, then let them end."""
    loop = asyncio.get_running_loop()
    crowd = Crowd(options.events)
    watching = loop.create_task(watch.run(crowd, max(1, options.seconds // 12)))
    ramp = min(5.0, options.seconds / 4) / options.streams
    began = loop.time()
    for number in range(options.streams):
        await loop.create_connection(lambda: Chat(crowd, port), "127.0.0.1", port)
        await asyncio.sleep(max(0.0, began + ramp * number - loop.time()))
    await until(lambda: bool(crowd.wrong), options.seconds - (loop.time() - began))
    crowd.asking = False
    watching.cancel()
    await until(lambda: not crowd.open, 2 * options.events * options.gap + 10)
    return crowd


async def until(predicate, within: float) -> None:
    """Wait for it to be true, at most so many seconds."""
    ends = time.monotonic() + within
    while not predicate() and time.monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@contextmanager
def running(options: argparse.Namespace, home: Path):
    """Nodes and router: the router's process and port."""
    paced = [sys.executable, str(HERE / "paced_node.py"), "--events", str(options.events), "--gap", str(options.gap)]
    with subprocess.Popen(paced, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdout is not None
        one, two = map(int, nodes.stdout.readline().split())
        with open_port() as port:
            (home / "streams.yaml").write_text(SETTINGS.format(port=port, home=home, one=one, two=two, key=KEY))
        command = [sys.executable, "-m", "router", "serve", "--config", str(home / "streams.yaml")]
        with (home / "router.log").open("wb") as log, subprocess.Popen(command, cwd=HERE.parent, stderr=log) as router:
            try:
                until_ready(router, port, home / "router.log")
                yield router, port
            finally:
                router.terminate()
                try:
                    router.wait(10)
                except subprocess.TimeoutExpired:
                    router.kill()


@contextmanager
def open_port():
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def until_ready(router: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + 90
    while time.monotonic() < ends and router.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the router is not ready:\n{log.read_text()[-2000:]}")


def verdict(options: argparse.Namespace, crowd: Crowd, watch: Watch, found: list[str]) -> list[str]:
    """What is wrong, in words; empty when all is well."""
    warm = options.seconds / 4
    sizes = [size for _, size in watch.since(warm)] or [0.0]
    grown = sizes[-1] - sizes[0]
    print(f"\nRSS {sizes[0]:.1f} MB at {warm:.0f} s, {sizes[-1]:.1f} MB at {options.seconds} s,", end=" ")
    print(f"slope {watch.slope(warm):+.2f} MB a minute, in the second half {watch.slope(options.seconds / 2):+.2f}")
    print(f"{crowd.whole} answers whole, {len(crowd.wrong)} not; {crowd.heard} events, ", end="")
    print(f"{watch.cpu_s / max(1, crowd.heard) * 1e6:.0f} us of the router's CPU each")
    wrong = [f"{len(crowd.wrong)} answers are wrong, the first: {crowd.wrong[0]}"] if crowd.wrong else []
    wrong += [f"only {crowd.most} streams were open at once"] * (crowd.most < options.streams)
    wrong += [f"{crowd.open} streams never ended"] * bool(crowd.open)
    wrong += [f"the router grew by {grown:.1f} MB"] * (grown > options.level_mb)
    return wrong + [f"left behind: {one}" for one in found]


def main() -> int:
    """Run once; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--events", type=int, default=50, help="events of one answer")
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between two events of a stream")
    parser.add_argument("--level-mb", type=float, default=5.0, help="growth after a quarter of the time that is level")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as home, running(options, Path(home)) as (router, port):
        watch = Watch(router)
        print(f"{options.streams} streams for {options.seconds} s, one event each {options.gap} s, router at {port}\n")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            crowd = runner.run(crowd_in(options, port, watch))
            runner.run(until(lambda: not left(port, watch), SETTLE_S))
            found = left(port, watch)
        wrong = verdict(options, crowd, watch, found)
        print(f"event loop late by at most: {lag(port)}; {watch.connections()} connections at the end")
        errors = [line for line in (Path(home) / "router.log").read_text().splitlines() if '"level":"error"' in line]
        wrong += [f"the router's log: {errors[0][:300]}"] if errors else []
    print("\n".join(wrong) or "all well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
