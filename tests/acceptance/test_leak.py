"""A leak from end to end: real processes grow, `ebbtide agent` tells it, the router drains, restarts and lets in again.

Chat runs throughout and a batch beside it: no call fails, and each line is done once. Nothing is told to the router but
by the agent: the findings are its own. The hook is a command that kills the tree, as an operator would write it, and
something like an init system starts it again. The node's answers are a fake's.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from router.fleet import keeper, watch
from tests.fakes import FakeNode, Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, entry, eventually, stream
from tests.rig.recycling import agent, called, care, hook

MIB = 2**20
LIMIT = 72 * MIB
MOST_MIB = 900
"""What the tree grows to if nobody ends it."""
LEAK = """
import os, sys, time
if os.fork():
    os.wait()
else:
    kept = []
    for _ in range(int(sys.argv[2])):
        kept.append(bytearray(b"x") * 2**20)
        time.sleep(0.02)
"""
"""The child grows; the parent is what an operator knows by name."""


class Engine:
    """A process tree that leaks, with a node's face. It is started again whenever it ends; `lives` counts."""

    def __init__(self, face: FakeNode, home: Path) -> None:
        self.face, self.name, self.pid_file = face, f"ebbtide-leak-{os.getpid()}", home / "engine.pid"
        self.lives = 0
        self._process: asyncio.subprocess.Process | None = None

    async def _begin(self) -> None:
        command = [sys.executable, "-c", LEAK, self.name, str(MOST_MIB)]
        self._process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        self.pid_file.write_text(str(self._process.pid))
        self.lives += 1

    async def _follow(self) -> None:
        while self._process is not None:
            await self._process.wait()
            await self.face.down()
            await self._begin()
            await self.face.up()

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """While the block lasts."""
        await self._begin()
        task = asyncio.create_task(self._follow(), name="fake-init")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert self._process is not None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


LIMITED = {"rss_limit_bytes": LIMIT}
AHEAD = {"before_limit_s": 86400}
"""Long before the memory of whatever machine this is ends; growth alone is the reason."""


@pytest.mark.parametrize(
    ("due", "hour_s", "why"),
    [(LIMITED, 3600.0, "the limit is"), (AHEAD, 0.6, "its memory grows and reaches its limit in")],
    ids=["over its limit", "foreseen"],
)
async def test_a_leaking_node_is_restarted_and_nobody_notices(rig, tmp_path, monkeypatch, due, hour_s, why):
    """`hour_s` is how long an hour is to who judges growth, which takes five of them."""
    for module, name, value in (
        (watch, "SAMPLE_S", 0.08),
        (watch, "DIAGNOSE_H", 0.4 / hour_s),
        (keeper, "EVERY_S", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    log = tmp_path / "hook.log"
    leaky, other = await rig.node(script=Script(n=5, gap=0.02)), await rig.node(script=Script(n=5, gap=0.02))
    engine = Engine(leaky, tmp_path)
    kill = hook(log, f"kill -9 -$(cat {engine.pid_file})")
    statuses, during, stop, states, drained_for = [], set(), asyncio.Event(), [], []

    async def load(app) -> None:
        while not stop.is_set():
            reply = await ask(app.port, stream() if len(statuses) % 2 else chat())
            statuses.append((reply.status, reply.clean))
            during.add(str(app.node("n1").state))

    async with agent(engine.name) as url:
        app = await rig.router(
            entry(leaky, agent=url), other, **care(log, command=kill, enabled=True, cooldown_s=60, settle_s=0.6, **due)
        )
        app.inside.watch._hour_s = hour_s
        app.inside.watch.forget("n1")
        app.node("n1").moved = lambda node, _: (states.append(str(node.state)), drained_for.append(node.cause))
        async with engine.living(), room(app, tmp_path) as desk, asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(load(app))
            batch = await desk.submit([line(number) for number in range(60)])
            await eventually(lambda: "draining" in states, within=25)
            await eventually(lambda: states[-1:] == ["ready"], within=20)
            again = await eventually(lambda: app.inside.watch.diagnosis("n1").rss_bytes, within=5)
            stop.set()
            results = await desk.drained(batch, within=20)
    assert states == ["draining", "recycling", "probation", "ready"]
    assert why in drained_for[0]
    assert (engine.lives, called(log)) == (2, ["n1"])
    assert 0 < again < LIMIT, "what is known is of the new processes"
    assert set(statuses) == {(200, True)}
    assert {"ready", "recycling"} <= during, "calls went on all the while"
    assert (results.ids, results.errors) == ({f"r{number}" for number in range(60)}, {})
    assert other.accepted
