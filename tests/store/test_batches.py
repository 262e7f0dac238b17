"""The life of a batch: every road to every end, and each line once in the files at each of them."""

import asyncio

import pytest

from router.core.job import BATCH_TRANSITIONS, BatchState
from router.errors import Conflict, NotFound
from router.jobs.store import BatchRow, LineError, NewBatch, NewResult, Tokens, Topic
from tests.store.bench import CHAT, Bench, answer, new_jobs


async def test_a_batch_as_it_is_created(bench: Bench) -> None:
    batch = await bench.validating(
        1, metadata={"b": "2", "a": "ü"}, output_expires_s=3600, priority=3, webhook="https://h/"
    )
    assert batch.state is BatchState.VALIDATING
    assert (batch.total, batch.completed, batch.failed) == (0, 0, 0)
    assert batch.expires_at == batch.created_at + 86400
    assert batch.metadata == {"b": "2", "a": "ü"}
    assert batch.errors == ()
    assert await bench.again(batch) == batch


async def test_every_line_answered_makes_it_completed(bench: Bench) -> None:
    batch = await bench.running(5)
    assert (batch.state, batch.total, batch.model) == (BatchState.IN_PROGRESS, 5, "m")
    for job in await bench.claim():
        tokens = Tokens(input=10, output=4, cached=3, reasoning=2)
        status = 400 if job.line == 2 else 200
        result = NewResult(status=status, request_id=f"r{job.line}", body=b'{ "a": [1.0] }', tokens=tokens)
        assert await bench.store.finish(job, result)
        now = await bench.again(batch)
        assert now.completed + now.failed == now.tokens.input // 10
    (event,) = await bench.settle()
    batch = await bench.again(batch)
    assert (event.batch_id, event.state, event.completed, event.failed) == (batch.id, BatchState.COMPLETED, 4, 1)
    assert batch.tokens == Tokens(input=50, output=20, cached=15, reasoning=10)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert await bench.holds(batch, 5) == {"done": 4, "failed": 1}
    output = await bench.text(batch.output_file_id)
    assert b'"response":{"status_code":200,"request_id":"r1","body":{ "a": [1.0] }},"error":null}\n' in output
    file = await bench.store.file("ann", batch.output_file_id or "")
    assert file is not None
    assert (file.purpose, file.filename, file.expires_at) == ("batch_output", f"{batch.id}_output.jsonl", None)


async def test_all_lines_failing_is_still_completed_and_has_no_output_file(bench: Bench) -> None:
    batch = await bench.running(3)
    for job in await bench.claim():
        await bench.store.finish(job, NewResult(error_code="server_error", error_message='It "broke".\n'))
    await bench.settle()
    batch = await bench.again(batch)
    assert (batch.state, batch.output_file_id, batch.failed) == (BatchState.COMPLETED, None, 3)
    _, error = await bench.results(batch)
    assert error[0]["error"] == {"code": "server_error", "message": 'It "broke".\n'}
    assert await bench.holds(batch, 3) == {"failed": 3}


async def test_the_window_closes(bench: Bench) -> None:
    batch = await bench.running(5)
    first, second = await bench.claim(2)
    assert await bench.store.finish(first, answer(first))
    seen = bench.store.wakes.count(Topic.STOPPED)
    bench.clock.tick(86400)
    assert await bench.claim() == []
    await bench.settle()
    assert bench.store.wakes.count(Topic.STOPPED) > seen
    assert await bench.store.extend([second], 30) == {second.key}
    assert not await bench.store.finish(second, answer(second))
    batch = await bench.again(batch)
    assert (batch.state, batch.expired_at) == (BatchState.EXPIRED, int(bench.clock.now))
    assert await bench.holds(batch, 5) == {"done": 1, "batch_expired": 4}


async def test_a_window_that_closes_after_the_last_answer_takes_nothing_away(bench: Bench) -> None:
    batch = await bench.running(2)
    await bench.finish_all()
    await bench.store.sweep(steps=1)
    bench.clock.tick(86400)
    await bench.settle()
    assert (await bench.again(batch)).state is BatchState.COMPLETED


@pytest.mark.parametrize("answered", [0, 2, 5])
async def test_cancel(bench: Bench, answered: int) -> None:
    batch = await bench.running(5)
    jobs = await bench.claim(4)
    for job in [*jobs, *await bench.claim(1)][:answered]:
        await bench.store.finish(job, answer(job))
    row = await bench.store.cancel_batch("ann", batch.id)
    assert (row.state, row.output_file_id) == (BatchState.CANCELLING, None)
    assert await bench.store.cancel_batch("ann", batch.id) == row
    assert await bench.claim() == []
    assert await bench.store.extend(jobs, 30) == {job.key for job in jobs}
    await bench.settle()
    row = await bench.store.cancel_batch("ann", batch.id)
    assert row.state is BatchState.CANCELLED
    expected = {"done": answered, "batch_cancelled": 5 - answered}
    assert await bench.holds(batch, 5) == {end: count for end, count in expected.items() if count}


async def test_cancel_while_the_lines_are_read_still_names_every_line(bench: Bench) -> None:
    batch = await bench.validating(4)
    reading = await bench.store.claim_validation(30)
    assert reading is not None
    assert await bench.store.add_jobs(reading, new_jobs(2))
    await bench.store.cancel_batch("ann", batch.id)
    await bench.settle()
    assert (await bench.again(batch)).state is BatchState.CANCELLING
    assert await bench.store.add_jobs(reading, new_jobs(4))
    row = await bench.store.begin(reading, model="m")
    assert row is not None
    assert row.state is BatchState.CANCELLING
    await bench.settle()
    assert await bench.holds(batch, 4) == {"batch_cancelled": 4}


async def test_cancelled_before_anybody_read_it(bench: Bench) -> None:
    batch = await bench.validating(2)
    await bench.store.cancel_batch("ann", batch.id)
    await bench.begin(bench.store, 2)
    await bench.settle()
    assert await bench.holds(batch, 2) == {"batch_cancelled": 2}


async def test_a_batch_that_ended_cannot_be_cancelled(bench: Bench) -> None:
    batch = await bench.running(1)
    await bench.finish_all()
    await bench.settle()
    with pytest.raises(Conflict, match="Cannot cancel a batch with status 'completed'"):
        await bench.store.cancel_batch("ann", batch.id)
    for caller, batch_id in (("bob", batch.id), ("ann", "batch_0"), ("ann", "\0")):
        with pytest.raises(NotFound):
            await bench.store.cancel_batch(caller, batch_id)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_bad_input_fails_it(bench: Bench, cancelled: bool) -> None:
    batch = await bench.validating(3)
    reading = await bench.store.claim_validation(30)
    assert reading is not None
    await bench.store.add_jobs(reading, new_jobs(2))
    if cancelled:
        await bench.store.cancel_batch("ann", batch.id)
    errors = [LineError(code="invalid_json_line", message="Line 3 is not JSON.", line=3)]
    row = await bench.store.fail_batch(reading, errors)
    assert row is not None
    assert row.errors == tuple(errors)
    await bench.settle()
    row = await bench.again(batch)
    assert row.state is (BatchState.CANCELLED if cancelled else BatchState.FAILED)
    assert (row.total, row.output_file_id, row.error_file_id) == (0, None, None)
    assert await bench.run("SELECT line FROM jobs") == []


async def test_an_input_nobody_knows_is_found_out_by_validation(bench: Bench) -> None:
    mine = await bench.file(b"x", caller="bob")
    for file_id in ("file-0", mine.id, "a\0b", "x" * 5000):
        new = NewBatch(caller="ann", endpoint=CHAT, input_file_id=file_id, completion_window="24h", window_s=86400)
        batch = await bench.store.create_batch(new)
        assert await bench.store.input(batch) is None


async def test_an_input_deleted_before_validation_ends_fails_it(bench: Bench) -> None:
    batch = await bench.validating(2)
    assert await bench.store.delete_file("ann", batch.input_file_id)
    row = await bench.begin(bench.store, 2)
    assert row is not None
    assert (row.state, row.errors[0].code) == (BatchState.FAILED, "invalid_request")
    assert row.failed_at is not None


async def test_validation_goes_on_with_another_router(bench: Bench) -> None:
    batch = await bench.validating(5)
    first = await bench.store.claim_validation(30)
    assert first is not None
    assert await bench.store.claim_validation(30) is None
    assert await bench.store.extend_validation(first, 30)
    assert await bench.store.add_jobs(first, new_jobs(3))
    bench.clock.tick(31)
    other = await bench.router("other")
    second = await other.claim_validation(30)
    assert second is not None
    assert second.epoch > first.epoch
    assert not await bench.store.add_jobs(first, new_jobs(5))
    assert not await bench.store.extend_validation(first, 30)
    assert await bench.store.begin(first, model="m") is None
    assert await bench.store.fail_batch(first, []) is None
    assert await other.add_jobs(second, new_jobs(5))
    row = await other.begin(second, model=None)
    assert row is not None
    assert (row.total, row.model) == (5, None)
    await bench.finish_all()
    await bench.settle()
    assert await bench.holds(batch, 5) == {"done": 5}


async def test_a_retried_create_gives_the_same_batch(bench: Bench) -> None:
    file = await bench.file(b"x")

    async def create(**options: object) -> BatchRow:
        told = {"caller": "ann", "endpoint": CHAT, "input_file_id": file.id, "completion_window": "24h"}
        return await bench.store.create_batch(NewBatch(**{"window_s": 86400, **told, **options}))

    first = await create(metadata={"a": "1"})
    assert (await create(metadata={"a": "1"}, same_within_s=60)).id == first.id
    assert (await create(metadata={"a": "2"}, same_within_s=60)).id != first.id
    assert (await create(metadata={"a": "1"})).id != first.id
    bench.clock.tick(120)
    assert (await create(metadata={"a": "1"}, same_within_s=60)).id != first.id
    rows = await asyncio.gather(*(create(idempotency_key="k") for _ in range(4)))
    assert len({row.id for row in rows}) == 1
    assert (await create(idempotency_key="k", caller="bob")).id != rows[0].id


async def test_pages(bench: Bench) -> None:
    ids = [(await bench.validating(1)).id for _ in range(3)]
    rows, more = await bench.store.batches("ann", limit=2)
    assert ([row.id for row in rows], more) == ([ids[2], ids[1]], True)
    rows, more = await bench.store.batches("ann", limit=2, after=ids[1])
    assert ([row.id for row in rows], more) == ([ids[0]], False)
    assert await bench.store.batches("bob") == ([], False)
    with pytest.raises(NotFound):
        await bench.store.batches("bob", after=ids[0])


async def test_what_waits_and_how_fast(bench: Bench) -> None:
    first, second = await bench.running(4), await bench.running(3, priority=5)
    await bench.store.note({first.id: "no node has room", second.id: None, "batch_0": "x"})
    assert (await bench.again(first)).waiting == "no node has room"
    (job,) = await bench.claim(1)
    assert job.batch_id == second.id
    pace = await bench.pace(first)
    assert (pace.running, pace.ahead, pace.done_last) == (0, 3, 0)
    await bench.store.finish(job, answer(job))
    pace = await bench.pace(first)
    assert (pace.ahead, pace.done_last) == (2, 1)
    other = await bench.router("other")
    await bench.store.beat()
    assert (await bench.pace(first, other)).done_last == 1


async def test_what_a_caller_holds(bench: Bench) -> None:
    await bench.running(3)
    await bench.running(5, caller="bob")
    (job,) = await bench.claim(1)
    held = await bench.store.held("ann")
    assert (held.files, held.bytes, held.batches, held.lines, held.tokens) == (1, 96, 1, 3, 6)
    await bench.store.finish(job, answer(job))
    assert (await bench.store.held(job.caller)).lines == 2
    usage = await bench.store.usage()
    assert (usage.files, usage.batches, usage.queued, usage.running) == (2, 2, 7, 0)
    assert usage.states == {"validating": 0, "in_progress": 2, "finalizing": 0, "cancelling": 0}
    await bench.running(2, model="other")
    bench.clock.tick(60)
    usage = await bench.store.usage()
    assert (usage.models, usage.oldest_s) == ({"m": 7, "other": 2}, 60)
    assert usage.disk_bytes > 0


async def test_old_batches_are_forgotten_and_what_they_left_first(bench: Bench) -> None:
    batch = await bench.running(3)
    await bench.finish_all()
    await bench.settle()
    for table in ("jobs", "results"):
        assert await bench.run(f"SELECT line FROM {table}") == []
    bench.clock.tick(100)
    await bench.store.sweep(keep_batches_s=101)
    assert await bench.store.batch("ann", batch.id) is not None
    await bench.store.sweep(keep_batches_s=99)
    assert await bench.store.batch("ann", batch.id) is None


async def test_result_files_expire_after_they_were_made(bench: Bench) -> None:
    batch = await bench.running(1, output_expires_s=3600)
    bench.clock.tick(5000)
    await bench.finish_all()
    await bench.settle()
    batch = await bench.again(batch)
    file = await bench.store.file("ann", batch.output_file_id or "")
    assert file is not None
    assert file.expires_at == int(bench.clock.now) + 3600
    bench.clock.tick(3601)
    await bench.settle()
    assert await bench.again(batch) == batch
    assert await bench.store.file("ann", batch.output_file_id or "") is None


async def test_nothing_is_left_of_what_is_over(bench: Bench) -> None:
    """Input, results, lines, the batch, its uploads: after their times every table is as it was before."""
    store = bench.store
    await bench.running(3, output_expires_s=3600)
    told = {"purpose": "batch", "filename": "a", "mime_type": "text/plain", "file_expires_s": 3600}
    for ends in ("completed", "cancelled", "expired"):
        upload = await store.create_upload(caller="ann", size=4, **told)
        async with store.adding_part("ann", upload.id) as part:
            await part.write(b"abcd")
        if ends == "completed":
            await store.complete_upload("ann", upload.id, [part.row.id])
        elif ends == "cancelled":
            await store.cancel_upload("ann", upload.id)
    await bench.finish_all()
    await bench.settle()
    assert len(await bench.run("SELECT id FROM uploads")) == 3
    ((input_file,),) = await bench.run("SELECT id FROM files WHERE filename = 'in.jsonl'")
    await store.delete_file("ann", input_file)
    bench.clock.tick(8 * 86400)
    while (await store.sweep(keep_batches_s=86400)).more:
        pass
    for table in ("files", "chunks", "uploads", "batches", "jobs", "results", "deliveries"):
        assert await bench.run(f"SELECT * FROM {table}") == [], table


async def test_parts_of_uploads_count_as_held(bench: Bench) -> None:
    told = {"purpose": "batch", "filename": "a", "mime_type": "text/plain", "file_expires_s": None}
    upload = await bench.store.create_upload(caller="ann", size=4, **told)
    async with bench.store.adding_part("ann", upload.id) as part:
        await part.write(b"abcd")
    held = await bench.store.held("ann")
    assert (held.files, held.bytes) == (1, 4)
    await bench.store.complete_upload("ann", upload.id, [part.row.id])
    held = await bench.store.held("ann")
    assert (held.files, held.bytes) == (1, 4)
    await bench.store.create_upload(caller="ann", size=4, **told)
    bench.clock.tick(3601)
    assert (await bench.store.held("ann")).files == 1, "an upload that is over is not held"


def test_every_state_is_walked_by_these_tests() -> None:
    assert {after for moves in BATCH_TRANSITIONS.values() for after in moves.values()} == set(BatchState) - {
        BatchState.VALIDATING
    }
