"""Uploads in parts: any order, one file, all or nothing."""

import asyncio
import hashlib
import os

import pytest

from router.errors import BadRequest, Conflict, NotFound
from router.jobs.schema import CHUNK_BYTES
from router.jobs.store import UploadRow
from tests.store.bench import Bench


async def begun(bench: Bench, size: int) -> UploadRow:
    return await bench.store.create_upload(
        caller="ann", purpose="batch", filename="a.jsonl", mime_type="text/jsonl", size=size, file_expires_s=7200
    )


async def part(bench: Bench, upload: UploadRow, data: bytes) -> str:
    async with bench.store.adding_part("ann", upload.id) as writer:
        await writer.write(data)
    assert writer.row.upload_id == upload.id
    return writer.row.id


async def test_parts_become_a_file_in_the_order_told(bench: Bench) -> None:
    pieces = [os.urandom(size) for size in (CHUNK_BYTES * 20 + 5, 3, CHUNK_BYTES)]
    whole = b"".join(pieces)
    upload = await begun(bench, len(whole))
    assert (upload.state, upload.expires_at) == ("pending", upload.created_at + 3600)
    ids = await asyncio.gather(*(part(bench, upload, piece) for piece in reversed(pieces)))
    told = list(reversed(ids))
    done = await bench.store.complete_upload("ann", upload.id, told, hashlib.md5(whole).hexdigest())
    assert done.state == "completed"
    assert done.file is not None
    assert (done.file.filename, done.file.purpose) == ("a.jsonl", "batch")
    assert done.file.expires_at == done.file.created_at + 7200
    assert await bench.text(done.file.id) == whole
    assert await bench.store.complete_upload("ann", upload.id, told) == done
    with pytest.raises(Conflict):
        await bench.store.complete_upload("ann", upload.id, ids)
    await bench.settle()
    assert await bench.text(done.file.id) == whole
    assert len(await bench.run("SELECT number FROM files")) == 1


async def test_a_wrong_completion_changes_nothing(bench: Bench) -> None:
    upload = await begun(bench, 4)
    first, second = await part(bench, upload, b"ab"), await part(bench, upload, b"cd")
    for ids, md5, param in [
        ([first], None, "part_ids"),
        ([first, first], None, "part_ids"),
        ([], None, "part_ids"),
        ([first, "part_x"], None, "part_ids"),
        ([first, second], "0" * 32, "md5"),
    ]:
        with pytest.raises(BadRequest) as refused:
            await bench.store.complete_upload("ann", upload.id, ids, md5)
        assert refused.value.param == param
    done = await bench.store.complete_upload("ann", upload.id, [second, first])
    assert done.file is not None
    assert await bench.text(done.file.id) == b"cdab"


async def test_cancelled_and_expired_take_no_more(bench: Bench) -> None:
    upload = await begun(bench, 2)
    await part(bench, upload, b"ab")
    assert (await bench.store.cancel_upload("ann", upload.id)).state == "cancelled"
    assert (await bench.store.cancel_upload("ann", upload.id)).state == "cancelled"
    late = await begun(bench, 2)
    await part(bench, late, b"ab")
    bench.clock.tick(3601)
    for ended in (upload, late):
        with pytest.raises(Conflict):
            await part(bench, ended, b"c")
    await bench.settle()
    found = await bench.store.upload("ann", late.id)
    assert found is not None
    assert found.state == "expired"
    assert await bench.run("SELECT number FROM files") == []


async def test_another_caller_sees_nothing(bench: Bench) -> None:
    upload = await begun(bench, 2)
    assert await bench.store.upload("bob", upload.id) is None
    with pytest.raises(NotFound):
        await bench.store.complete_upload("bob", upload.id, ["x"])
    with pytest.raises(NotFound):
        await bench.store.cancel_upload("bob", upload.id)


async def test_two_who_complete_make_one_file(bench: Bench) -> None:
    upload = await begun(bench, 2)
    ids = [await part(bench, upload, b"ab")]
    ends = await asyncio.gather(
        *(bench.store.complete_upload("ann", upload.id, ids) for _ in range(4)), return_exceptions=True
    )
    made = [end for end in ends if isinstance(end, UploadRow)]
    assert made
    assert all(isinstance(end, UploadRow | Conflict) for end in ends)
    await bench.settle()
    assert len((await bench.store.files("ann"))[0]) == 1
