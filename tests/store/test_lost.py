"""A database that goes away, is locked, or has no space: told as such, nothing torn, and well again by itself."""

import asyncio
import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from router.errors import StoreError, StoreFull, StoreLost
from router.jobs.schema import CHUNK_BYTES
from router.jobs.store import NewResult, Store, Topic
from tests.store.bench import Bench, answer


async def test_cut_connections_are_made_again(postgres_url: str) -> None:
    async with Bench(postgres_url) as bench:
        await bench.running(3)
        jobs = await bench.claim()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(bench.store.watch())
            await asyncio.sleep(0)
            seen = bench.store.wakes.count(Topic.ENDED)
            await cut(bench)
            assert (
                await bench.store.wakes.wait(Topic.ENDED, seen, timeout_s=20) > seen
            )  # all bells ring once it hears again
            watch.cancel()
        for job in jobs:
            assert await until_kept(bench, lambda job=job: bench.store.finish(job, answer(job)))


async def cut(bench: Bench) -> None:
    """The server ends every connection but the one that asks; that one is lost with the next statement."""
    sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
    await bench.run(sql + "pg_backend_pid()")
    with pytest.raises(StoreLost):
        await bench.run("SELECT pg_terminate_backend(pg_backend_pid())")


async def until_kept(bench: Bench, act: Any) -> Any:
    """What callers do: ask again."""
    for _ in range(20):
        try:
            return await act()
        except StoreLost:
            await asyncio.sleep(0.01)
    raise AssertionError("the pool does not recover")


async def test_a_server_that_stops_and_starts(server: Any, postgres_url: str) -> None:
    async with Bench(postgres_url) as bench:
        batch = await bench.running(3)
        first, *rest = await bench.claim()
        await bench.store.finish(first, answer(first))
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreLost):
            await bench.store.ping()
        with pytest.raises(StoreLost):
            await bench.store.finish(rest[0], answer(rest[0]))
        with pytest.raises(StoreLost):
            await Store.open(postgres_url, router="late")
        await asyncio.to_thread(server.ensure_postgres_running)
        for job in rest:
            assert await until_kept(bench, lambda job=job: bench.store.finish(job, answer(job)))
        await bench.settle()
        assert await bench.holds(batch, 3) == {"done": 3}


async def test_a_router_that_freezes_in_a_transaction_holds_nobody_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server throws it out, and its locks with it."""
    monkeypatch.setattr("router.jobs.store.postgres.BUSY_S", 0.5)
    async with Bench(postgres_url) as bench:
        batch = await bench.running(2)
        frozen = await bench.router("frozen")

        async def freeze() -> None:
            async with frozen._db.write() as tx:
                await tx.all(text("SELECT * FROM batches FOR UPDATE"))
                assert await until_kept(bench, lambda: bench.store.cancel_batch("ann", batch.id))

        with pytest.raises(StoreLost):
            await freeze()
        await bench.settle()
        assert await bench.holds(batch, 2) == {"batch_cancelled": 2}


async def test_nothing_listens_there() -> None:
    with pytest.raises(StoreLost, match="cannot be reached"):
        await Store.open("postgresql://a@127.0.0.1:1/b", router="r")


@pytest.mark.parametrize("url", ["mysql://h/d", "sqlite://", "no url", "sqlite:////proc/none/x.db"])
async def test_what_cannot_be_a_store(url: str) -> None:
    with pytest.raises(StoreError):
        await Store.open(url, router="r")


async def test_another_process_that_writes_is_waited_for(sqlite_url: str) -> None:
    async with Bench(sqlite_url) as bench:
        await bench.running(20)
        jobs = await bench.claim()
        rude = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        rude.execute("BEGIN IMMEDIATE")
        writes = [asyncio.ensure_future(bench.store.finish(job, answer(job))) for job in jobs]
        for _ in range(20):
            assert (await bench.store.usage()).running == 20  # reading goes on meanwhile
        assert not any(write.done() for write in writes)
        rude.execute("COMMIT")
        assert all(await asyncio.gather(*writes))
        rude.close()


async def test_a_lock_that_is_never_let_go_is_told(sqlite_url: str) -> None:
    async with Bench(sqlite_url) as bench:
        await bench.running(1)
        await bench.run("SELECT 1")
        async with bench.store._db.write() as tx:
            await tx.connection.exec_driver_sql("PRAGMA busy_timeout = 50")
        rude = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        rude.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLost):
            await bench.claim()
        rude.execute("COMMIT")
        rude.close()
        assert len(await bench.claim()) == 1


async def test_a_full_disk(sqlite_url: str) -> None:
    """Uploads are refused, results wait, reading goes on; with space again everything goes on and nothing is torn."""
    async with Bench(sqlite_url) as bench:
        batch = await bench.running(40)
        spare = await bench.file(b"x" * (4 * CHUNK_BYTES))
        jobs = await bench.claim()
        (pages,) = (await bench.run("PRAGMA page_count"))[0]
        await bench.run(f"PRAGMA max_page_count = {pages + 40}")
        with pytest.raises(StoreFull):
            await bench.file(b"x" * (2 * CHUNK_BYTES))
        body = b'{"x":"' + b"y" * 100_000 + b'"}'
        kept = [await try_to_finish(bench, job, body) for job in jobs]
        assert True in kept
        assert False in kept
        now = await bench.again(batch)
        assert now.completed == sum(kept) == len(await bench.run("SELECT line FROM results"))
        assert await bench.store.delete_file("ann", spare.id)
        await bench.settle()
        for job, done in zip(jobs, kept, strict=True):
            assert done or await try_to_finish(bench, job, body) in (True, False)
        await bench.run("PRAGMA max_page_count = 1000000")
        for job in jobs:
            assert await bench.store.finish(job, NewResult(status=200, body=body))
        await bench.settle()
        assert await bench.holds(batch, 40) == {"done": 40}
        assert await bench.run("PRAGMA integrity_check") == [("ok",)]
        assert await bench.run("PRAGMA foreign_key_check") == []


async def try_to_finish(bench: Bench, job: Any, body: bytes) -> bool:
    try:
        return await bench.store.finish(job, NewResult(status=200, body=body))
    except StoreFull:
        return False


async def test_postgresql_says_that_its_disk_is_full(postgres_url: str) -> None:
    async with Bench(postgres_url) as bench:
        batch = await bench.running(2)
        jobs = await bench.claim()
        await bench.run(
            "CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
        )
        for table in ("results", "chunks"):
            await bench.run(f"CREATE TRIGGER no_space BEFORE INSERT ON {table} EXECUTE FUNCTION no_space()")
        with pytest.raises(StoreFull):
            await bench.store.finish(jobs[0], answer(jobs[0]))
        with pytest.raises(StoreFull):
            await bench.file(b"x")
        assert (await bench.again(batch)).completed == 0
        for table in ("results", "chunks"):
            await bench.run(f"DROP TRIGGER no_space ON {table}")
        for job in jobs:
            assert await bench.store.finish(job, answer(job))
        await bench.settle()
        assert await bench.holds(batch, 2) == {"done": 2}


async def test_errors_tell_no_bodies(bench: Bench) -> None:
    await bench.running(1)
    (job,) = await bench.claim()
    secret = json.dumps({"prompt": "SECRET"}).encode()
    with pytest.raises(StoreError) as refused:
        await bench.store.finish(job, NewResult(status=9999, body=secret))
    assert "SECRET" not in str(refused.value)


async def test_a_small_tmpfs(tmp_path: Path, sqlite_url: str) -> None:
    """The real thing, where this machine lets us mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=40m", "none", str(small), stderr=asyncio.subprocess.DEVNULL
    )
    if await mounted.wait():
        pytest.skip("no right to mount a tmpfs")
    try:
        async with Bench(f"sqlite:///{small}/ebbtide.db") as bench:
            batch = await bench.running(10)
            jobs = await bench.claim()
            spare = await bench.file(b"x" * (2 * CHUNK_BYTES))
            with pytest.raises(StoreFull):
                await bench.file(b"x" * (40 * CHUNK_BYTES))
            body = b'{"x":"' + b"y" * (4 * CHUNK_BYTES) + b'"}'
            kept = [await try_to_finish(bench, job, body) for job in jobs]
            assert False in kept
            assert await bench.store.delete_file("ann", spare.id)  # there is a reserve for that
            await bench.settle()
            ballast = small / "ballast"  # somebody else takes all that is left
            with suppress(OSError), ballast.open("wb") as file:
                while file.write(b"x" * 4096):
                    file.flush()
            assert not await try_to_finish(bench, jobs[-1], body)
            assert (await bench.again(batch)).completed == sum(kept)
            ballast.unlink()
            for job in jobs:
                assert await bench.store.finish(job, answer(job))
            await bench.settle()
            assert await bench.holds(batch, 10) == {"done": 10}
            assert await bench.run("PRAGMA integrity_check") == [("ok",)]
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(small))).wait()
