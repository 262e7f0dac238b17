"""NUL and half surrogate pairs in whatever a caller may write: a clear 400, or the line's own error; never a 5xx."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http.counter import Counter, form, good, jsonl, line, open_counter

NUL, HALF = rb"\u0000", rb"\ud800"
RAW_HALF = b"\xed\xa0\x80"


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    async with open_counter(tmp_path) as counter:
        yield counter


BODIES = {
    "/v1/batches": rb'{"input_file_id": "%b", "endpoint": "%b", "completion_window": "%b",'
    rb' "metadata": {"%b": "%b"}, "webhook": "%b"}',
    "/v1/uploads": rb'{"filename": "%b.jsonl", "mime_type": "%b", "purpose": "%b", "bytes": 5}',
}


@pytest.mark.parametrize("bad", [NUL, HALF, RAW_HALF], ids=["nul", "half", "raw half"])
@pytest.mark.parametrize("path", BODIES)
async def test_in_any_field_of_a_body_it_is_a_400(counter: Counter, path: str, bad: bytes) -> None:
    plain = {"/v1/batches": (b"file-x", b"/v1/responses", b"24h", b"k", b"v", b"https://x"),
             "/v1/uploads": (b"a", b"text/plain", b"batch")}[path]  # fmt: skip
    for at in range(len(plain)):
        words = list(plain)
        words[at] += bad
        body = BODIES[path] % tuple(words)
        reply = await counter.ask("POST", path, body, headers=(("Content-Type", "application/json"),))
        assert reply.status == 400, (at, reply.body)


async def test_in_queries_forms_and_ids_it_is_a_400_or_404(counter: Counter) -> None:
    for query in ("files?purpose=%00", "files?after=%00", "batches?after=%00", "files?order=%00", "batches?limit=%00"):
        reply = await counter.ask("GET", f"/v1/{query}")
        assert reply.status in (400, 404), (query, reply.body)
    for path in ("files/%00", "batches/%00", "files/%00/content", "files/%ED%A0%80"):
        assert (await counter.ask("GET", f"/v1/{path}")).status == 404
    assert (await counter.ask("DELETE", "/v1/files/%00")).status == 404
    for path in ("batches/%00/cancel", "uploads/%00/cancel"):
        assert (await counter.ask("POST", f"/v1/{path}", {})).status == 404
    for fields in ({"purpose": "batch\0"}, {"purpose": "batch", "expires_after[anchor]": "\0"}):
        raw, kind = form(jsonl(line()), fields=fields)
        assert (await counter.ask("POST", "/v1/files", raw, headers=(("Content-Type", kind),))).status == 400
    raw, kind = form(jsonl(line()), fields={"purpose": "batch"}, name="a\0b.jsonl")
    reply = await counter.ask("POST", "/v1/files", raw, headers=(("Content-Type", kind),))
    assert (reply.status, reply.json["filename"]) == (200, "ab.jsonl")


@pytest.mark.parametrize("bad", [NUL, HALF, RAW_HALF], ids=["nul", "half", "raw half"])
@pytest.mark.parametrize("field", [b"custom_id", b"method", b"url", b"model"])
async def test_in_a_line_it_is_the_lines_error(counter: Counter, field: bytes, bad: bytes) -> None:
    words = {b"custom_id": b"a", b"method": b"POST", b"url": b"/v1/chat/completions", b"model": b"tiny"}
    words[field] += bad
    raw = b'{"custom_id": "%b", "method": "%b", "url": "%b", "body": {"model": "%b", "messages": []}}\n' % (
        words[b"custom_id"], words[b"method"], words[b"url"], words[b"model"],
    )  # fmt: skip
    batch = await counter.batch(line("b"), raw)
    assert batch["status"] == "failed"
    assert {error["line"] for error in batch["errors"]["data"]} == {2}


async def test_in_a_prompt_nul_is_the_engines_business(counter: Counter) -> None:
    batch = await counter.batch(line("a", messages=[{"role": "user", "content": "a\0b"}]))
    assert batch["status"] == "in_progress"
    await counter.work(good)
    assert (await counter.get(batch["id"]))["status"] == "completed"
