"""A small batch beside chat, seen through the OpenAI SDK."""

import asyncio
import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch
from openai.types.chat import ChatCompletion

from tests.rig import App, ask, eventually, running_app, stream
from tests.rig.leaks import held

LINES = 40
ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def night(model: str, **body: Any) -> bytes:
    """Forty lines, each with a few words of its own."""
    asked = [{"role": "user", "content": "Say a word."}]
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": model, "messages": asked, "max_tokens": 2, "seed": number, **body},
        }
        for number in range(LINES)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def beside_chat(nodes: list[Any], model: str, home: Path, settings: dict[str, Any]) -> Batch:
    """A router with these nodes and a store of its own does the batch while chat goes on; all is given back."""
    told = {**settings, "nodes": nodes, "store": {"url": f"sqlite:///{home / 'ebbtide.db'}"}}
    async with running_app(told) as app:
        async with AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
            batch = await _done(client, app, night(model), stream("Hi.", model=model, max_tokens=1))
            await check(client, batch)
        await eventually(lambda: not held(app) and not app.inside.dispatcher.trips)
        assert all(not node.faults for node in app.nodes)
    return batch


async def _done(client: AsyncOpenAI, app: App, lines: bytes, said: dict[str, Any]) -> Batch:
    file = await client.files.create(file=("night.jsonl", lines), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    chats = 0
    while batch.status not in ENDED:
        reply = await ask(app.port, said)
        assert (reply.status, reply.clean, reply.header("x-ebbtide-workload")) == (200, True, "interactive")
        chats += 1
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    assert chats > 1
    return batch


async def check(client: AsyncOpenAI, batch: Batch) -> None:
    """Every line once, readable as what the SDK gives for a call, and counted."""
    assert (batch.status, batch.error_file_id) == ("completed", None), batch
    text = (await client.files.content(batch.output_file_id or "")).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{number}" for number in range(LINES))
    answers = [ChatCompletion.model_validate(row["response"]["body"], strict=True) for row in rows]
    assert {answer.object for answer in answers} == {"chat.completion"}
    assert all(answer.choices[0].finish_reason in ("stop", "length") for answer in answers)
    counts, usage = batch.request_counts, batch.usage
    assert counts is not None
    assert usage is not None
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES, 0)
    used = [answer.usage for answer in answers if answer.usage is not None]
    assert usage.output_tokens == sum(one.completion_tokens for one in used)
    assert usage.input_tokens == sum(one.prompt_tokens for one in used)
