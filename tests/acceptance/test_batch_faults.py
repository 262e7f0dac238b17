"""What a batch's files and its database may not cost: memory, chat, or a line."""

import asyncio
import os
import sqlite3
from contextlib import AsyncExitStack, closing
from statistics import median
from time import monotonic
from typing import Any

import psutil
import pytest

from tests.acceptance.batches import END, FILE, FORM, PURPOSE, counted_exactly, lines, look, submit
from tests.fakes import FakeNode, Script
from tests.rig import Connection, RouterProcess, ask, chat, entry, eventually, request, running_process

MIB = 2**20
UPLOAD_MIB = int(os.environ.get("EBBTIDE_TEST_UPLOAD_MIB", "32"))
"""Size of each file; 200 is the largest input of a batch."""
TOGETHER = 4
ROUTER_MIB = 100
"""Most that all the files together may hold of the router's memory."""
LOCKED_S = 3.0


class Chats:
    """Somebody chats all the while: seconds to the answer of each."""

    def __init__(self, router: RouterProcess) -> None:
        self._router = router
        self.took: list[float] = []

    async def run(self) -> None:
        while True:
            began = monotonic()
            assert (await ask(self._router.port, chat())).status == 200
            self.took.append(monotonic() - began)
            await asyncio.sleep(0.05)


class Memory:
    """The most a process held over what it holds now."""

    def __init__(self, process: int) -> None:
        self._process = psutil.Process(process)
        self._before = self._process.memory_info().rss
        self.most = 0

    async def run(self) -> None:
        while True:
            self.most = max(self.most, self._process.memory_info().rss - self._before)
            await asyncio.sleep(0.02)


def told(chats: Chats) -> str:
    return f"median {median(chats.took):.3f}, worst {max(chats.took):.3f}"


class _While:
    """Runs works for the length of the block; what one of them raises is raised at its end."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(work) for work in self._works]

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def upload(router: RouterProcess, piece: bytes) -> str:
    headers = (*FORM, ("Transfer-Encoding", "chunked"))
    async with await Connection.open(router.port) as wire:
        await wire.send(request("/v1/files", b"", headers=headers))
        for data in (PURPOSE + FILE, *[piece] * UPLOAD_MIB, b"\r\n" + END, b""):
            await wire.send(b"%x\r\n%b\r\n" % (len(data), data))
        reply = await wire.reply()
    assert reply.json["bytes"] == UPLOAD_MIB * len(piece), reply.body
    return str(reply.json["id"])


@pytest.mark.timeout(240)
async def test_files_that_come_and_go_together_hold_little_memory_and_chat_goes_on(tmp_path):
    """B75: four long uploads at once, then four readers that read nothing."""
    piece = b'{"x":"' + b"y" * (MIB - 9) + b'"}\n'
    async with FakeNode(name="a") as node:
        settings = {"nodes": [entry(node)], "store": {"url": f"sqlite:///{tmp_path}/ebbtide.db"}}
        async with running_process(settings, tmp_path) as router:
            quiet, busy = Chats(router), Chats(router)
            async with _While(quiet.run()):
                await asyncio.sleep(1)
            memory = Memory(router.process.pid)
            async with _While(busy.run(), memory.run()):
                files = await asyncio.gather(*(upload(router, piece) for _ in range(TOGETHER)))
                async with AsyncExitStack() as readers:
                    for file in files:
                        line = await readers.enter_async_context(
                            await Connection.open(router.port, receive_buffer=4096)
                        )
                        await line.send(request(f"/v1/files/{file}/content", method="GET"))
                        await line.read_until(b"\r\n\r\n")
                    await asyncio.sleep(0.5)
    print(f"memory {memory.most / MIB:.0f} MiB; seconds of a chat, quiet {told(quiet)}, beside files {told(busy)}")
    assert memory.most < ROUTER_MIB * MIB
    assert len(busy.took) > 5
    assert median(busy.took) < median(quiet.took) + 0.1


async def test_a_database_that_another_process_locks_costs_no_line_and_no_chat(tmp_path):
    """B79: lines end 100 a second, somebody polls, and for three seconds nothing can be written."""
    store = tmp_path / "ebbtide.db"
    async with FakeNode(name="a", script=Script(ttft=0.05), slots=24) as node:
        settings = {"nodes": [entry(node)], "store": {"url": f"sqlite:///{store}"}}
        async with running_process(settings, tmp_path) as router:
            batch_id = await submit(router.port, lines(400))
            await eventually(lambda: node.completed >= 20, within=10)
            chats, polls = Chats(router), []
            with closing(sqlite3.connect(store, isolation_level=None, timeout=10)) as rude:
                async with _While(chats.run()):
                    rude.execute("BEGIN IMMEDIATE")
                    locked = monotonic()
                    while monotonic() - locked < LOCKED_S:
                        began = monotonic()
                        assert (await look(router.port, batch_id))["status"] == "in_progress"
                        polls.append(monotonic() - began)
                        await asyncio.sleep(0.1)
                    rude.execute("COMMIT")
            await counted_exactly(router.port, batch_id, 400, within=40)
            assert "error" not in router.said
    assert sum(len(seen.body) > 0 for seen in node.seen) >= 400
    assert median(polls) < 0.1
    assert len(chats.took) > 10
    assert median(chats.took) < 0.25
