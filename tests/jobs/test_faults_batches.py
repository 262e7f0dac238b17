"""Faults that people met in the field with batches: ids that repeat, lines that stream, cancels that lose lines."""

import asyncio
import contextlib
import os
import random
from collections.abc import Sequence
from time import monotonic

import pytest

from router.core.job import BatchState
from router.errors import Conflict
from router.jobs.store import LineError
from tests.fakes import Script
from tests.jobs.desk import Results, Room, line, room

CANCELS = int(os.environ.get("EBBTIDE_TEST_CANCELS", "12"))
AT_ONCE, SEED = 4, 1_729


def told(errors: Sequence[LineError]) -> list[tuple[int | None, str, str | None]]:
    return [(error.line, error.code, error.param) for error in errors]


WRONG = {
    "ids that repeat or are empty": (
        [line(1), line(1), line(2) | {"custom_id": ""}],
        [(2, "duplicate_custom_id", "custom_id"), (3, "invalid_value", "custom_id")],
    ),
    "a line that streams": ([line(1), line(2, stream=True)], [(2, "streaming_unsupported", "body.stream")]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_spoils_a_batch_is_found_at_once_and_no_node_is_asked(rig, tmp_path, name):
    """B65, B66."""
    lines, expected = WRONG[name]
    node = await rig.node()
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        began = monotonic()
        batch = await jobs.until(await jobs.submit(lines))
        assert monotonic() - began < 5
    assert batch.state is BatchState.FAILED
    assert told(batch.errors) == expected
    assert node.accepted == 0


@pytest.mark.timeout(600)
async def test_cancelled_at_any_moment_every_line_is_told_once(rig, tmp_path):
    """B68: 25 lines, 5 of them quick; what had its answer is in the output, the rest in the error file.

    `EBBTIDE_TEST_CANCELS=200` cancels more than the suite does.
    """
    node = await rig.node(slots=64)
    node.on_request = lambda seen: Script(ttft=0.3) if b'"slow"' in seen.body else None
    app = await rig.router()
    moments = random.Random(SEED)
    lines = [line(number) if number % 5 == 0 else line(number, user="slow") for number in range(25)]
    at_once = asyncio.Semaphore(AT_ONCE)

    async def cancelled(jobs: Room, done: int, after_s: float) -> Results:
        async with at_once:
            batch = await jobs.submit(lines)
            begun = monotonic()
            while done and (await jobs.look(batch)).completed < done:
                assert monotonic() < begun + 60
                await asyncio.sleep(0.05)
            await asyncio.sleep(after_s)
            with contextlib.suppress(Conflict):  # it had ended before anybody came to cancel it
                await jobs.store.cancel_batch(batch.caller, batch.id)
            return await jobs.drained(batch, within=60)

    async with room(app, tmp_path) as jobs:
        drawn = [(moments.randint(0, 8), moments.uniform(0, 0.1)) for _ in range(CANCELS)]
        kept = [_told_once(one) for one in await asyncio.gather(*(cancelled(jobs, *one) for one in drawn))]
    assert len(set(kept)) > 3, "cancelled at different moments"


def _told_once(results: Results) -> int:
    """How many lines a cancelled batch of 25 has in its output; each of the others is in its error file."""
    whole = len(results.output) == 25
    assert results.batch.state in ((BatchState.COMPLETED, BatchState.CANCELLED) if whole else (BatchState.CANCELLED,))
    assert results.ids == {f"r{number}" for number in range(25)}
    assert (results.batch.completed, results.batch.failed) == (len(results.output), 0)
    assert {one["response"]["status_code"] for one in results.output.values()} <= {200}
    assert {one["error"]["code"] for one in results.errors.values()} <= {"batch_cancelled"}
    return len(results.output)
