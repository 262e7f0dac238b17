"""The checks of files and batches that need a rude client, much data or a look at the node: raw sockets."""

import json
from typing import Any

import psutil
import pytest

from tests.acceptance import batches
from tests.acceptance.batch_world import RAW, REFUSALS, SAMPLES, STRANGER, BatchWorld
from tests.acceptance.batches import END, FILE, FORM, PURPOSE, bearer
from tests.rig import Connection, Reply, ask, request
from tests.rig.routers import samples

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
MB = 1_000_000
TALK = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello world!"}]
ALL_THE_SAME = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"tiny","messages":[]}}\n'


async def call(world: BatchWorld, method: str, path: str, body: Any = None, *, key: str = RAW) -> Reply:
    return await ask(world.router.port, body, path, method=method, headers=bearer(world.key(key)))


async def run(world: BatchWorld, *lines: Any, endpoint: str = "/v1/chat/completions") -> dict[str, Any]:
    """A batch of these lines, seen to its end."""
    port, key = world.router.port, world.key(RAW)
    file = await batches.upload(port, b"".join(json.dumps(line).encode() + b"\n" for line in lines), key)
    return await batches.ended(port, await batches.create(port, file, endpoint=endpoint, key=key), 30, key)


async def output(world: BatchWorld, batch: dict[str, Any]) -> list[dict[str, Any]]:
    return await batches.content(world.router.port, batch["output_file_id"], world.key(RAW))


def line(custom_id: str, model: str = "tiny", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    said = body or {"messages": [{"role": "user", "content": f"raw {custom_id}"}], "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": model, **said}}


@pytest.mark.check("C57")
async def test_two_hundred_megabytes_are_streamed_in(batch_world):
    router = psutil.Process(batch_world.router.process.pid)
    piece = b'{"x":"' + b"y" * (MB - 9) + b'"}\n'
    headers = (*FORM, *bearer(batch_world.key(RAW)), ("Transfer-Encoding", "chunked"))
    await batches.upload(batch_world.router.port, piece * 2, batch_world.key(RAW))
    before, most = router.memory_info().rss, 0
    async with await Connection.open(batch_world.router.port) as wire:
        await wire.send(request("/v1/files", b"", headers=headers))
        for data in (FILE, *[piece] * 200, b"\r\n" + PURPOSE + END, b""):
            await wire.send(b"%x\r\n%b\r\n" % (len(data), data))
            most = max(most, router.memory_info().rss - before)
        file = (await wire.reply()).json
    assert (file["bytes"], file["purpose"], file["filename"]) == (200 * MB, "batch", "in.jsonl")
    assert most < 32 * 2**20
    assert (await call(batch_world, "DELETE", f"/v1/files/{file['id']}")).json["deleted"]


@pytest.mark.check("C66")
async def test_another_keys_files_and_batches_are_unknown(batch_world):
    batch = await run(batch_world, line("a"))
    paths = [f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id")]
    asked = [("GET", path) for path in paths] + [("GET", f"{path}/content") for path in paths]
    asked += [("DELETE", path) for path in paths]
    asked += [("GET", f"/v1/batches/{batch['id']}"), ("POST", f"/v1/batches/{batch['id']}/cancel")]
    for method, path in asked:
        assert (await call(batch_world, method, path, key=STRANGER)).status == 404, path
        assert (await call(batch_world, "GET", path.removesuffix("/cancel"))).status == 200, path
    for path in ("/v1/files", "/v1/batches"):
        assert (await call(batch_world, "GET", path, key=STRANGER)).json["data"] == []


@pytest.mark.check("C66")
async def test_another_keys_file_is_no_input(batch_world):
    port, key = batch_world.router.port, batch_world.key(STRANGER)
    file = await batches.upload(port, json.dumps(line("a")).encode(), batch_world.key(RAW))
    batch = await batches.ended(port, await batches.create(port, file, key=key), 10, key)
    (error,) = batch["errors"]["data"]
    assert (batch["status"], error["code"], error["param"]) == ("failed", "invalid_request", "file_id")
    assert "Cannot find file" in error["message"]


@pytest.mark.check("C75")
@pytest.mark.check("C86")
async def test_sixty_thousand_lines_of_one_id_are_refused_and_bounded(batch_world):
    """B65, and what is deleted while its check still waits for that one."""
    port, key = batch_world.router.port, batch_world.key(RAW)
    router, before = psutil.Process(batch_world.router.process.pid), batch_world.node.accepted
    held = router.memory_info().rss
    many = await batches.upload(port, ALL_THE_SAME * 60_000, key)
    deleted = await batches.upload(port, json.dumps(line("a")).encode(), key)
    large, small = await batches.create(port, many, key=key), await batches.create(port, deleted, key=key)
    assert (await call(batch_world, "DELETE", f"/v1/files/{deleted}")).json["deleted"]
    batch = await batches.ended(port, large, 20, key)
    assert batch["status"] == "failed"
    assert batch["failed_at"] - batch["created_at"] <= 5
    whole, *rest = batch["errors"]["data"]
    assert (whole["code"], whole["line"]) == ("batch_request_limit_exceeded", None)
    assert [error["line"] for error in rest[:-1]] == list(range(2, 102))
    assert {error["code"] for error in rest[:-1]} == {"duplicate_custom_id"}
    assert router.memory_info().rss - held < 32 * 2**20
    orphan = await batches.ended(port, small, 10, key)
    assert (orphan["status"], orphan["errors"]["data"][0]["param"]) == ("failed", "file_id")
    assert batch_world.node.accepted == before


@pytest.mark.check("C75")
async def test_an_input_over_200_megabytes_is_refused_before_it_is_sent(batch_world):
    length = ("Content-Length", str(300 * MB))
    async with await Connection.open(batch_world.router.port) as wire:
        headers = (*FORM, *bearer(batch_world.key(RAW)), length)
        await wire.send(request("/v1/files", PURPOSE + FILE + b'{"a":1}\n', headers=headers))
        reply = await anext(reply async for reply in wire.watch() if reply.body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (413, "payload_too_large", "file")


@pytest.mark.check("C82")
async def test_an_answer_is_stored_as_it_came(batch_world):
    batch = await run(batch_world, line("a", "tiny", "/v1/embeddings", input="hello"), endpoint="/v1/embeddings")
    (told,) = await output(batch_world, batch)
    plain = await call(batch_world, "POST", "/v1/embeddings", {"model": "tiny", "input": "hello"})
    assert told["response"]["body"] == plain.json
    assert told["response"]["request_id"] == batch_world.seen("hello")[-2].header("x-request-id")


SAMPLE_FILES = {
    "OpenAI's guide": [
        line("request-1", SAMPLES[0], messages=TALK, max_tokens=1000),
        line("request-2", SAMPLES[0], messages=[TALK[0] | {"content": "You are an unhelpful assistant."}, TALK[1]]),
    ],
    "OpenAI's cookbook": [
        line(
            f"task-{number}",
            SAMPLES[1],
            temperature=0.1,
            response_format={"type": "json_object"},
            messages=[TALK[0], {"role": "user", "content": "Two imprisoned men bond over a number of years."}],
        )
        for number in range(2)
    ],
    "vLLM's chat": [line(f"request-{number}", SAMPLES[2], messages=TALK, max_completion_tokens=9) for number in (1, 2)],
    "vLLM's embeddings": [
        line(f"request-{number}", SAMPLES[2], "/v1/embeddings", input="You are a helpful assistant.")
        for number in (1, 2)
    ],
    "vLLM's scores": [
        line("request-1", SAMPLES[2], "/v1/score", text_1="What is it?", text_2=["A river.", "A tide."]),
        line("request-2", SAMPLES[2], "/v1/score", queries="What is it?", documents=["A river.", "A tide."]),
    ],
    "vLLM's rerank": [line("request-1", SAMPLES[2], "/v1/rerank", query="What?", documents=["A river.", "A tide."])],
}


@pytest.mark.check("C88")
@pytest.mark.parametrize("name", SAMPLE_FILES)
async def test_published_input_files_are_taken_unchanged(batch_world, name):
    lines = SAMPLE_FILES[name]
    batch = await run(batch_world, *lines, endpoint=lines[0]["url"])
    assert batch["status"] == "completed", batch["errors"]
    assert batch["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    told = await output(batch_world, batch)
    assert {one["custom_id"] for one in told} == {one["custom_id"] for one in lines}


@pytest.mark.check("C89")
async def test_a_line_goes_streamed_and_comes_unstreamed(batch_world):
    async def ended() -> dict[str, float]:
        metrics = samples((await call(batch_world, "GET", "/metrics")).body.decode())
        names = ("batch", "interactive")
        return {name: sum(n for key, n in metrics.items() if _is_chat_of(key, name)) for name in names}

    before = await ended()
    (told,) = await output(batch_world, await run(batch_world, line("c89", stream=False, **line("c89")["body"])))
    (seen,) = batch_world.seen("raw c89")
    assert seen.json["stream"] is True
    body = told["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "tok0 tok1 tok2"}
    assert body["usage"]["completion_tokens"] == 3
    after = await ended()
    assert (after["batch"] - before["batch"], after["interactive"] - before["interactive"]) == (1, 0)


def _is_chat_of(sample: str, workload: str) -> bool:
    return sample.startswith("ebbtide_calls_total{") and f'workload="{workload}"' in sample and "chat" in sample


@pytest.mark.check("C90")
async def test_refusals_of_a_node_are_tried_again(batch_world):
    batch = await run(batch_world, line("c90-1", "busy"), line("c90-2", "busy"))
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    assert len(await output(batch_world, batch)) == 2
    for number in (1, 2):
        assert len(batch_world.seen(f"raw c90-{number}")) > len(REFUSALS)
