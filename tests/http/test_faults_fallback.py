"""Fallback, retries and the state of nodes: whose fault it was, who may try again, and who must never see what."""

import asyncio
import json
from time import monotonic

import pytest

from tests.fakes import Script
from tests.fakes.script import PING
from tests.fakes.streams import data_event
from tests.rig import ask, chat, entry, eventually, relay_entry, stream

WORDS = "tok0 tok1 tok2 tok3 tok4"
ROLE = data_event({"id": "r", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
NO_RETRIES = {"first_byte_s": 3, "retries": 0}


@pytest.mark.parametrize("prelude", [(), (PING,), (ROLE,), (PING, ROLE)])
async def test_an_error_as_first_event_is_tried_elsewhere(rig, prelude):
    bad = await rig.node(script=Script(errframe=0, prelude=prelude, status=500))
    good = await rig.node()
    app = await rig.router()
    replies = [await ask(app.port, stream()) for _ in range(2)]
    assert [reply.text for reply in replies] == [WORDS, WORDS]
    assert all(b"scripted" not in reply.body for reply in replies)
    assert (bad.accepted, good.accepted) == (1, 2)


async def test_an_error_as_first_event_everywhere_is_a_status(rig):
    for _ in range(2):
        await rig.node(script=Script(errframe=0, prelude=(PING, ROLE), status=503))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert reply.status in (502, 503)
    assert reply.error["type"] in ("server_error", "service_unavailable_error")


async def test_an_empty_stream_is_a_failed_one(rig):
    await rig.node(script=Script(events=()))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert reply.status == 502


async def test_after_the_first_token_nobody_else_is_asked(rig):
    cut = await rig.node(script=Script(cut=5, n=20))
    relay = await rig.relay()
    app = await rig.router(relay=relay)
    reply = await ask(app.port, stream())
    assert reply.text == WORDS
    assert json.loads(reply.data[-2])["error"]["code"] == "upstream_error"
    assert (cut.accepted, relay.accepted) == (1, 0)


async def test_one_broken_event_does_not_end_a_stream(rig):
    events = [data_event({"id": "c", "choices": [{"index": 0, "delta": {"content": f"{at} "}}]}) for at in range(60)]
    events[30] = b'data: {"id":"c","choices":[{"inde\n\n'
    finish = data_event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    await rig.node(script=Script(events=(*events, finish, b"data: [DONE]\n\n")))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert len(reply.data) == 62
    assert reply.data[-1] == b"[DONE]"
    assert reply.body == b"".join((*events, finish, b"data: [DONE]\n\n"))


async def test_a_key_without_fallback_never_reaches_the_relay(rig):
    await rig.node(script=Script(status=500))
    relay = await rig.relay()
    keys = [{"name": "in", "key": "stays-in", "fallback": False}, {"name": "out", "key": "may-leave"}]
    app = await rig.router(relay=relay, keys=keys, upstream=NO_RETRIES)
    inside = await ask(app.port, chat(), headers=(("Authorization", "Bearer stays-in"),))
    assert (inside.status, relay.accepted) == (500, 0)
    outside = await ask(app.port, chat(), headers=(("Authorization", "Bearer may-leave"),))
    assert (outside.status, outside.header("x-ebbtide-node"), relay.accepted) == (200, "relay", 1)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_callers_errors_are_passed_on_and_counted_against_nobody(rig, status):
    node = await rig.node(script=Script(status=status, shape="openai", message="your fault"))
    relay = await rig.relay()
    app = await rig.router(relay=relay)
    for _ in range(20):
        reply = await ask(app.port, chat())
        assert (reply.status, reply.error["message"]) == (status, "your fault")
    node.script = Script()
    assert (await ask(app.port, chat())).status == 200
    assert (node.accepted, relay.accepted, app.node("n1").faults) == (21, 0, 0)


async def test_callers_errors_do_not_hide_failures(rig):
    node = await rig.node()
    node.on_request = lambda seen: Script(status=500 if b"valid" in seen.body else 400)
    app = await rig.router(upstream={**NO_RETRIES, "retries": 0}, probe={"every_s": 30})
    for _ in range(3):
        assert (await ask(app.port, chat("valid"))).status == 500
        await ask(app.port, chat("wrong"))
    assert str(app.node("n1").state) in ("down", "probation")


async def test_a_fleet_that_refuses_for_a_moment_fails_nobody_with_patience(rig):
    nodes = [await rig.node(script=Script(status=503, shape="vllm")) for _ in range(2)]
    app = await rig.router(pools={"interactive": {"patience_s": 8}})
    calls = [asyncio.create_task(ask(app.port, chat())) for _ in range(10)]
    await eventually(lambda: sum(node.accepted for node in nodes) >= 2)
    await asyncio.sleep(0.6)
    for node in nodes:
        node.script = Script()
    assert {reply.status for reply in await asyncio.gather(*calls)} == {200}
    assert all(str(node.state) in ("ready", "busy") for node in app.nodes)


async def test_when_every_node_is_down_they_are_still_tried(rig):
    node = await rig.node(script=Script(status=500))
    app = await rig.router(pools={"interactive": {"patience_s": 4}}, upstream=NO_RETRIES, probe={"every_s": 30})
    for _ in range(3):
        await ask(app.port, chat())
    assert str(app.node("n1").state) == "down"
    node.script = Script()
    assert (await ask(app.port, chat())).status == 200
    assert str(app.node("n1").state) == "ready"


async def test_a_node_that_fails_fast_does_not_draw_the_traffic(rig):
    bad = await rig.node(script=Script(status=500, ttft=0.005))
    good = await rig.node(script=Script(ttft=0.05, n=1))
    app = await rig.router(probe={"every_s": 30})
    replies = []
    for _ in range(15):
        replies += await asyncio.gather(*(ask(app.port, chat()) for _ in range(4)))
    served = sum(reply.status == 200 for reply in replies)
    assert served == 60
    assert bad.accepted <= 8
    assert good.accepted >= 60


async def test_the_old_leg_is_over_before_the_next_begins(rig):
    slow = await rig.node(script=Script(nohead=30))
    other = await rig.node(script=Script(nohead=30))
    app = await rig.router(upstream={"first_byte_s": 0.4, "first_byte_per_prompt_token_s": 0.0001})
    reply = await ask(app.port, chat())
    assert reply.status in (502, 504)
    await eventually(lambda: slow.aborted and other.aborted)
    (first,), (second,) = sorted((slow.aborted, other.aborted), key=lambda seen: seen[0].started)
    assert first.ended <= second.started


async def test_an_sdks_retry_finds_the_first_try_over(rig):
    node = await rig.node(script=Script(ttft=0.5))
    app = await rig.router()
    for retry in range(3):
        headers = (("X-Stainless-Retry-Count", str(retry)),)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(app.port, chat(), headers=headers), 0.15)
        await eventually(lambda: node.inflight == 0, within=0.3)
    assert len(node.aborted) == node.accepted == 3
    metrics = await app.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("ebbtide_classified_total")) == 1


async def test_an_outage_is_not_multiplied(rig):
    nodes = [await rig.node(script=Script(status=500)) for _ in range(3)]
    app = await rig.router(pools={"interactive": {"patience_s": 0}}, upstream={"retries": 2})
    replies = []
    for _ in range(10):
        replies += await asyncio.gather(*(ask(app.port, chat()) for _ in range(20)))
    assert all(reply.status in (500, 502, 503) for reply in replies)
    assert sum(node.accepted for node in nodes) <= 200 * 1.2 + 12


async def test_a_refusal_says_when_to_come_back(rig):
    await rig.node(script=Script(status=503))
    app = await rig.router(pools={"interactive": {"patience_s": 0.1}})
    reply = await ask(app.port, chat())
    assert reply.status == 503
    assert 1 <= int(reply.header("retry-after") or 0) <= 60


async def test_a_callers_key_never_leaves(rig):
    node = await rig.node()
    await node.down()
    relay = await rig.relay()
    app = await rig.router(node, relay=relay, keys=[{"name": "c", "key": "CLIENT-KEY"}], ready=False)
    credentials = (
        ("Authorization", "Bearer CLIENT-KEY"),
        ("X-Api-Key", "CLIENT-KEY"),
        ("Cookie", "session=CLIENT-KEY"),
        ("Proxy-Authorization", "Basic CLIENT-KEY"),
    )
    reply = await ask(app.port, chat(), headers=credentials)
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, "relay")
    assert "CLIENT-KEY" not in str(relay.seen[0].headers)
    assert relay.seen[0].header("authorization") == "Bearer relay-key"
    await node.up()


async def test_a_relay_without_a_key_is_sent_none(rig):
    node = await rig.node(script=Script(status=500))
    relay = await rig.relay()
    app = await rig.router(
        entry(node), relay=relay_entry(relay), keys=[{"name": "c", "key": "CLIENT-KEY"}], upstream=NO_RETRIES
    )
    reply = await ask(app.port, chat(), headers=(("Authorization", "Bearer CLIENT-KEY"),))
    assert (reply.status, reply.error["code"]) == (503, "relay_misconfigured")
    assert all("CLIENT-KEY" not in str(seen.headers) for seen in relay.seen)


async def test_a_model_that_is_not_the_relays_never_leaves(rig):
    await rig.node(models=["tiny", "secret"], script=Script(status=500))
    relay = await rig.relay(models=["tiny", "secret"])
    app = await rig.router(relay=relay_entry(relay, ("tiny",), api_key="relay-key"), upstream=NO_RETRIES)
    assert (await ask(app.port, chat(model="secret"))).status == 500
    assert relay.accepted == 0
    assert (await ask(app.port, chat(model="tiny"))).status == 200


async def test_a_bound_on_the_first_byte_grows_with_the_prompt(rig):
    node = await rig.node(prefill_rate=4000, script=Script(head_first=False))
    app = await rig.router(upstream={"first_byte_s": 0.4, "first_byte_per_prompt_token_s": 0.001, "retries": 0})
    assert (await ask(app.port, stream("word " * 3000, max_tokens=5))).text == WORDS
    node.script = Script(nohead=30)
    began = monotonic()
    assert (await ask(app.port, stream("short"))).status == 504
    assert monotonic() - began < 1.5
