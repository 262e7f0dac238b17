"""What one call makes the router do in Python: bytecodes and function calls, file by file.

    python loadtests/overhead/steps.py [--stream] [--functions] [--top 20]

A time differs from run to run by a fifth and more; this does not, so it shows what a change of a few steps does. One
client asks a router in this process, small chats one after the other, of nodes in another process; what `router/` does
meanwhile is counted, its own timers included. With `--stream` an answer is 65 events at once, mostly in one read.
"""

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvloop

from router import logs, settings
from router.app import running

HERE = Path(__file__).resolve().parent
ROUTER = f"{HERE.parents[1] / 'router'}/"
KEY = "sk-steps"
WARM, CALLS = 50, 50
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are an assistant that answers briefly and precisely."},
        {"role": "user", "content": "What is the capital of France, and what is it known for?"},
    ],
    "max_tokens": 256,
}
SETTINGS = """\
server: {{host: 127.0.0.1, port: 0}}
store: {{url: "sqlite:///{home}/ebbtide.db"}}
batches: {{enabled: false}}
nodes:
  - {{name: one, url: "http://127.0.0.1:{ports[0]}"}}
  - {{name: two, url: "http://127.0.0.1:{ports[1]}"}}
keys: [{{name: steps, key: {key}}}]
log: {{calls: false}}
"""


class Steps:
    """Counts of what ran, by file and function: bytecodes, and entries into a function or back into a coroutine."""

    def __init__(self) -> None:
        self.bytecodes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread does in a block."""
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object):
        code = frame.f_code
        if not code.co_filename.startswith(ROUTER):
            return None
        place = code.co_filename.removeprefix(ROUTER), code.co_qualname
        self.calls[place] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(frame: FrameType, event: str, arg: object):
            self.bytecodes[place] += event == "opcode"
            return step

        return step

    def table(self, calls: int, top: int, *, functions: bool) -> list[str]:
        """The `top` places that did most, for each of so many calls, and the whole."""
        bytecodes, entries = Counter(), Counter()
        for place, count in self.bytecodes.items():
            bytecodes[" ".join(place) if functions else place[0]] += count
        for place, count in self.calls.items():
            entries[" ".join(place) if functions else place[0]] += count
        rows = [(place, count, entries[place]) for place, count in bytecodes.most_common(top)]
        rows.append(("all", bytecodes.total(), entries.total()))
        head = f"{'':60s} {'bytecodes':>10s} {'calls':>8s}"
        return [head, *(f"{place:60s} {count / calls:10.1f} {entered / calls:8.1f}" for place, count, entered in rows)]


@contextmanager
def nodes() -> Iterator[list[str]]:
    """The ports of two nodes in a process of their own."""
    command = [sys.executable, str(HERE.parent / "paced_node.py"), "--events", "64", "--gap", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ports: list[str] = []
        while len(ports) < 2:
            ports += process.stdout.readline().split()
        yield ports


def ask(port: int, calls: int, *, stream: bool) -> None:
    """Ask so many times over one connection. Raises RuntimeError when an answer is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    for _ in range(calls):
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": stream}), headers)
        answer = connection.getresponse()
        if answer.status != 200 or not answer.read():
            raise RuntimeError(f"the router answered {answer.status}")
    connection.close()


async def count(config: Path, *, stream: bool) -> Steps:
    """Steps of CALLS calls."""
    steps = Steps()
    read = settings.load(config, {})
    logs.configure(calls=False, level="warning")
    async with running(read) as app:
        await asyncio.to_thread(ask, app.port, WARM, stream=stream)
        with steps.counting():
            await asyncio.to_thread(ask, app.port, CALLS, stream=stream)
    return steps


def measure(*, stream: bool = False) -> Steps:
    """Steps of CALLS calls through a router of its own."""
    with tempfile.TemporaryDirectory() as home, nodes() as ports:
        config = Path(home) / "ebbtide.yaml"
        config.write_text(SETTINGS.format(home=home, ports=ports, key=KEY))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(count(config, stream=stream))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", action="store_true", help="ask for a stream")
    parser.add_argument("--functions", action="store_true", help="by function instead of by file")
    parser.add_argument("--top", type=int, default=20, help="how many rows")
    asked = parser.parse_args()
    print("\n".join(measure(stream=asked.stream).table(CALLS, asked.top, functions=asked.functions)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
