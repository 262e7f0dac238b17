"""Uploads over the wire: parts at the same time, totals, checksums, ends, isolation; long files in little memory."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import BadRequestError, ConflictError, NotFoundError

from router.api.desk import Bounds, Quota
from tests.http.counter import START, Counter, form, jsonl, line, open_counter
from tests.http.test_files import wrong
from tests.rig import Connection, Reply, request

MIB = 2**20


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    async with open_counter(tmp_path) as counter:
        yield counter


def beginning(size: int, **fields: Any) -> dict[str, Any]:
    return {"bytes": size, "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"} | fields


async def begin(counter: Counter, size: int, **fields: Any) -> str:
    reply = await counter.ask("POST", "/v1/uploads", beginning(size, **fields))
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


async def add(counter: Counter, upload: str, content: bytes) -> str:
    raw, kind = form(content, fields={}, field="data", name="upload")
    reply = await counter.ask("POST", f"/v1/uploads/{upload}/parts", raw, headers=(("Content-Type", kind),))
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


async def test_the_sdk_uploads_a_long_file_in_parts(counter: Counter, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(jsonl(*(line(str(number), user="x" * 500) for number in range(4000))))
    async with counter.sdk() as sdk:
        size = path.stat().st_size
        upload = await sdk.uploads.upload_file_chunked(
            file=path, mime_type="application/jsonl", purpose="batch", part_size=size // 3 + 1
        )
        assert upload.status == "completed"
        assert upload.file is not None
        assert (upload.file.filename, upload.file.bytes, upload.file.purpose) == ("long.jsonl", size, "batch")
        assert upload.file.expires_at == START + 2_592_000
        content = await sdk.files.content(upload.file.id)
        assert content.content == path.read_bytes()


async def test_an_upload_has_openais_shape(counter: Counter) -> None:
    told = (await counter.ask("POST", "/v1/uploads", beginning(5, filename="a/b.jsonl"))).json
    assert told.pop("id").startswith("upload_")
    assert told == {
        "object": "upload",
        "bytes": 5,
        "created_at": START,
        "expires_at": START + 3600,
        "filename": "b.jsonl",
        "purpose": "batch",
        "status": "pending",
        "file": None,
    }


async def test_parts_may_come_at_the_same_time_and_are_put_in_the_order_named(counter: Counter) -> None:
    contents = [bytes([65 + number]) * 300_000 for number in range(5)]
    upload = await begin(counter, 1_500_000, purpose="user_data")
    ids = await asyncio.gather(*(add(counter, upload, content) for content in contents))
    whole = b"".join(reversed(contents))
    done = {"part_ids": ids[::-1], "md5": hashlib.md5(whole).hexdigest().upper()}
    first, again = [(await counter.ask("POST", f"/v1/uploads/{upload}/complete", done)).json for _ in range(2)]
    assert first == again
    assert (await counter.ask("GET", f"/v1/files/{first['file']['id']}/content")).body == whole


async def test_totals_and_checksums_are_held_against_the_parts(counter: Counter) -> None:
    async with counter.sdk() as sdk:
        upload = await begin(counter, 10)
        parts = [await add(counter, upload, b"12345"), await add(counter, upload, b"6789")]
        with pytest.raises(BadRequestError):
            await sdk.uploads.complete(upload, part_ids=parts)
        parts[1] = await add(counter, upload, b"67890")
        for wrong_parts in (["part_1", parts[1]], [parts[0], parts[0]], []):
            with pytest.raises(BadRequestError):
                await sdk.uploads.complete(upload, part_ids=wrong_parts)
        with pytest.raises(BadRequestError):
            await sdk.uploads.complete(upload, part_ids=parts, md5="0" * 32)
        assert (await sdk.uploads.complete(upload, part_ids=parts)).status == "completed"


async def test_an_upload_that_ended_takes_nothing_more(counter: Counter) -> None:
    async with counter.sdk() as sdk:
        upload = await begin(counter, 5)
        part = await add(counter, upload, b"12345")
        assert (await sdk.uploads.cancel(upload)).status == "cancelled"
        assert (await sdk.uploads.cancel(upload)).status == "cancelled"
        with pytest.raises(ConflictError) as caught:
            await sdk.uploads.complete(upload, part_ids=[part])
        assert caught.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(ConflictError):
            await sdk.uploads.parts.create(upload, data=b"x")
        late = await begin(counter, 5)
        counter.clock.now += 3601
        with pytest.raises(ConflictError, match="expired"):
            await sdk.uploads.parts.create(late, data=b"x")


async def test_another_keys_upload_is_unknown(counter: Counter) -> None:
    upload = await begin(counter, 5)
    part = await add(counter, upload, b"12345")
    async with counter.sdk("sk-bob") as sdk:
        for asked in (
            sdk.uploads.cancel(upload),
            sdk.uploads.parts.create(upload, data=b"x"),
            sdk.uploads.complete(upload, part_ids=[part]),
        ):
            with pytest.raises(NotFoundError):
                await asked


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"bytes": 0}, 400, "integer_below_min_value", "bytes"),
        ({"bytes": 600 * MIB, "purpose": "user_data"}, 400, "integer_above_max_value", "bytes"),
        ({"bytes": 201 * MIB}, 413, "payload_too_large", "bytes"),
        ({"bytes": "5"}, 400, "invalid_type", "bytes"),
        ({"bytes": True}, 400, "invalid_type", "bytes"),
        ({"bytes": None}, 400, "missing_required_parameter", "bytes"),
        ({"filename": None}, 400, "missing_required_parameter", "filename"),
        ({"mime_type": 7}, 400, "invalid_type", "mime_type"),
        ({"purpose": "parties"}, 400, "invalid_value", "purpose"),
        ({"filename": "in.txt"}, 400, None, None),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 5}},
            400,
            "integer_below_min_value",
            "expires_after.seconds",
        ),
    ],
)
async def test_a_wrong_beginning_is_refused(
    counter: Counter, fields: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    wrong(await counter.ask("POST", "/v1/uploads", beginning(5) | fields), status, code, param)


async def test_a_part_has_a_bound_and_needs_data(tmp_path: Path) -> None:
    quotas = Quota(bytes=1000)
    async with open_counter(tmp_path, bounds=Bounds(part_bytes=100), quota=lambda _: quotas) as counter:
        upload = await begin(counter, 500)
        for content, status, code in (
            (b"x" * 101, 413, "payload_too_large"),
            (None, 400, "missing_required_parameter"),
        ):
            raw, kind = form(content, fields={}, field="data")
            reply = await counter.ask("POST", f"/v1/uploads/{upload}/parts", raw, headers=(("Content-Type", kind),))
            wrong(reply, status, code, "data")
        wrong(await counter.ask("POST", "/v1/uploads", beginning(1001)), 429, "insufficient_quota")


async def test_quotas_hold_for_uploads_under_way(tmp_path: Path) -> None:
    async with open_counter(tmp_path, quota=lambda _: Quota(files=2, bytes=1000)) as counter:
        upload = await begin(counter, 600)

        async def send(size: int) -> Reply:
            raw, kind = form(b"x" * size, fields={}, field="data")
            return await counter.ask("POST", f"/v1/uploads/{upload}/parts", raw, headers=(("Content-Type", kind),))

        assert (await send(600)).status == 200
        assert "400 bytes" in wrong(await send(401), 429, "insufficient_quota")
        assert (await send(400)).status == 200
        wrong(await counter.ask("POST", "/v1/uploads", beginning(1)), 429, "insufficient_quota")
        await counter.ask("POST", f"/v1/uploads/{upload}/cancel", {})
        assert await begin(counter, 600)
        assert await begin(counter, 600)
        assert "2 files" in wrong(await counter.ask("POST", "/v1/uploads", beginning(1)), 429, "insufficient_quota")


@pytest.mark.parametrize("told", [{}, {"part_ids": "x"}, {"part_ids": [7]}, {"part_ids": ["a"], "md5": "xyz"}])
async def test_a_wrong_completion_is_refused(counter: Counter, told: dict[str, Any]) -> None:
    upload = await begin(counter, 5)
    assert (await counter.ask("POST", f"/v1/uploads/{upload}/complete", told)).status == 400


async def test_a_long_upload_and_download_hold_little_memory(counter: Counter) -> None:
    size, piece = 48 * MIB, json.dumps(line("a", user="x" * (MIB - 150))).encode()[: MIB - 1] + b"\n"
    raw, kind = form(b"@", fields={"purpose": "user_data"})
    before, after = raw.split(b"@")
    length = (("Content-Length", str(len(before) + size + len(after))),)
    headers = (("Authorization", "Bearer sk-ann"), ("Content-Type", kind), *length)
    await counter.file(b"x" * MIB, fields={"purpose": "user_data"})
    rss, most = psutil.Process().memory_info().rss, 0
    digest = hashlib.sha256()
    async with await Connection.open(counter.port) as wire:
        await wire.send(request("/v1/files", before, headers=headers))
        for _ in range(size // MIB):
            await wire.send(piece)
            digest.update(piece)
            most = max(most, psutil.Process().memory_info().rss - rss)
        await wire.send(after)
        file = (await wire.reply()).json
        assert file["bytes"] == size
        assert most < 32 * MIB
        rss, most = psutil.Process().memory_info().rss, 0
        path = f"/v1/files/{file['id']}/content"
        await wire.send(request(path, method="GET", headers=(("Authorization", "Bearer sk-ann"),)))
        body = (await wire.read_until(b"\r\n\r\n")).partition(b"\r\n\r\n")[2]
        got, back = len(body), hashlib.sha256(body)
        while got < size:
            data = await wire.read()
            got += len(data)
            back.update(data)
            most = max(most, psutil.Process().memory_info().rss - rss)
    assert back.digest() == digest.digest()
    assert most < 32 * MIB
