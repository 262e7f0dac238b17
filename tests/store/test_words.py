"""Text that PostgreSQL cannot keep is refused on both databases, in the same words, before either is asked."""

import inspect

import pytest
from sqlalchemy import Text

from router.core.job import window_seconds
from router.errors import BadRequest
from router.jobs.schema import Words, metadata
from router.jobs.store import NewBatch
from tests.store.bench import CHAT, Bench

BAD = ["\0", "a\0b", "\ud800", "a\udfff"]
KEPT = ["", "é", "\U0001f600", "\x01\x7f", "\ufffd"]


def test_every_column_of_text_is_guarded() -> None:
    columns = [column for table in metadata.tables.values() for column in table.columns]
    assert [column for column in columns if isinstance(column.type, Text)] == []
    assert sum(isinstance(column.type, Words) for column in columns) > 30


@pytest.mark.parametrize("bad", BAD)
async def test_what_cannot_be_kept_is_refused(bench: Bench, bad: str) -> None:
    store = bench.store
    new = {"caller": "ann", "endpoint": CHAT, "input_file_id": "file-x", "completion_window": "24h"}
    window_s = window_seconds("24h")
    tries = [
        bench.file(b"x", filename=bad),
        bench.file(b"x", purpose=bad),
        bench.file(b"x", caller=bad),
        store.files("ann", purpose=bad),
        store.files(bad),
        store.create_upload(caller="ann", purpose="batch", filename="a", mime_type=bad, size=1, file_expires_s=None),
        store.create_batch(NewBatch(**new | {"endpoint": bad}, window_s=window_s)),
        store.create_batch(NewBatch(**new | {"idempotency_key": bad}, window_s=window_s)),
        store.create_batch(NewBatch(**new | {"webhook": bad}, window_s=window_s)),
    ]
    for one in tries:
        assert inspect.iscoroutine(one)
        with pytest.raises(BadRequest):
            await one
    assert (await store.files("ann"))[0] == []


@pytest.mark.parametrize("bad", BAD)
async def test_words_of_ours_that_quote_a_stranger_are_mended(bench: Bench, bad: str) -> None:
    batch = await bench.running(1)
    await bench.store.note({batch.id: f"The node said {bad}."})
    waiting = (await bench.again(batch)).waiting
    assert waiting is not None
    assert waiting.startswith("The node said ")


@pytest.mark.parametrize("good", KEPT)
async def test_all_else_is_kept_as_it_is(bench: Bench, good: str) -> None:
    file = await bench.file(b"x", filename=good)
    assert (await bench.store.file("ann", file.id)).filename == good  # type: ignore[union-attr]
    batch = await bench.running(1, metadata={"said": good}, idempotency_key=good)
    assert (await bench.again(batch)).metadata == {"said": good}
