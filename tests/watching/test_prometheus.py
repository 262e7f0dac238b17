"""A real Prometheus scrapes a router under load, and everything we ship for it is asked of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import msgspec
import pytest

from router.fleet.watch import RELAY, Record
from tests.fakes import FakeNode, Script
from tests.fakes.days import DECAY, replace, samples
from tests.fakes.seen import Seen
from tests.jobs.desk import CHAT, jsonl, line
from tests.rig import App, ask, chat, entry, eventually, relay_entry, running_app, stream
from tests.watching.expressions import PROMETHEUS, PROMTOOL, alerts, drawn, prometheus, promtool, rules, selectors

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus and promtool are not installed (Debian: prometheus)"
)
LONG = "word " * 2000
BATCH = (("X-Ebbtide-Workload", "batch"),)
USAGE = {"include_usage": True}
QUIET = {"ebbtide_store_errors_total", "ebbtide_webhook_attempts_total"}
"""What tells of what this load does not make: a store that fails, webhooks."""
WITHIN_S = 20.0


async def test_promtool_finds_nothing_wrong():
    for told in (("check", "rules", "rules.yml", "alerts.yml"), ("check", "config", "prometheus.yml")):
        status, said = await promtool(*told)
        assert status == 0, said
    status, said = await promtool("test", "rules", "tests/alerts.yml")
    assert status == 0, said


async def test_every_expression_returns_data_under_load(tmp_path):
    async with house(tmp_path) as app, prometheus(app.port, tmp_path) as asked, load(app):
        status, said = await promtool("check", "metrics", told=await scrape(app))
        assert (status, said) == (0, "")
        wanted = {expr: where for expr, where in drawn().items() if quiet(expr) is None}
        wanted |= {rule["expr"]: rule["record"] for rule in rules("rules.yml")}
        for alert in alerts():
            wanted |= {one: alert["alert"] for one in selectors(alert["expr"]) if quiet(one) is None}
        for expr in {**drawn(), **{alert["expr"]: "" for alert in alerts()}}:
            await asked.ask(expr)
        ends_at = monotonic() + WITHIN_S
        while wanted := {expr: where for expr, where in wanted.items() if not await asked.ask(expr)}:
            assert monotonic() < ends_at, wanted
            await asyncio.sleep(0.3)
        evaluated = await asked.rules()
        assert {rule["name"] for rule in evaluated} == {rule["record"] for rule in rules("rules.yml")} | {
            alert["alert"] for alert in alerts()
        }
        assert [rule["name"] for rule in evaluated if rule["health"] != "ok"] == []


def quiet(expr: str) -> str | None:
    return next((name for name in QUIET if name in expr), None)


async def scrape(app: App) -> bytes:
    return (await ask(app.port, path="/metrics", method="GET")).body


@asynccontextmanager
async def house(home) -> AsyncIterator[App]:
    """Three nodes, one of them from a file, one that leaks and cannot be restarted, a relay with a cap, batches."""
    prices = {"input_usd": {"tiny": 0, "away": 0}, "output_usd": {"tiny": 1e6, "away": 1e6}, "usd_a_day": 200}
    async with (
        FakeNode(name="n1", slots=4) as first,
        FakeNode(name="n2", slots=4) as second,
        FakeNode(name="n3") as leaking,
        FakeNode(name="relay-service", dialect="openai", models=("tiny", "away")) as relay,
    ):
        for node in (first, second):
            node.on_request = pace
        listed = home / "nodes.yaml"
        listed.write_text(json.dumps([entry(second)]))
        settings = {
            "nodes": [entry(first), entry(leaking)],
            "care": {"canary": {"enabled": True, "relay_every_s": 5}, "recycle": {"command": ["/bin/false"]}},
            "relay": relay_entry(relay, ("tiny", "away"), api_key="relay-key", spend=prices),
            "store": {"url": f"sqlite:///{home}/e.db"},
            "discovery": {"file": str(listed)},
            "pools": {"interactive": {"ttft_p95_ms": 400}, "batch": {"reserve": 0.25}},
        }
        async with running_app(settings) as app:
            remember(app, leaking.name)
            await app.inside.caring.recycling.recycle(leaking.name)
            yield app


def remember(app: App, name: str) -> None:
    """A node and the relay were watched for a day and a half, and the node leaks."""
    watch, day = app.inside.watch, replace(DECAY, seed=1, hours=38.0)
    now = app.inside.clock()
    node, relay = Record(3600.0), Record(3600.0)
    for seen, beside in samples(day):
        at = now - day.hours * 3600 + seen.at
        node.signals.add(msgspec.structs.replace(seen, at=at))
        if beside is not None:
            relay.signals.add(msgspec.structs.replace(beside, at=at))
    for at in (now - 3600, now):
        node.course.judge(node.signals, at, relay.signals, 68e9)
    node.diagnosed_at = now
    watch._records |= {name: node, RELAY: relay}


def pace(seen: Seen) -> Script:
    """Long prompts take long, what is to break breaks, and the rest is quick."""
    if b"break" in seen.body:
        return Script(n=4, cut=2)
    return Script(ttft=0.4, n=3) if len(seen.body) > 5000 else Script(ttft=0.01, gap=0.005, n=4)


@asynccontextmanager
async def load(app: App) -> AsyncIterator[None]:
    """Chat, batch calls of people, lines of a batch and calls that only the relay answers, until the block ends."""
    for lines in (1, 2000):
        told = {"input_file_id": await uploaded(app, lines), "endpoint": CHAT, "completion_window": "24h"}
        assert (await ask(app.port, told, "/v1/batches")).status == 200
    batching = app.inside.batching
    await eventually(lambda: len(batching.runner.held) > 3, within=10)
    batching._gauges.usage = await batching.store.usage()
    calls = [
        asyncio.create_task(again(app, stream("hi", stream_options=USAGE), pause_s=0.15)),
        asyncio.create_task(again(app, stream("break", stream_options=USAGE), pause_s=0.3)),
        asyncio.create_task(again(app, chat("hi", model="away", max_tokens=50), pause_s=0.2)),
        *(asyncio.create_task(again(app, stream(LONG, stream_options=USAGE), BATCH)) for _ in range(4)),
    ]
    try:
        yield
    finally:
        for task in calls:
            task.cancel()
        await asyncio.wait(calls)


async def uploaded(app: App, lines: int) -> str:
    store = app.inside.batching.store
    async with store.writing(caller="", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
        await writer.write(jsonl(line(number) for number in range(lines)))
    return writer.row.id


async def again(app: App, body, headers=(), *, pause_s: float = 0.0) -> None:
    """Ask for ever."""
    while True:
        await ask(app.port, body, headers=headers)
        await asyncio.sleep(pause_s)
