"""Files: byte-exact, private, paged, gone in small steps, and never half there."""

import asyncio
import os
import tracemalloc

import pytest

from router.errors import NotFound, StoreError
from router.jobs.schema import CHUNK_BYTES
from tests.store.bench import Bench


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_bytes_come_back_as_they_went(bench: Bench, size: int) -> None:
    data = os.urandom(size)
    async with bench.store.writing(caller="ann", purpose="batch", filename="a", expires_s=None) as writer:
        view, at = memoryview(data), 0
        for step in (1, 65536, 700_001, size):
            await writer.write(view[at : at + step])
            at += step
    assert writer.bytes == writer.row.bytes == size
    assert await bench.text(writer.row.id) == data
    assert await bench.store.file("ann", writer.row.id) == writer.row


@pytest.mark.parametrize(
    ("start", "length"), [(0, 5), (CHUNK_BYTES - 2, 4), (CHUNK_BYTES, 1), (5, None), (10**9, 3), (0, 0)]
)
async def test_any_part_can_be_read(bench: Bench, start: int, length: int | None) -> None:
    data = os.urandom(CHUNK_BYTES * 2 + 17)
    file = await bench.file(data)
    read = b"".join([piece async for piece in bench.store.content(file, start, length)])
    assert read == data[start : None if length is None else start + length]


async def test_name_and_purpose_may_come_after_the_bytes(bench: Bench) -> None:
    async with bench.store.writing(caller="ann", purpose="", filename="upload", expires_s=None) as writer:
        await writer.write(b"x")
        writer.purpose, writer.filename, writer.expires_s = "batch", "späte.jsonl", 3600
    row = await bench.store.file("ann", writer.row.id)
    assert row is not None
    assert (row.purpose, row.filename, row.expires_at) == ("batch", "späte.jsonl", row.created_at + 3600)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_file_that_is_broken_off_leaves_nothing(bench: Bench, error: type[BaseException]) -> None:
    async def break_off() -> None:
        async with bench.store.writing(caller="ann", purpose="batch", filename="a", expires_s=None) as writer:
            await writer.write(b"x" * (2 * CHUNK_BYTES))
            assert await bench.store.files("ann") == ([], False)
            raise error

    with pytest.raises(error):
        await break_off()
    await bench.settle()
    assert await bench.run("SELECT number FROM files") == []
    assert await bench.run("SELECT file FROM chunks") == []


async def test_another_caller_sees_nothing(bench: Bench) -> None:
    file = await bench.file(b"secret")
    assert await bench.store.file("bob", file.id) is None
    assert await bench.store.files("bob") == ([], False)
    assert not await bench.store.delete_file("bob", file.id)
    assert await bench.store.file("ann", "file-\0") is None
    assert not await bench.store.delete_file("ann", "no such; DROP TABLE files")


async def test_pages(bench: Bench) -> None:
    ids = [(await bench.file(b"x", purpose="batch" if n % 2 else "user_data")).id for n in range(5)]
    rows, more = await bench.store.files("ann", limit=2)
    assert ([row.id for row in rows], more) == ([ids[4], ids[3]], True)
    rows, more = await bench.store.files("ann", limit=10, after=ids[3])
    assert ([row.id for row in rows], more) == ([ids[2], ids[1], ids[0]], False)
    rows, more = await bench.store.files("ann", limit=3, order="asc", after=ids[1])
    assert ([row.id for row in rows], more) == (ids[2:], False)
    rows, _ = await bench.store.files("ann", purpose="batch")
    assert [row.id for row in rows] == [ids[3], ids[1]]
    for unknown in ("file-0", "\0"):
        with pytest.raises(NotFound):
            await bench.store.files("ann", after=unknown)


async def test_deleted_is_gone_at_once_and_from_the_disk_by_and_by(bench: Bench) -> None:
    file = await bench.file(b"x" * (CHUNK_BYTES * 40))
    assert await bench.store.delete_file("ann", file.id)
    assert await bench.store.file("ann", file.id) is None
    assert not await bench.store.delete_file("ann", file.id)
    assert (await bench.store.sweep(steps=1)).more
    assert len(await bench.run("SELECT file FROM chunks")) == 8
    await bench.settle()
    assert await bench.run("SELECT number FROM files") == []
    with pytest.raises(StoreError):
        _ = [piece async for piece in bench.store.content(file)]


async def test_expiry(bench: Bench) -> None:
    file = await bench.file(b"x", expires_s=3600)
    bench.clock.tick(3601)
    assert await bench.store.file("ann", file.id) is None
    assert await bench.store.files("ann") == ([], False)
    await bench.settle()
    assert await bench.run("SELECT number FROM files") == []


async def test_an_input_stays_while_a_batch_reads_it(bench: Bench) -> None:
    batch = await bench.running(2)
    assert await bench.store.delete_file("ann", batch.input_file_id)
    await bench.settle()
    for job in await bench.claim():
        assert b"custom_id" in await bench.store.line(job)
    await bench.store.cancel_batch("ann", batch.id)
    await bench.settle()
    assert await bench.run("SELECT number FROM files WHERE purpose = 'batch'") == []


async def test_what_a_dead_writer_left_is_removed(bench: Bench) -> None:
    other = await bench.router("other")
    writing = other.writing(caller="ann", purpose="batch", filename="a", expires_s=None)
    writer = await writing.__aenter__()
    await writer.write(b"x" * CHUNK_BYTES)
    await bench.settle()
    assert len(await bench.run("SELECT number FROM files")) == 1
    await bench.crash(other)
    bench.clock.tick(60)
    await bench.store.beat()
    assert [router.name for router in await bench.store.prune()] == ["other"]
    await bench.settle()
    assert await bench.run("SELECT number FROM files") == []
    with pytest.raises(StoreError):
        await writing.__aexit__(None, None, None)


async def test_a_long_file_holds_little_memory(bench: Bench) -> None:
    piece = b"x" * 65536
    tracemalloc.start()
    async with bench.store.writing(caller="ann", purpose="batch", filename="a", expires_s=None) as writer:
        for _ in range(64 * 16):
            await writer.write(piece)
    file = await bench.store.file("ann", writer.row.id)
    assert file is not None
    read = 0
    async for part in bench.store.content(file):
        read += len(part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == 64 * 2**20
    assert peak < 8 * 2**20
