"""A leak from end to end: a real process grows, the router sees it coming, drains, restarts it and lets it in again.

Chat runs throughout and a batch beside it: no call fails, and each line is done once. What is held of the node is read
from the process as an agent reads it; the node's answers are a fake's.
"""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes import FakeNode, Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, eventually, stream
from tests.rig.recycling import Found, called, care, find, hook

MIB = 2**20
LIMIT = 96 * MIB
LEAK = "import time\nkept = []\nwhile True:\n    kept.append(bytearray(b'x') * 2**20)\n    time.sleep(0.02)\n"


class Engine:
    """A process that leaks, with a node's face. `restarts` counts its lives after the first."""

    def __init__(self, face: FakeNode) -> None:
        self.face = face
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0

    async def begin(self) -> None:
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", LEAK)

    async def end(self) -> None:
        process = self.process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def rss(self) -> int:
        """Resident bytes of the process; 0 while there is none."""
        if self.process is None or self.process.returncode is not None:
            return 0
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def restart(self) -> None:
        await self.face.down()
        await self.end()
        await self.begin()
        await self.face.up()
        self.restarts += 1


@asynccontextmanager
async def living(engine: Engine, log: Path):
    """The engine, restarted whenever its hook is called."""

    async def follow() -> None:
        while True:
            if len(called(log)) > engine.restarts:
                await engine.restart()
            await asyncio.sleep(0.02)

    await engine.begin()
    task = asyncio.create_task(follow(), name="fake-restarts")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.end()


async def test_a_leaking_node_is_restarted_and_nobody_notices(rig, tmp_path):
    log = tmp_path / "hook.log"
    leaky, other = await rig.node(script=Script(n=5, gap=0.02)), await rig.node(script=Script(n=5, gap=0.02))
    engine = Engine(leaky)
    app = await rig.router(**care(log, command=hook(log), enabled=True, rss_limit_bytes=LIMIT, cooldown_s=60))
    keeper, statuses, stop = app.inside.caring.keeper, [], asyncio.Event()
    keeper._every_s = 0.1
    states: list[str] = []
    app.node("n1").moved = lambda node, _: states.append(str(node.state))

    async def load() -> None:
        while not stop.is_set():
            reply = await ask(app.port, stream() if len(statuses) % 2 else chat())
            statuses.append((reply.status, reply.clean))

    async def look() -> None:
        while not stop.is_set():
            find(app, n1=Found("memory_growth", rss_bytes=engine.rss()))
            keeper.look()
            await asyncio.sleep(0.05)

    async with living(engine, log), room(app, tmp_path) as desk, asyncio.TaskGroup() as group:
        for work in (load(), load(), load(), look()):
            group.create_task(work)
        batch = await desk.submit([line(number) for number in range(60)])
        await eventually(lambda: "draining" in states, within=20)
        await eventually(lambda: states[-1:] == ["ready"], within=20)
        assert engine.rss() < LIMIT, "the restart ended the growth"
        stop.set()
        results = await desk.drained(batch, within=20)
    assert states == ["draining", "recycling", "probation", "ready"]
    assert (engine.restarts, called(log)) == (1, ["n1"])
    assert set(statuses) == {(200, True)}
    assert len(statuses) > 10
    assert (results.ids, results.errors) == ({f"r{number}" for number in range(60)}, {})
    assert other.accepted
