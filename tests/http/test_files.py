"""Files over the wire: shapes, forms in every order, refusals, pages, ranges, isolation, quotas."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from router.api.desk import Bounds, Quota
from router.api.terms import Terms
from router.errors import StoreFull, StoreLost
from tests.http.counter import START, Counter, form, jsonl, line, open_counter
from tests.rig import Connection, Reply, eventually, request

ONE = jsonl(line())


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    async with open_counter(tmp_path) as counter:
        yield counter


def wrong(reply: Reply, status: int, code: str | None, param: str | None = None) -> str:
    """Checks the one error shape and returns its message."""
    assert reply.status == status, reply.body
    assert reply.header("content-type") == "application/json"
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    return str(reply.error["message"])


async def test_an_upload_gives_openais_object(counter: Counter) -> None:
    reply = await counter.send(ONE)
    told = reply.json
    assert told.pop("id").startswith("file-")
    assert told == {
        "object": "file",
        "bytes": len(ONE),
        "created_at": START,
        "expires_at": START + 2_592_000,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert (reply.header("x-request-id") or "").startswith("req_")


async def test_other_purposes_are_kept_for_ever_and_under_any_name(counter: Counter) -> None:
    for purpose in ("assistants", "fine-tune", "vision", "user_data", "evals"):
        reply = await counter.send(b"\x00\xff", name="x.bin", fields={"purpose": purpose})
        assert (reply.json["expires_at"], reply.json["purpose"]) == (None, purpose)


async def test_the_sdk_goes_all_the_way_round(counter: Counter, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(jsonl(line("a"), line("ü")))
    async with counter.sdk() as sdk:
        with path.open("rb") as opened:
            file = await sdk.files.create(file=opened, purpose="batch")
        assert (file.filename, file.bytes, file.status) == ("jobs.jsonl", path.stat().st_size, "processed")
        assert (await sdk.files.wait_for_processing(file.id)).id == file.id
        assert (await sdk.files.retrieve(file.id)) == file
        content = await sdk.files.content(file.id)
        assert content.content == path.read_bytes()
        assert [json.loads(text)["custom_id"] for text in content.text.splitlines()] == ["a", "ü"]
        assert 'filename="jobs.jsonl"' in content.response.headers["content-disposition"]
        gone = await sdk.files.delete(file.id)
        assert gone.deleted
        for again in (sdk.files.delete, sdk.files.retrieve, sdk.files.content):
            with pytest.raises(NotFoundError, match=f"No such File object: {file.id}") as caught:
                await again(file.id)
            assert caught.value.param == "id"


async def test_raw_bytes_without_a_name_are_taken_as_jsonl(counter: Counter) -> None:
    async with counter.sdk() as sdk:
        assert (await sdk.files.create(file=ONE, purpose="batch")).filename == "upload"


async def test_a_form_that_streams_the_file_first_is_read(counter: Counter) -> None:
    content = jsonl(*(line(str(number)) for number in range(3000)))
    raw, kind = form(content, fields={"purpose": "batch"}, file_first=True)
    headers = (("Authorization", "Bearer sk-ann"), ("Content-Type", kind), ("Transfer-Encoding", "chunked"))
    async with await Connection.open(counter.port) as wire:
        await wire.send(request("/v1/files", b"", headers=headers))
        for at in range(0, len(raw), 10_007):
            piece = raw[at : at + 10_007]
            await wire.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await wire.send(b"0\r\n\r\n")
        told = (await wire.reply()).json
    assert told["bytes"] == len(content)
    assert (await counter.ask("GET", f"/v1/files/{told['id']}/content")).body == content


@pytest.mark.parametrize("step", [1, 7, 61])
async def test_a_form_may_come_in_any_pieces(counter: Counter, step: int) -> None:
    content = b'{"a": "\r\n--\r\n------form-7d1\r\n"}'.replace(b"\r\n", b"\\n") + b"\r\n--"
    raw, kind = form(content, fields={"purpose": "batch", "unknown": "x"})
    headers = (("Authorization", "Bearer sk-ann"), ("Content-Type", kind), ("Content-Length", str(len(raw))))
    async with await Connection.open(counter.port) as wire:
        await wire.send(request("/v1/files", b"", headers=headers))
        for at in range(0, len(raw), step):
            await wire.send(raw[at : at + step])
            await asyncio.sleep(0)
        told = (await wire.reply()).json
    assert (await counter.ask("GET", f"/v1/files/{told['id']}/content")).body == content


@pytest.mark.parametrize("seconds", [3600, 2_592_000])
@pytest.mark.parametrize("purpose", ["batch", "user_data"])
async def test_a_file_may_say_how_long_it_is_kept(counter: Counter, seconds: int, purpose: Any) -> None:
    async with counter.sdk() as sdk:
        kept = {"anchor": "created_at", "seconds": seconds}
        file = await sdk.files.create(file=("a.jsonl", ONE), purpose=purpose, expires_after=kept)
    assert file.expires_at == START + seconds
    counter.clock.now += seconds + 1
    wrong(await counter.ask("GET", f"/v1/files/{file.id}"), 404, None, "id")


def expiry(**fields: str) -> dict[str, str]:
    return {f"expires_after[{name}]": value for name, value in fields.items()}


REFUSED = [
    ({"content": None}, "missing_required_parameter", "file"),
    ({"field": "data"}, "missing_required_parameter", "file"),
    ({"fields": {"purpose": ""}}, "missing_required_parameter", "purpose"),
    ({"fields": {"purpose": "parties"}}, "invalid_value", "purpose"),
    ({"fields": {"purpose": "batch_output"}}, "invalid_value", "purpose"),
    ({"fields": expiry(anchor="created_at", seconds="3599")}, "integer_below_min_value", "expires_after.seconds"),
    ({"fields": expiry(anchor="created_at", seconds="2592001")}, "integer_above_max_value", "expires_after.seconds"),
    ({"fields": expiry(anchor="created_at", seconds="soon")}, "invalid_type", "expires_after.seconds"),
    ({"fields": expiry(anchor="now", seconds="3600")}, "invalid_value", "expires_after.anchor"),
    ({"fields": expiry(seconds="3600")}, "missing_required_parameter", "expires_after.anchor"),
    ({"fields": expiry(anchor="created_at")}, "missing_required_parameter", "expires_after.seconds"),
    ({"name": "in.txt"}, None, None),
    ({"content": b""}, None, None),
    ({"content": b"\n\n"}, None, None),
    ({"content": b"hello\n{}"}, None, None),
]


@pytest.mark.parametrize("file_first", [False, True])
@pytest.mark.parametrize(("told", "code", "param"), REFUSED)
async def test_a_wrong_form_is_refused_and_leaves_nothing(
    counter: Counter, told: dict[str, Any], code: str | None, param: str | None, file_first: bool
) -> None:
    reply = await counter.send(**{"content": ONE, "file_first": file_first, **told})
    message = wrong(reply, 400, code, param)
    if code is None:
        assert "Invalid file format for Batch API. Must be .jsonl" in message
    assert (await counter.ask("GET", "/v1/files")).json["data"] == []


async def test_a_bad_later_line_is_for_the_batch_to_tell(counter: Counter) -> None:
    assert (await counter.send(ONE + b"rubbish\n")).status == 200


BROKEN = [
    (b"--x\r\n", "multipart/form-data; boundary=x"),
    (b"rubbish", "multipart/form-data; boundary=x"),
    (b"", "multipart/form-data; boundary=x"),
    (b"--x--", "multipart/form-data"),
    (b"--x--", "multipart/form-data; boundary="),
    (b"--x--", "multipart/form-data; boundary=" + "x" * 300),
]


@pytest.mark.parametrize(("raw", "kind"), BROKEN)
async def test_a_broken_form_is_a_400(counter: Counter, raw: bytes, kind: str) -> None:
    wrong(await counter.ask("POST", "/v1/files", raw, headers=(("Content-Type", kind),)), 400, None)


async def test_what_is_no_form_is_a_415(counter: Counter) -> None:
    wrong(await counter.ask("POST", "/v1/files", {"purpose": "batch"}), 415, "unsupported_content_type")
    raw, kind = form(ONE, fields={"purpose": "batch"})
    packed = (("Content-Type", kind), ("Content-Encoding", "gzip"))
    wrong(await counter.ask("POST", "/v1/files", raw, headers=packed), 415, "unsupported_content_type")


async def test_a_field_that_comes_twice_is_refused(counter: Counter) -> None:
    raw, kind = form(ONE, fields={"purpose": "batch"})
    first = raw.partition(b"\r\n--")[0]
    reply = await counter.ask("POST", "/v1/files", first + b"\r\n" + raw, headers=(("Content-Type", kind),))
    wrong(reply, 400, "invalid_value", "purpose")


@pytest.mark.parametrize("sized", [True, False])
async def test_a_file_over_its_bound_is_a_413(tmp_path: Path, sized: bool) -> None:
    async with open_counter(tmp_path, bounds=Bounds(file_bytes=300_000, batch_file_bytes=200_000)) as counter:
        user = {"purpose": "user_data"}
        assert (await counter.send(b"x" * 300_000, fields=user)).status == 200
        wrong(await counter.send(b"x" * 300_001, fields=user), 413, "payload_too_large", "file")
        if sized:
            wrong(await counter.send(b"x" * 3_000_000, fields=user), 413, "payload_too_large", "file")
        too_long = ONE + b"\n" * 200_000
        wrong(await counter.send(too_long, file_first=not sized), 413, "payload_too_large", "file")
        assert len((await counter.ask("GET", "/v1/files")).json["data"]) == 1


async def test_quotas_are_told_as_such_and_not_retried(tmp_path: Path) -> None:
    quotas = {"ann": Quota(files=2, bytes=100_000)}
    async with open_counter(tmp_path, quota=lambda caller: quotas.get(caller, Quota())) as counter:
        user = {"purpose": "user_data"}
        reply = await counter.send(b"x" * 100_001, fields=user)
        assert "100000 bytes" in wrong(reply, 429, "insufficient_quota")
        assert reply.header("x-should-retry") == "false"
        file = await counter.file(b"x" * 99_000, fields=user)
        wrong(await counter.send(b"x" * 1001, fields=user), 429, "insufficient_quota")
        await counter.file(b"x", fields=user)
        assert "2 files" in wrong(await counter.send(b"x", fields=user), 429, "insufficient_quota")
        await counter.ask("DELETE", f"/v1/files/{file}")
        assert (await counter.send(b"x" * 50_000, fields=user)).status == 200


async def test_pages_go_on_after_the_last_id(counter: Counter) -> None:
    ids = []
    for number in range(5):
        counter.clock.now = START + number // 2
        ids.append(await counter.file(ONE, name=f"{number}.jsonl"))
    other = await counter.file(b"x", fields={"purpose": "user_data"})
    async with counter.sdk() as sdk:
        assert [file.id async for file in sdk.files.list(limit=2)] == [other, *reversed(ids)]
        assert [file.id async for file in sdk.files.list(limit=2, order="asc")] == [*ids, other]
        assert [file.id async for file in sdk.files.list(limit=2, purpose="batch", order="asc")] == ids
    page = (await counter.ask("GET", f"/v1/files?limit=2&order=asc&after={ids[0]}")).json
    assert (page["first_id"], page["last_id"], page["has_more"], page["object"]) == (ids[1], ids[2], True, "list")
    page = (await counter.ask("GET", f"/v1/files?limit=2&order=asc&after={ids[3]}")).json
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[4], other], False)
    page = (await counter.ask("GET", f"/v1/files?after={ids[0]}")).json
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "status", "code", "param"),
    [
        ("limit=0", 400, "integer_below_min_value", "limit"),
        ("limit=10001", 400, "integer_above_max_value", "limit"),
        ("limit=ten", 400, "invalid_type", "limit"),
        ("order=up", 400, "invalid_value", "order"),
        ("after=file-123", 404, None, "after"),
    ],
)
async def test_a_wrong_query_is_refused(
    counter: Counter, query: str, status: int, code: str | None, param: str
) -> None:
    wrong(await counter.ask("GET", f"/v1/files?{query}"), status, code, param)


async def test_another_keys_file_is_unknown(counter: Counter) -> None:
    file = await counter.file(ONE)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = await counter.ask(method, f"/v1/files/{file}{path}", key="sk-bob")
        assert wrong(reply, 404, None, "id") == f"No such File object: {file}"
    assert (await counter.ask("GET", "/v1/files", key="sk-bob")).json["data"] == []
    wrong(await counter.ask("GET", f"/v1/files?after={file}", key="sk-bob"), 404, None, "after")


@pytest.mark.parametrize("file_id", ["x", "file-%00", "file-" + "a" * 5000, "%F0%9F%98%80", "..%2f.."])
async def test_any_id_is_at_most_unknown(counter: Counter, file_id: str) -> None:
    assert (await counter.ask("GET", f"/v1/files/{file_id}")).status == 404


async def test_a_wrong_key_is_told_although_a_file_comes(counter: Counter) -> None:
    raw, kind = form(b"x" * 5_000_000, fields={"purpose": "user_data"})
    reply = await counter.ask("POST", "/v1/files", raw, key="sk-eve", headers=(("Content-Type", kind),))
    wrong(reply, 401, "invalid_api_key")
    assert reply.header("connection") == "close"


@pytest.mark.parametrize("path", ["/v1/files", "/files/", "/v1/files/"])
async def test_every_spelling_of_the_path_works(counter: Counter, path: str) -> None:
    assert (await counter.ask("GET", path)).status == 200


async def test_a_wrong_method_names_the_right_ones(counter: Counter) -> None:
    reply = await counter.ask("PUT", "/v1/files", {})
    wrong(reply, 405, "method_not_supported")
    assert set((reply.header("allow") or "").split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize(
    ("wanted", "status", "start", "end"),
    [
        ("bytes=0-3", 206, 0, 4),
        ("bytes=5-", 206, 5, 26),
        ("bytes=-3", 206, 23, 26),
        ("bytes=20-99", 206, 20, 26),
        ("bytes=0-", 200, 0, 26),
        ("bytes=-99", 200, 0, 26),
        ("bytes=1-2,5-6", 200, 0, 26),
        ("bytes=5-2", 200, 0, 26),
        ("lines=1-2", 200, 0, 26),
        ("bytes=26-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
async def test_a_range_of_a_file_can_be_asked_for(
    counter: Counter, wanted: str, status: int, start: int, end: int
) -> None:
    content = b"abcdefghijklmnopqrstuvwxyz"
    file = await counter.file(content, name="é'.bin", fields={"purpose": "user_data"})
    reply = await counter.ask("GET", f"/v1/files/{file}/content", headers=(("Range", wanted),))
    assert (reply.status, reply.body) == (status, content[start:end])
    told = {200: None, 206: f"bytes {start}-{end - 1}/26", 416: "bytes */26"}
    assert reply.header("content-range") == told[status]
    assert reply.header("content-disposition") == "attachment; filename=\"_'.bin\"; filename*=UTF-8''%C3%A9%27.bin"


async def test_a_head_tells_the_size_alone(counter: Counter) -> None:
    file = await counter.file(ONE)
    reply = await counter.ask("HEAD", f"/v1/files/{file}/content")
    assert (reply.status, reply.header("content-length"), reply.body) == (200, str(len(ONE)), b"")


async def test_an_empty_file_comes_back_empty(counter: Counter) -> None:
    file = await counter.file(b"", fields={"purpose": "user_data"})
    reply = await counter.ask("GET", f"/v1/files/{file}/content")
    assert (reply.status, reply.body, reply.clean) == (200, b"", True)


async def test_a_client_that_leaves_inside_an_upload_leaves_nothing(counter: Counter) -> None:
    raw, kind = form(b"x" * 3_000_000, fields={"purpose": "user_data"})
    headers = (("Authorization", "Bearer sk-ann"), ("Content-Type", kind), ("Content-Length", str(len(raw))))
    async with await Connection.open(counter.port) as wire:
        await wire.send(request("/v1/files", raw[:2_500_000], headers=headers))
        await eventually(lambda: _written(counter) > 0)
        wire.reset()
    await eventually(lambda: not counter.store._in_hand)
    assert (await counter.ask("GET", "/v1/files")).json["data"] == []


def _written(counter: Counter) -> int:
    return len(counter.store._in_hand)


async def test_a_client_that_stalls_inside_an_upload_is_told(tmp_path: Path) -> None:
    async with open_counter(tmp_path, terms=Terms(body_s=0.1)) as counter:
        raw, kind = form(b"x" * 1000, fields={"purpose": "user_data"})
        headers = (("Authorization", "Bearer sk-ann"), ("Content-Type", kind), ("Content-Length", str(len(raw))))
        async with await Connection.open(counter.port) as wire:
            await wire.send(request("/v1/files", raw[:500], headers=headers))
            found = [reply async for reply in wire.watch()]
    assert found[-1].status == 408
    assert found[-1].error["code"] == "request_timeout"


async def test_a_client_that_reads_nothing_is_let_go(tmp_path: Path) -> None:
    async with open_counter(tmp_path, terms=Terms(write_stall_s=0.2)) as counter:
        file = await counter.file(b"x" * 30_000_000, fields={"purpose": "user_data"})
        async with await Connection.open(counter.port, receive_buffer=4096) as wire:
            await wire.send(
                request(f"/v1/files/{file}/content", method="GET", headers=(("Authorization", "Bearer sk-ann"),))
            )
            await wire.read_until(b"\r\n\r\n")
            await eventually(lambda: not counter.connections)
        assert (await counter.ask("GET", f"/v1/files/{file}")).status == 200


class _Full:
    """A store in trouble."""

    def __init__(self, trouble: Exception) -> None:
        self.trouble = trouble

    def __getattr__(self, name: str) -> Any:
        raise self.trouble


@pytest.mark.parametrize(
    ("trouble", "status", "code", "again"),
    [(StoreFull("full"), 507, "insufficient_storage", "false"), (StoreLost("gone"), 503, "server_is_overloaded", None)],
)
async def test_trouble_of_the_store_is_told_as_such(
    counter: Counter, trouble: Exception, status: int, code: str, again: str | None
) -> None:
    object.__setattr__(counter.desk, "store", _Full(trouble))
    reply = await counter.send(ONE)
    wrong(reply, status, code)
    assert reply.header("x-should-retry") == again
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches/batch_1/cancel")):
        assert (await counter.ask(method, path)).status == status
