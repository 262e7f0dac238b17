"""A leak beside a real llama.cpp, end to end: seen by `ebbtide agent`, drained, restarted by a command, let in again.

Two real servers answer. One of them is part of a process tree whose memory grows, as an engine's does that leaks: the
router learns of it from the agent alone, and the hook is the script an operator would write. Chat runs throughout and a
batch beside it.
"""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from router.fleet import keeper, watch
from tests.engines.conftest import START_S
from tests.engines.live import LLAMA_MODEL, Llama
from tests.jobs.desk import line, room
from tests.rig import ask, chat, eventually, stream
from tests.rig.recycling import agent, called, care, hook
from tests.rig.routers import free_port

MIB = 2**20
MORE = 64 * MIB
"""It may have so much more than it began with."""
LINES = 24
MODEL = {"model": LLAMA_MODEL, "max_tokens": 4}
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
signal.alarm(180)
if os.fork():
    sys.exit(subprocess.call([sys.executable, "-m", "router.tools.llama", *sys.argv[2:]]))
kept = []
while len(kept) < 600:
    if os.path.exists("leaks"):
        kept.append(bytearray(b"x") * 2**20)
    time.sleep(0.05)
time.sleep(180)
"""
"""An engine, and beside it in the same tree something that grows by up to 20 MiB a second while it is told to."""
SLOW = {
    "probe": {"every_s": 0.5, "timeout_s": 5},
    "upstream": {"connect_s": 2, "first_byte_s": 60, "idle_s": 30},
    "pools": {"interactive": {"patience_s": 20}, "batch": {"patience_s": 60}},
}
pytestmark = pytest.mark.timeout(150)


class Engine:
    """The tree, and how an operator restarts it."""

    def __init__(self, llama: Llama, weights: Path, home: Path) -> None:
        self.llama, self.name = llama, f"ebbtide-leak-{os.getpid()}"
        self.leaks = home / "leaks"
        self._pid_file, self.restart = home / "engine.pid", home / "restart.sh"
        (home / "tree.py").write_text(TREE)
        words = [sys.executable, str(home / "tree.py"), self.name, *llama.arguments(weights)]
        self.restart.write_text(
            f"cd {home}\nkill -9 -$(cat {self._pid_file} 2>/dev/null) 2>/dev/null\nrm -f leaks\n"
            f"setsid {shlex.join(words)} >>{home}/engine.log 2>&1 </dev/null &\necho $! >{self._pid_file}\n"
        )

    @property
    def pid(self) -> int:
        return int(self._pid_file.read_text())

    def end(self) -> None:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(self.pid, signal.SIGKILL)


@pytest.fixture
def engine(weights: Path, tmp_path: Path) -> Iterator[Engine]:
    leaky = Engine(Llama("leaky", free_port(), slots=4, context=512), weights, tmp_path)
    yield leaky
    leaky.end()


async def answers(llama: Llama) -> None:
    """Wait until it has loaded its model."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(ConnectionError):
                if (await ask(llama.port, path="/health", method="GET")).status == 200:
                    return
            await asyncio.sleep(0.05)


async def usual(engine: Engine) -> int:
    """Bytes of the tree once it has worked: weights come into memory with the first calls."""
    llama = engine.llama
    replies = [await ask(llama.port, chat(f"Name {number}.", **MODEL)) for number in range(llama.slots)]
    assert {reply.status for reply in replies} == {200}
    root = psutil.Process(engine.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


def since(word: str, states: list[str]) -> list[str]:
    """From the first `word` on; nothing before it was there."""
    return states[states.index(word) :] if word in states else []


async def test_a_llama_that_leaks_is_restarted_and_nobody_notices(rig, engine, llamas, tmp_path, monkeypatch):
    for module, name, value in ((watch, "SAMPLE_S", 0.2), (watch, "DIAGNOSE_H", 0.0), (keeper, "EVERY_S", 0.1)):
        monkeypatch.setattr(module, name, value)
    log = tmp_path / "hook.log"
    statuses, during, states, causes, stop = [], set(), [], [], asyncio.Event()

    async def load(app, number):
        while not stop.is_set():
            body = (stream if len(statuses) % 2 else chat)(f"Say {number}.", **MODEL)
            reply = await ask(app.port, body)
            statuses.append((reply.status, reply.clean))
            during.add(str(app.node("leaky").state))

    await (await asyncio.create_subprocess_exec("/bin/sh", engine.restart)).wait()
    first = engine.pid
    async with agent(engine.name) as url:
        await answers(engine.llama)
        limit = await usual(engine) + MORE
        command = hook(log, f"/bin/sh {engine.restart}")
        settings = care(log, command=command, enabled=True, cooldown_s=600, ready_s=60, rss_limit_bytes=limit)
        settings["care"]["drain_s"] = 60
        nodes = engine.llama.entry(agent=url, kv_tokens=2048), llamas.chat.entry(kv_tokens=512)
        app = await rig.router(*nodes, **settings, **SLOW)
        app.node("leaky").moved = lambda node, _: (states.append(str(node.state)), causes.append(node.cause))
        async with room(app, tmp_path) as desk, asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(load(app, number))
            batch = await desk.submit([line(number, model=LLAMA_MODEL) for number in range(LINES)])
            engine.leaks.touch()
            await eventually(lambda: "ready" in since("recycling", states), within=60)
            again = await eventually(lambda: app.inside.watch.diagnosis("leaky").rss_bytes, within=5)
            stop.set()
            results = await desk.drained(batch, within=60)
    assert since("draining", states)[:4] == ["draining", "recycling", "probation", "ready"]
    assert f"the limit is {limit / 2**30:.2g} GiB" in causes[states.index("draining")]
    assert called(log) == ["leaky"]
    assert engine.pid != first
    assert 0 < again < limit, "what is known is of the new processes"
    assert set(statuses) == {(200, True)}
    assert {"ready", "recycling"} <= during, "chat went on all the while"
    assert (results.ids, results.errors) == ({f"r{number}" for number in range(LINES)}, {})
