"""Batches over the wire: creation and its refusals, shapes, pages, isolation, quotas. Ends: `test_batches_ends`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from router.api.desk import Bounds, Quota
from router.errors import BadRequest
from router.jobs.intake import Allowance
from tests.http.counter import START, Counter, good, jsonl, line, open_counter
from tests.http.test_files import wrong
from tests.rig import Reply

DAY = 86_400
ASKED = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    async with open_counter(tmp_path) as counter:
        yield counter


async def create(counter: Counter, **fields: Any) -> Reply:
    told = {"input_file_id": "file-unknown"} | ASKED | fields
    return await counter.ask("POST", "/v1/batches", {key: value for key, value in told.items() if value is not ...})


async def test_a_new_batch_has_openais_shape_with_every_key(counter: Counter) -> None:
    file = await counter.file(jsonl(line()))
    reply = await create(counter, input_file_id=file, metadata={"night": "5", "empty": ""})
    told = reply.json
    assert told.pop("id").startswith("batch_")
    assert told == {
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "model": None,
        "errors": None,
        "input_file_id": file,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": START,
        "in_progress_at": None,
        "expires_at": START + DAY,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        "metadata": {"night": "5", "empty": ""},
        "ebbtide": {
            "priority": 0,
            "progress": 0.0,
            "estimated_completion_at": None,
            "waiting_reason": None,
        },
    }
    reason = (await counter.get(reply.json["id"]))["ebbtide"]["waiting_reason"]
    assert reason == "Its lines are being checked."


WRONG = [
    ({"endpoint": "/v1/invalid"}, "invalid_value", "endpoint"),
    ({"endpoint": "chat/completions"}, "invalid_value", "endpoint"),
    ({"endpoint": "/v1/moderations"}, "invalid_value", "endpoint"),
    ({"endpoint": 7}, "invalid_type", "endpoint"),
    ({"endpoint": ...}, "missing_required_parameter", "endpoint"),
    ({"input_file_id": ...}, "missing_required_parameter", "input_file_id"),
    ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
    ({"input_file_id": ""}, "empty_string", "input_file_id"),
    ({"input_file_id": "a\0"}, "invalid_value", "input_file_id"),
    ({"input_file_id": "x" * 513}, "string_above_max_length", "input_file_id"),
    ({"completion_window": ...}, "missing_required_parameter", "completion_window"),
    ({"completion_window": "1 day"}, "invalid_value", "completion_window"),
    ({"completion_window": "4m"}, "invalid_value", "completion_window"),
    ({"completion_window": "15d"}, "invalid_value", "completion_window"),
    ({"completion_window": 24}, "invalid_type", "completion_window"),
    ({"metadata": {"a": [1]}}, "invalid_type", "metadata.a"),
    ({"metadata": {"a": None}}, "invalid_type", "metadata.a"),
    ({"metadata": ["a"]}, "invalid_type", "metadata"),
    ({"metadata": {"a": "x" * 513}}, "string_above_max_length", "metadata.a"),
    ({"metadata": {"a": "\0"}}, "invalid_value", "metadata.a"),
    ({"metadata": {"k" * 65: "x"}}, "invalid_value", "metadata." + "k" * 64),
    ({"metadata": {"": "x"}}, "invalid_value", "metadata."),
    ({"metadata": {str(number): "x" for number in range(17)}}, "object_above_max_properties", "metadata"),
    ({"output_expires_after": {"anchor": "created_at"}}, "missing_required_parameter", "output_expires_after.seconds"),
    ({"output_expires_after": {"seconds": 3600}}, "missing_required_parameter", "output_expires_after.anchor"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "invalid_value", "output_expires_after.anchor"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
        "integer_below_min_value",
        "output_expires_after.seconds",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
        "integer_above_max_value",
        "output_expires_after.seconds",
    ),
    ({"output_expires_after": 3600}, "invalid_type", "output_expires_after"),
    ({"priority": 11}, "integer_above_max_value", "priority"),
    ({"priority": -11}, "integer_below_min_value", "priority"),
    ({"priority": 1.5}, "invalid_type", "priority"),
    ({"webhook": 7}, "invalid_type", "webhook"),
    ({"webhook": ""}, "empty_string", "webhook"),
    ({"webhook": "https://hooks.example/" + "x" * 2048}, "string_above_max_length", "webhook"),
    ({"webhook": {}}, "missing_required_parameter", "webhook.url"),
    ({"webhook": {"url": 7}}, "invalid_type", "webhook.url"),
    ({"webhook": {"url": "https://hooks.example/", "events": []}}, "unknown_parameter", "webhook.events"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG)
async def test_a_wrong_request_is_refused(counter: Counter, fields: dict[str, Any], code: str, param: str) -> None:
    message = wrong(await create(counter, **fields), 400, code, param)
    assert param.partition(".")[0] in message or code == "invalid_value"
    if param == "completion_window":
        assert "completion_window" in message


BODIES = [(b"", None), (b"{", None), (b"[]", None), (b"\xff", None), (b"{}", "text/plain")]


@pytest.mark.parametrize(("body", "kind"), BODIES)
async def test_a_body_that_is_no_json_object_is_refused(counter: Counter, body: bytes, kind: str | None) -> None:
    headers = (("Content-Type", kind or "application/json"),)
    reply = await counter.ask("POST", "/v1/batches", body, headers=headers)
    wrong(reply, 415 if kind else 400, "unsupported_content_type" if kind else None)


async def test_a_body_without_end_is_a_413(counter: Counter) -> None:
    wrong(await create(counter, metadata={"a": "x" * 2**21}), 413, "payload_too_large")


WINDOWS = [("5m", 300), ("90m", 5400), ("1h", 3600), ("14d", 14 * DAY), ("168h", 7 * DAY)]


@pytest.mark.parametrize(("window", "seconds"), WINDOWS)
async def test_a_window_may_be_minutes_to_days(counter: Counter, window: str, seconds: int) -> None:
    told = (await create(counter, completion_window=window)).json
    assert (told["completion_window"], told["expires_at"]) == (window, START + seconds)


@pytest.mark.parametrize(
    "endpoint", ["/v1/embeddings", "/v1/completions", "/v1/responses", "/v1/messages", "/rerank", "/v1/score"]
)
async def test_every_endpoint_is_kept_as_it_was_written(counter: Counter, endpoint: str) -> None:
    assert (await create(counter, endpoint=endpoint)).json["endpoint"] == endpoint


async def test_an_unknown_input_fails_the_batch_and_not_the_request(counter: Counter) -> None:
    theirs = await counter.file(jsonl(line()))
    for file, key in (("file-unknown", "sk-ann"), (theirs, "sk-bob")):
        told = {"input_file_id": file} | ASKED
        batch = (await counter.ask("POST", "/v1/batches", told, key=key)).json
        assert batch["status"] == "validating"
        await counter.check()
        batch = (await counter.ask("GET", f"/v1/batches/{batch['id']}", key=key)).json
        assert (batch["status"], batch["failed_at"], batch["errors"]["object"]) == ("failed", START, "list")
        (error,) = batch["errors"]["data"]
        assert (error["code"], error["param"], error["line"]) == ("invalid_request", "file_id", None)
        assert file in error["message"]


async def test_an_input_for_another_purpose_is_refused_at_once(counter: Counter) -> None:
    file = await counter.file(jsonl(line()), fields={"purpose": "user_data"})
    wrong(await create(counter, input_file_id=file), 400, "invalid_value", "input_file_id")


async def test_bad_lines_fail_the_batch_with_their_numbers(counter: Counter) -> None:
    batch = await counter.batch(line("a"), b"rubbish\n", line("a"), line("b", stream=True))
    told = [(error["code"], error["line"], error["param"]) for error in batch["errors"]["data"]]
    assert told == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("streaming_unsupported", 4, "body.stream"),
    ]
    assert all(set(error) == {"code", "message", "param", "line"} for error in batch["errors"]["data"])
    assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 0)
    assert await counter.work(good) == []


async def test_an_input_deleted_before_the_check_fails_the_batch_and_after_it_does_not(counter: Counter) -> None:
    file = await counter.file(jsonl(line("a")))
    early = (await create(counter, input_file_id=file)).json["id"]
    await counter.ask("DELETE", f"/v1/files/{file}")
    await counter.check()
    assert (await counter.get(early))["status"] == "failed"
    file = await counter.file(jsonl(line("a")))
    late = (await counter.batch(input_file_id=file))["id"]
    await counter.ask("DELETE", f"/v1/files/{file}")
    await counter.work(good)
    assert (await counter.get(late))["status"] == "completed"


async def test_pages_are_newest_first(counter: Counter) -> None:
    ids = [(await create(counter)).json["id"] for _ in range(3)]
    async with counter.sdk() as sdk:
        assert [batch.id async for batch in sdk.batches.list(limit=1)] == ids[::-1]
    page = (await counter.ask("GET", f"/v1/batches?limit=2&after={ids[2]}")).json
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == ([ids[1], ids[0]], False)
    assert (page["first_id"], page["last_id"]) == (ids[1], ids[0])
    wrong(await counter.ask("GET", "/v1/batches?limit=101"), 400, "integer_above_max_value", "limit")
    wrong(await counter.ask("GET", "/v1/batches?after=batch_x"), 404, None, "after")
    page = (await counter.ask("GET", "/v1/batches", key="sk-bob")).json
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_another_keys_batch_is_unknown(counter: Counter) -> None:
    batch = (await create(counter)).json["id"]
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await counter.ask(method, f"/v1/batches/{batch}{path}", key="sk-bob")
        assert wrong(reply, 404, None) == f"No batch found with id '{batch}'."
    wrong(await counter.ask("GET", f"/v1/batches?after={batch}", key="sk-bob"), 404, None, "after")
    async with counter.sdk("sk-bob") as sdk:
        with pytest.raises(NotFoundError, match="No batch found"):
            await sdk.batches.retrieve(batch)
    wrong(await counter.ask("GET", f"/v1/batches/{batch}", key="sk-eve"), 401, "invalid_api_key")


async def test_what_is_ours_stands_under_its_own_key(counter: Counter) -> None:
    batch = await counter.batch(*(line(str(number)) for number in range(8)), priority=-3)
    assert batch["ebbtide"] == {
        "priority": -3,
        "progress": 0.0,
        "estimated_completion_at": None,
        "waiting_reason": None,
    }
    await counter.store.note({batch["id"]: "Every node that serves 'tiny' is down."})
    told = (await counter.get(batch["id"]))["ebbtide"]
    assert told["waiting_reason"] == "Every node that serves 'tiny' is down."
    await counter.store.note({batch["id"]: None})
    await counter.work(good, limit=2)
    await counter.store.beat()
    told = (await counter.get(batch["id"]))["ebbtide"]
    assert told["progress"] == 0.25
    assert told["estimated_completion_at"] is not None
    assert START < told["estimated_completion_at"] <= START + 600
    ahead = await counter.batch(line("x"), completion_window="5m")
    assert (await counter.get(ahead["id"]))["ebbtide"]["waiting_reason"] is None
    assert "1 line of" in (await counter.get(batch["id"]))["ebbtide"]["waiting_reason"]


async def test_a_retried_creation_gives_the_same_batch(counter: Counter) -> None:
    file = await counter.file(jsonl(line()))
    told = {"input_file_id": file, "metadata": {"a": "1"}} | ASKED

    async def ask(body: dict[str, Any], **headers: str) -> str:
        pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return str((await counter.ask("POST", "/v1/batches", body, headers=pairs)).json["id"])

    first = await ask(told)
    assert await ask(told, x_stainless_retry_count="1") == first
    assert await ask(told | {"metadata": {"a": "2"}}, x_stainless_retry_count="1") != first
    second = await ask(told, x_stainless_retry_count="0")
    assert second != first
    counter.clock.now += 61
    assert await ask(told, x_stainless_retry_count="2") not in (first, second)
    named = await ask(told, idempotency_key="k")
    assert await ask(told, idempotency_key="k") == named
    assert await ask(told, idempotency_key="l") != named


async def test_batches_at_the_same_time_are_all_taken(counter: Counter) -> None:
    file = await counter.file(jsonl(line()))
    made = await asyncio.gather(*(create(counter, input_file_id=file) for _ in range(10)))
    assert len({reply.json["id"] for reply in made}) == 10
    await counter.check()
    assert len(await counter.work(good)) == 10


async def test_quotas_on_batches_lines_and_tokens(tmp_path: Path) -> None:
    allowed = Allowance(lines=5, tokens=500)
    async with open_counter(tmp_path, quota=lambda _: Quota(batches=2), allowance=lambda _: allowed) as counter:
        await counter.batch(*(line(str(number)) for number in range(3)))
        second = await counter.batch(*(line(str(number)) for number in range(3)))
        (error,) = second["errors"]["data"]
        assert (second["status"], error["code"], error["line"]) == ("failed", "batch_request_limit_exceeded", None)
        long = await counter.batch(line("a", messages=[{"role": "user", "content": "word " * 2000}]))
        (error,) = long["errors"]["data"]
        assert (long["status"], error["code"]) == ("failed", "token_limit_exceeded")
        assert (await counter.batch(line("a"), line("b")))["status"] == "in_progress"
        reply = await create(counter)
        wrong(reply, 429, "insufficient_quota")
        assert reply.header("x-should-retry") == "false"


async def test_result_files_are_kept_as_long_as_the_batch_says_or_the_operator(tmp_path: Path) -> None:
    for bounds, asked, kept_s in (
        (Bounds(), None, 30 * DAY),
        (Bounds(output_s=7200), None, 7200),
        (Bounds(output_s=None), None, None),
        (Bounds(output_s=7200), {"anchor": "created_at", "seconds": 3600}, 3600),
    ):
        async with open_counter(tmp_path, bounds=bounds) as counter:
            batch = await counter.batch(line("a"), **({"output_expires_after": asked} if asked else {}))
            await counter.work(good)
            file = (await counter.get(batch["id"]))["output_file_id"]
            told = (await counter.ask("GET", f"/v1/files/{file}")).json
            assert told["expires_at"] == (None if kept_s is None else told["created_at"] + kept_s)


async def test_a_webhook_is_taken_when_the_operator_allows_it(tmp_path: Path) -> None:
    def allowed(caller: str, url: str | None) -> str | None:
        if url is not None and not url.startswith("https://hooks.example/"):
            raise BadRequest("This host is not allowed.", param="webhook", code="invalid_value")
        return url

    async with open_counter(tmp_path, webhook=allowed) as counter:
        assert (await create(counter, webhook="https://hooks.example/x")).status == 200
        assert (await create(counter, webhook={"url": "https://hooks.example/x"})).status == 200
        wrong(await create(counter, webhook={"url": "https://evil.example/"}), 400, "invalid_value", "webhook")
        wrong(await create(counter, webhook="https://evil.example/"), 400, "invalid_value", "webhook")
        assert (await create(counter)).status == 200
    async with open_counter(tmp_path) as counter:
        wrong(await create(counter, webhook="https://hooks.example/x"), 400, "invalid_value", "webhook")


async def test_the_sdk_raises_what_it_should(counter: Counter) -> None:
    async with counter.sdk() as sdk:
        with pytest.raises(BadRequestError) as caught:
            await sdk.batches.create(
                input_file_id="file-x",
                endpoint="/v1/invalid",
                completion_window="24h",  # type: ignore[arg-type]
            )
    assert (caught.value.code, caught.value.param) == ("invalid_value", "endpoint")
    assert "/v1/chat/completions" in caught.value.message
