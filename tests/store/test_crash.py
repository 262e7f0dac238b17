"""kill -9 of a router's process, anywhere in a batch: the next one goes on, and the count is exact."""

import asyncio
import json
import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection

import pytest

from router.core.job import BATCH_FINAL
from router.jobs.store import NewBatch, Store
from tests.store.bench import CHAT, answer, end_of, line_bytes, new_jobs

LINES = 100
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def life(url: str, said: Connection) -> None:
    """A router's process: validates, runs, makes files; says each line once the store has it."""
    asyncio.run(work(url, said))


async def work(url: str, said: Connection | None) -> None:
    store = await Store.open(url, router="chaos")
    while True:
        if (batch := await store.claim_validation(30)) is not None:
            await store.add_jobs(batch, new_jobs(LINES))
            await store.begin(batch, model="m")
        for job in await store.claim(models=["m"], limit=5, lease_s=30):
            assert await store.finish(job, answer(job, 400 if job.line % 10 == 0 else 200))
            if said:
                said.send(job.line)
        swept = await store.sweep(steps=1)
        if said is None and not swept.more and not (await store.usage()).batches:
            break
    await store.close()


def killed(url: str, lines: int, after_s: float) -> list[int]:
    """Run a router until it said so many lines and a little longer, and kill it; the lines it said."""
    mine, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=life, args=(url, theirs))
    child.start()
    theirs.close()
    said: list[int] = []
    try:
        while len(said) < lines and mine.poll(20):
            said.append(mine.recv())
        mine.poll(after_s)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        while True:
            said.append(mine.recv())
    except EOFError:
        child.join()
    return said


@pytest.mark.timeout(300)
async def test_kill_9(url: str) -> None:
    """What was told as kept is kept, and no line that was kept is done again."""
    store = await Store.open(url, router="observer")
    async with store.writing(caller="ann", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
        await writer.write(b"".join(line_bytes(n) for n in range(1, LINES + 1)))
    new = NewBatch(caller="ann", endpoint=CHAT, input_file_id=writer.row.id, completion_window="24h", window_s=86400)
    batch = await store.create_batch(new)
    said: list[int] = []
    luck = random.Random(7)
    for _ in range(12):
        said += await asyncio.to_thread(killed, url, luck.randint(0, 9), luck.uniform(0.0, 0.02))
        row = await store.batch("ann", batch.id)
        assert row is not None
        assert row.completed + row.failed >= len(said)
        if row.state in BATCH_FINAL:
            break
    await work(url, None)
    row = await store.batch("ann", batch.id)
    assert row is not None
    assert len(said) == len(set(said))
    assert (row.state, row.total, row.completed, row.failed) == ("completed", LINES, LINES * 9 // 10, LINES // 10)
    ends = [await ends_in(store, file) for file in (row.output_file_id, row.error_file_id)]
    assert [len(part) for part in ends] == [LINES * 9 // 10, LINES // 10]
    assert len(dict(ends[0] + ends[1])) == LINES
    await store.close()


async def ends_in(store: Store, file_id: str | None) -> list[tuple[str, str]]:
    file = await store.file("ann", file_id or "")
    assert file is not None
    data = b"".join([piece async for piece in store.content(file)])
    return [(line["custom_id"], end_of(line)) for line in map(json.loads, data.splitlines())]
