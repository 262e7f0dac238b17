"""The checks that ask what the router itself counted: a router in this process, looked into."""

import asyncio

import pytest

from tests.fakes import Script
from tests.rig import ask, chat, entry, eventually

ASKED = [
    ({"max_tokens": 900, "max_completion_tokens": 100}, 100),
    ({"max_tokens": 100}, 100),
    ({"max_tokens": 100, "n": 3}, 300),
    ({"max_tokens": 1_000_000}, None),
]


@pytest.mark.check("C20")
@pytest.mark.parametrize(("fields", "output"), ASKED)
async def test_the_room_held_is_what_was_asked(rig, fields, output):
    node = await rig.node(context=2048, script=Script(ttft=0.2))
    app = await rig.router(entry(node))
    call = asyncio.create_task(ask(app.port, chat("hello", **fields)))
    await eventually(lambda: node.inflight)
    held = app.node("n1").budget.held().tokens
    assert (await call).status == 200
    if output is None:
        assert 2048 - 16 <= held <= 2048
    else:
        assert output < held < output + 64


@pytest.mark.check("C20")
async def test_prompt_and_output_beyond_the_context_are_not_refused(rig):
    await rig.node(context=2048)
    app = await rig.router()
    reply = await ask(app.port, chat("word " * 1500, max_tokens=2000))
    assert reply.status == 200


@pytest.mark.check("C54")
async def test_three_tries_are_one_call_of_demand(rig):
    await rig.node()
    app = await rig.router()
    for retry in range(3):
        assert (await ask(app.port, chat(), headers=(("X-Stainless-Retry-Count", str(retry)),))).status == 200
    metrics = await app.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("ebbtide_classified_total")) == 1
