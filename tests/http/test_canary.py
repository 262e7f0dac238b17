"""Canaries over real sockets: the same token of idle nodes and of the relay, within its cap; hooks that are calls."""

import asyncio
import json

import pytest

from router.errors import SettingsError
from router.fleet.canary import KEPT, OLD_S, Band
from tests.fakes import Script
from tests.http.test_dashboard import listening
from tests.rig import ask, chat, entry, eventually, relay_entry, running_app
from tests.rig.recycling import act

QUICK = {"enabled": True, "every_s": 0.2, "relay_every_s": 0.2}


def priced(relay, usd):
    prices = {"usd_a_day": usd, "input_usd": {"tiny": 1.0}, "output_usd": {"tiny": 1e6}}
    return relay_entry(relay, api_key=relay.requires_key, spend=prices)


def sampling(app):
    told = []
    app.inside.caring.canary.sampled = lambda name, seconds: told.append((name, seconds))
    return told


async def test_idle_nodes_and_the_relay_are_asked_for_the_same_token(rig):
    one, relay = await rig.node(script=Script(ttft=0.1)), await rig.relay(script=Script(ttft=0.2))
    app = await rig.router(relay=relay, care={"canary": QUICK})
    told = sampling(app)
    await eventually(lambda: {name for name, _ in told} == {"n1", "relay"}, within=5)
    assert all(0.1 <= seconds < 5 for _, seconds in told)
    asked = [json.loads(body) for body in (one.bodies[0], relay.bodies[0])]
    assert asked[0] == asked[1]
    assert asked[0]["max_tokens"] == 1
    assert app.node("n1").pace.unloaded_s is None, "a canary teaches nothing of chat"


async def test_a_loaded_node_gets_none(rig):
    one, relay = await rig.node(script=Script(ttft=1.5)), await rig.relay()
    app = await rig.router(relay=relay, care={"canary": {**QUICK, "enabled": False}})
    call = asyncio.create_task(ask(app.port, chat()))
    await eventually(lambda: one.inflight)
    for _ in range(3):
        await app.inside.caring.canary.look(app.node("n1"))
    assert one.accepted == 1
    assert (await call).status == 200
    assert (one.accepted, relay.accepted) == (1, 0), "nor does anybody while they are off"


async def test_the_relays_cap_holds_for_canaries(rig):
    await rig.node()
    relay = await rig.relay()
    app = await rig.router(relay=priced(relay, 2.5), care={"canary": QUICK})
    told = sampling(app)
    await eventually(lambda: sum(name == "n1" for name, _ in told) >= 5, within=8)
    assert relay.accepted == 2
    assert (await app.metrics())['ebbtide_relay_spend_day_usd{by="people"}'] == pytest.approx(2, abs=0.1)


async def test_canaries_need_a_relay(rig):
    node = await rig.node()
    with pytest.raises(SettingsError, match="compare nodes with a relay"):
        async with running_app({"nodes": [entry(node)], "care": {"canary": {"enabled": True}}}):
            pass


# the relay's band


async def told_of_relay(feed, wanted):
    """What the dashboard tells of the relay, once it is wanted."""
    async with asyncio.timeout(8):
        told = (await feed.next("snapshot"))["state"]["relay"]
        while not wanted(told):
            told = (await feed.next("change")).get("set", {}).get("relay", told)
    return told


async def test_the_dashboard_shows_the_relays_band_once_canaries_ran(rig):
    await rig.node()
    relay = await rig.relay(script=Script(ttft=0.2))
    app = await rig.router(relay=relay, care={"canary": {**QUICK, "every_s": 60}})
    async with listening(app.port) as feed:
        told = await told_of_relay(feed, lambda told: told["canary"] is not None)
    assert 0.2 <= told["canary"]["ttft_s"] < 2
    assert 0 <= told["canary"]["spread_s"] < 0.5
    assert relay.accepted >= 3
    app.inside.caring.canary.enabled = False
    async with listening(app.port) as feed:
        assert (await told_of_relay(feed, lambda told: True))["canary"] is None, "nobody asks any more"


async def test_another_relay_begins_a_new_band(rig):
    node, first, second = await rig.node(), await rig.relay(), await rig.relay()
    canary = {"canary": {**QUICK, "enabled": False}}
    app = await rig.router(node, relay=first, care=canary)
    inside = app.inside
    for _ in range(3):
        inside.caring.canary.sampled("relay", 0.2)
    await inside.watch.step()
    assert "ttft_s" in inside.watch.signals("relay").latest
    assert inside.caring.band.shown() == (0.2, 0.0)
    to = {"nodes": [entry(node)], "relay": relay_entry(second, api_key=second.requires_key), "care": canary}
    await app.reload(to)
    assert inside.caring.band.shown() is None
    await inside.watch.step()
    assert "ttft_s" not in inside.watch.signals("relay").latest, "what the other one took says nothing of this one"


def test_the_band_is_of_late():
    now = [0.0]
    band = Band(lambda: now[0])
    for seconds in (9.0, 9.0):
        band.add(seconds)
    assert band.shown() is None
    for seconds in (0.2, 0.3, 0.4) * 8:
        band.add(seconds)
    assert band.shown() == (pytest.approx(0.3), pytest.approx(0.148, abs=0.001)), f"the last {KEPT} alone"
    now[0] = OLD_S + 1
    assert band.shown() is None
    band.add(0.2)
    band.clear()
    assert band.shown() is None


# hooks that are calls


async def hooked(rig, status):
    """A router whose hook is an HTTP call, and what was asked there."""
    await rig.node(), await rig.node()
    heard = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(row.split(b":")[1]) for row in head.split(b"\r\n") if row.lower().startswith(b"content-length")
        )
        heard.append((head, json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    http = {"url": f"http://127.0.0.1:{port}/restart/{{node}}", "secret": "s3cret", "method": "PUT"}
    app = await rig.router(care={"recycle": {"http": http, "settle_s": 0.05, "ready_s": 3}})
    await act(app, "n1", "recycle")
    records = app.inside.caring.recycling.records
    await eventually(lambda: "n1" in records, within=5)
    server.close()
    await server.wait_closed()
    return app, heard, records["n1"].outcome


async def test_a_hook_that_is_a_call_says_which_node_and_proves_who_asks(rig):
    _, [(head, body)], outcome = await hooked(rig, 204)
    assert head.startswith(b"PUT /restart/n1 HTTP/1.1")
    assert b"Bearer s3cret" in head
    assert body["node"] == "n1"
    assert outcome == "done"


async def test_a_hook_that_answers_an_error_has_failed(rig):
    app, _, outcome = await hooked(rig, 503)
    assert outcome == "the hook answered 503"
    assert "s3cret" not in json.dumps((await ask(app.port, path="/admin/nodes", method="GET")).json)
