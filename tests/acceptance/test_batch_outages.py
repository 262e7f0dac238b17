"""What a batch lives on goes away under a running router: its disk is full, its database is cut off.

Nothing was killed here, so no line may be asked twice.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from tests.acceptance.batches import MARK, Tally, counted_exactly, lines, look, submit
from tests.fakes import FakeNode, Script
from tests.rig import Reply, RouterProcess, ask, chat, entry, eventually, running_process
from tests.store.conftest import database, server, socket_of

__all__ = ["server"]

LINES, SLOTS = 120, 4
DISK = "48m"
PEOPLE = count()
BACK_S = 5.0
"""How soon a batch goes on by itself."""


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    """A node that outlives the outage."""
    async with FakeNode(slots=SLOTS + 2, script=Script(ttft=0.12, gap=0.02)) as made:
        yield made


def settings(node: FakeNode, store: str) -> dict[str, Any]:
    return {"store": {"url": store}, "nodes": [entry(node, max_sequences=SLOTS + 2)]}


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Path]:
    """A disk of its own, which a test may fill."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder))
    if await (await asyncio.create_subprocess_exec(*mount, stderr=asyncio.subprocess.DEVNULL)).wait():
        pytest.skip("no right to mount a tmpfs")
    yield folder
    await (await asyncio.create_subprocess_exec("umount", "--lazy", str(folder))).wait()


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not one page is free for the length of the block."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 4096):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
    try:
        yield
    finally:
        ballast.unlink()


async def completed(router: RouterProcess, batch_id: str) -> int:
    return int((await look(router.port, batch_id))["request_counts"]["completed"])


async def progress(router: RouterProcess, batch_id: str, more: int, within: float = 20.0) -> None:
    """Waits until so many more lines have their answer."""
    ends, before = monotonic() + within, await completed(router, batch_id)
    while await completed(router, batch_id) < before + more:
        assert monotonic() < ends, await look(router.port, batch_id)
        await asyncio.sleep(0.05)


async def chats(router: RouterProcess) -> bool:
    """Whether a person is answered, with a question nobody asked before."""
    return (await ask(router.port, chat(f"person {next(PEOPLE)}"))).status == 200


async def upload(router: RouterProcess, content: bytes) -> Reply:
    form = f'--{MARK.decode()}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += f'--{MARK.decode()}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = form.encode() + content + b"\r\n--%b--\r\n" % MARK
    headers = (("Content-Type", f"multipart/form-data; boundary={MARK.decode()}"),)
    return await ask(router.port, body, "/v1/files", headers=headers)


async def paused(router, batch_id):
    """Whether the batch says that it waits for room on the disk."""
    batch = await look(router.port, batch_id)
    return "no space" in (batch["ebbtide"].get("waiting_reason") or "")


async def test_a_full_disk_is_a_pause(node, tmp_path, small):
    """Chat goes on, what is new is refused in OpenAI's words, what was answered is kept and written later."""
    tally = Tally([node])
    async with running_process(settings(node, f"sqlite:///{small}/ebbtide.db"), tmp_path) as router:
        batch_id = await submit(router.port, lines(LINES))
        await progress(router, batch_id, 10)
        input_id = (await look(router.port, batch_id))["input_file_id"]
        with filled(small):
            before = await completed(router, batch_id)
            async with asyncio.timeout(20):  # between two lines nothing is under way either
                while tally.inflight or not await paused(router, batch_id):  # noqa: ASYNC110  # what another process says
                    await asyncio.sleep(0.05)
            asked = sum(tally.asked().values())
            assert await chats(router)
            new = {"input_file_id": input_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            for refused in (await upload(router, lines(3)), await ask(router.port, new, "/v1/batches")):
                assert refused.status == 507, refused.body
                assert refused.header("x-should-retry") == "false"
                error = refused.json["error"]
                assert (error["code"], error["type"]) == ("insufficient_storage", "server_error")
                assert error["message"]
            batch = await look(router.port, batch_id)
            assert batch["status"] == "in_progress"
            assert before <= batch["request_counts"]["completed"] < LINES
            assert "no space" in batch["ebbtide"]["waiting_reason"]
            assert sum(tally.asked().values()) <= asked + 1  # the chat
            done = node.completed
        recovered = monotonic()
        await eventually(lambda: node.completed > done + 2, within=BACK_S)
        await progress(router, batch_id, 5, within=BACK_S - (monotonic() - recovered))
        assert (await upload(router, lines(3))).status == 200
        await counted_exactly(router.port, batch_id, LINES, within=40)
    assert tally.repeats == 0


@pytest.fixture
async def postgres(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """An empty PostgreSQL database, to be migrated by the router itself."""
    async with database(socket_of(request.getfixturevalue("server")), "template1") as url:
        yield url


async def cut(server: Any, url: str) -> int:
    """The server ends every connection of the router; how many."""
    name = url.partition("@/")[2].partition("?")[0]
    admin = await asyncpg.connect(user="postgres", database="postgres", host=socket_of(server))
    try:
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1"
        return int(await admin.fetchval(ended, name))
    finally:
        await admin.close()


async def test_lost_connections_cost_nothing(node, tmp_path, server, postgres):
    """Connections are cut mid-run, then the server is stopped and started."""
    tally = Tally([node])
    async with running_process(settings(node, postgres), tmp_path) as router:
        batch_id = await submit(router.port, lines(LINES))
        await progress(router, batch_id, 10)
        for _ in range(3):
            assert await cut(server, postgres) > 1
            cut_at = monotonic()
            assert await chats(router)
            await eventually(lambda before=node.completed: node.completed > before + 2, within=BACK_S)
            await until_answered(router, batch_id, BACK_S - (monotonic() - cut_at))
        await asyncio.to_thread(server.stop)
        try:
            assert await chats(router)
            lost = await ask(router.port, path=f"/v1/batches/{batch_id}", method="GET")
            assert (lost.status, lost.json["error"]["type"]) == (503, "service_unavailable_error")
            await eventually(lambda: not tally.inflight, within=10)
            done = node.completed
        finally:
            await asyncio.to_thread(server.ensure_postgres_running)
        await eventually(lambda: node.completed > done + 2, within=BACK_S)
        await counted_exactly(router.port, batch_id, LINES, within=40)
    assert tally.repeats == 0


async def until_answered(router: RouterProcess, batch_id: str, within: float) -> None:
    """Polls may be told 503 for a moment."""
    ends = monotonic() + within
    while (reply := await ask(router.port, path=f"/v1/batches/{batch_id}", method="GET")).status != 200:
        assert reply.status == 503, reply.body
        assert monotonic() < ends
        await asyncio.sleep(0.05)
