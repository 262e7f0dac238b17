"""How batches end, over the wire: answered, failed, cancelled, expired. Lines are answered by the test."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import ConflictError

from router.jobs.store import JobRow, NewResult
from tests.http.counter import START, Counter, bad, good, jsonl, line, open_counter
from tests.http.test_batches import create
from tests.http.test_files import wrong


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    async with open_counter(tmp_path) as counter:
        yield counter


async def lines_of(counter: Counter, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = (await counter.ask("GET", f"/v1/files/{file_id}/content")).body
    return {told["custom_id"]: told for told in map(json.loads, content.splitlines())}


async def test_the_sdk_sees_a_batch_through(counter: Counter) -> None:
    async with counter.sdk() as sdk:
        file = await sdk.files.create(file=("in.jsonl", jsonl(line("a"), line("b", max_tokens=-1))), purpose="batch")
        kept = {"anchor": "created_at", "seconds": 7200}
        batch = await sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", output_expires_after=kept
        )
        await counter.check()
        batch = await sdk.batches.retrieve(batch.id)
        assert (batch.status, batch.model) == ("in_progress", "tiny")
        assert batch.request_counts is not None
        assert batch.request_counts.total == 2
        counter.clock.now += 10
        await counter.work(lambda job: good(job) if job.custom_id == "a" else bad(job))
        batch = await sdk.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.in_progress_at is not None
        assert batch.finalizing_at is not None
        assert batch.completed_at is not None
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (5, 2, 7)
        assert batch.usage.input_tokens_details.cached_tokens == 1
        assert batch.to_dict()["ebbtide"]["progress"] == 1.0
        assert batch.output_file_id is not None
        output = (await sdk.files.content(batch.output_file_id)).text.splitlines()
        told = await sdk.files.retrieve(batch.output_file_id)
    assert (told.purpose, told.expires_at) == ("batch_output", START + 10 + 7200)
    (only,) = map(json.loads, output)
    assert only["id"].startswith("batch_req_")
    assert (only["custom_id"], only["error"], only["response"]["status_code"]) == ("a", None, 200)
    assert only["response"]["body"]["id"] == "chatcmpl-a"
    errors = await lines_of(counter, batch.error_file_id)
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["error"] is None


async def test_a_batch_of_failures_completes_without_output(counter: Counter) -> None:
    batch = await counter.batch(line("a"), line("b"))
    await counter.work(bad)
    batch = await counter.get(batch["id"])
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    assert set(await lines_of(counter, batch["error_file_id"])) == {"a", "b"}


async def test_a_cancelled_batch_keeps_what_is_done_and_tells_the_rest(counter: Counter) -> None:
    batch = await counter.batch(*(line(str(number)) for number in range(10)))
    await counter.work(good, limit=3)
    async with counter.sdk() as sdk:
        told = await sdk.batches.cancel(batch["id"])
        assert (told.status, told.cancelling_at, told.output_file_id) == ("cancelling", START, None)
        assert (await sdk.batches.cancel(batch["id"])).status == "cancelling"
        await counter.sweep()
        assert (await sdk.batches.cancel(batch["id"])).status == "cancelled"
    batch = await counter.get(batch["id"])
    assert batch["cancelled_at"] == START
    assert batch["request_counts"] == {"total": 10, "completed": 3, "failed": 0}
    done, rest = [await lines_of(counter, batch[f"{kind}_file_id"]) for kind in ("output", "error")]
    assert len(done) == 3
    assert set(done) | set(rest) == {str(number) for number in range(10)}
    assert {told["error"]["code"] for told in rest.values()} == {"batch_cancelled"}


async def test_a_batch_cancelled_before_its_check_tells_every_line(counter: Counter) -> None:
    file = await counter.file(jsonl(line("a"), line("b")))
    batch = (await create(counter, input_file_id=file)).json["id"]
    assert (await counter.ask("POST", f"/v1/batches/{batch}/cancel")).json["status"] == "cancelling"
    await counter.check()
    await counter.sweep()
    told = await counter.get(batch)
    assert told["status"] == "cancelled"
    assert set(await lines_of(counter, told["error_file_id"])) == {"a", "b"}


async def test_what_has_ended_cannot_be_cancelled_and_is_asked_once(counter: Counter) -> None:
    completed = await counter.batch(line("a"))
    await counter.work(good)
    failed = await counter.batch(b'{"custom_id": 1}\n')
    async with counter.sdk() as sdk:
        for batch, state in ((completed, "completed"), (failed, "failed")):
            with pytest.raises(ConflictError) as caught:
                await sdk.batches.cancel(batch["id"])
            told = caught.value
            assert told.response.headers["x-should-retry"] == "false"
            assert told.response.request.headers["x-stainless-retry-count"] == "0"
            assert f"Cannot cancel a batch with status '{state}'." in told.message
            assert (told.type, told.param, told.code) == ("invalid_request_error", None, None)


async def test_a_closed_window_delivers_what_is_done(counter: Counter) -> None:
    batch = await counter.batch(*(line(str(number)) for number in range(4)), completion_window="5m")
    await counter.work(good, limit=1)
    counter.clock.now += 301
    await counter.sweep()
    batch = await counter.get(batch["id"])
    assert (batch["status"], batch["expired_at"]) == ("expired", START + 301)
    assert len(await lines_of(counter, batch["output_file_id"])) == 1
    rest = await lines_of(counter, batch["error_file_id"])
    assert {told["error"]["code"] for told in rest.values()} == {"batch_expired"}
    reply = await counter.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    assert "expired" in wrong(reply, 409, None)


async def test_an_odd_answer_stays_untouched(counter: Counter) -> None:
    odd = b'{"a":1.0000000000000000001,"b":"\\u2028","c":{"z":1,"a":2}}'

    def answer(_: JobRow) -> NewResult:
        return NewResult(status=200, request_id="req_9", body=odd)

    batch = await counter.batch(line("a"))
    await counter.work(answer)
    batch = await counter.get(batch["id"])
    content = (await counter.ask("GET", f"/v1/files/{batch['output_file_id']}/content")).body
    assert b'"body":' + odd in content
    assert b'"request_id":"req_9"' in content
