"""What an operator sees of batches: all callers' in the order they are served, and the lines of one."""

from router.jobs.store import NewResult
from tests.store.bench import Bench, answer


async def test_batches_stand_in_the_order_they_are_served_with_an_end(bench: Bench) -> None:
    late = await bench.running(4, window_s=86400)
    soon = await bench.running(2, window_s=7200, caller="bob")
    job, *_ = await bench.claim(limit=3)
    await bench.store.finish(job, answer(job))
    told = await bench.store.overview()
    assert [(row.id, row.caller, row.left) for row in told.batches] == [(soon.id, "bob", 1), (late.id, "ann", 4)]
    assert [row.running for row in told.batches] == [1, 1]
    assert (told.more, told.done_a_minute) == (0, 1)
    now = await bench.store.now()
    assert [round((row.ends_at or 0) - now) for row in told.batches] == [60, 300]


async def test_it_is_bounded_and_tells_what_did_not_fit(bench: Bench) -> None:
    for _ in range(3):
        await bench.running(1)
    told = await bench.store.overview(limit=2)
    assert (len(told.batches), told.more) == (2, 1)
    assert [row.ends_at for row in told.batches] == [None, None], "nothing moves"


async def test_final_batches_come_last(bench: Bench) -> None:
    over = await bench.running(1)
    for job in await bench.claim():
        await bench.store.finish(job, answer(job))
    await bench.settle()
    going = await bench.running(1)
    told = await bench.store.overview()
    assert [(row.id, row.state) for row in told.batches] == [(going.id, "in_progress"), (over.id, "completed")]


async def test_the_lines_of_one_by_state_and_why_they_failed(bench: Bench) -> None:
    batch = await bench.running(5)
    one, two, three, four = await bench.claim(limit=4)
    await bench.store.finish(one, answer(one))
    await bench.store.finish(two, NewResult(status=400, request_id="r", body=b"{}"))
    await bench.store.finish(three, NewResult(error_code="timeout", error_message="late"))
    told = await bench.store.standing_of(batch.id)
    assert told is not None
    assert told.states == {"done": 1, "failed": 2, "running": 1, "queued": 1}
    assert sorted(told.failures) == [("status 400", 1), ("timeout", 1)]
    assert [(line.line, line.returns) for line in told.running] == [(four.line, 0)]


async def test_what_is_not_there(bench: Bench) -> None:
    assert await bench.store.standing_of("batch_none") is None
    assert await bench.store.standing_of("no\0id") is None
    assert await bench.store.caller_of("batch_none") is None
