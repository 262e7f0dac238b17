"""Spans of calls at a collector, and the trace context that callers send."""

import asyncio
import subprocess
import sys
import time

import pytest

from router.core.call import Outcome
from router.errors import SettingsError
from tests.fakes import FakeNode, Script
from tests.fakes.collector import Collector, attributes
from tests.rig import Baseline, ask, chat, entry, eventually, nothing_leaks, relay_entry, running_app, stream

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
SECRET = "a-very-secret-prompt"
SERVER, CLIENT = 2, 3


def settings(node, collector, **more):
    return {"nodes": [entry(node)], "otel": {"endpoint": collector.url, "headers": {"x-key": "k-1"}}, **more}


async def test_a_call_and_its_leg_by_the_conventions():
    async with FakeNode(script=Script(n=3, ttft=0.05, gap=0.01)) as node, Collector() as collector:
        async with running_app(settings(node, collector)) as app:
            before, began = Baseline(), time.time_ns()
            body = stream(SECRET, max_tokens=7, stream_options={"include_usage": True})
            assert (await ask(app.port, body, headers=SAMPLED)).status == 200
            ended = time.time_ns()
            await nothing_leaks(app, [node], before)
        seen = node.seen[-1]
        assert (seen.header("traceparent"), seen.header("tracestate")) == (SAMPLED[0][1], "vendor=1")
    call, leg = collector.named("chat tiny")
    assert (call.kind, leg.kind) == (SERVER, CLIENT)
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert (leg.trace_id, leg.parent_span_id) == (call.trace_id, call.span_id)
    told = attributes(call)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.request.max_tokens"] == 7
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.usage.input_tokens"] > 0
    assert (told["ebbtide.workload"], told["ebbtide.outcome"]) == ("interactive", "completed")
    assert (told["ebbtide.node"], told["http.response.status_code"]) == (node.name, 200)
    assert 0.05 <= told["ebbtide.first_token_s"] < 5
    (first,) = call.events
    slack = 50_000_000
    assert began - slack < call.start_time_unix_nano <= leg.start_time_unix_nano < first.time_unix_nano
    assert first.time_unix_nano <= leg.end_time_unix_nano <= call.end_time_unix_nano < ended + slack
    at = attributes(leg)
    assert f"http://{at['server.address']}:{at['server.port']}" == node.url
    assert at["gen_ai.provider.name"] == node.dialect
    assert not any(SECRET.encode() in raw for raw in collector.raw)
    assert all("x-key: k-1" in head.lower() for head in collector.heads)
    assert collector.heads[0].startswith("POST /v1/traces ")


async def test_every_leg_has_its_span_and_a_failed_one_says_so():
    async with (
        FakeNode(name="bad", script=Script(status=500)) as bad,
        FakeNode(name="relay-service", dialect="openai") as relay,
        Collector() as collector,
    ):
        whole = settings(bad, collector, relay=relay_entry(relay, api_key="k"), upstream={"retries": 0})
        async with running_app(whole) as app:
            before = Baseline()
            assert (await ask(app.port, chat())).status == 200
            await nothing_leaks(app, [bad, relay], before)
    call, *legs = collector.named("chat tiny")
    by_place = {attributes(leg)["ebbtide.node"]: leg for leg in legs}
    assert set(by_place) == {"bad", "relay"}
    assert by_place["bad"].status.code == 2
    assert attributes(by_place["bad"])["error.type"] == "BadStatus"
    assert by_place["relay"].status.code == call.status.code == 0
    assert attributes(call)["ebbtide.legs"] == 2
    assert attributes(by_place["relay"])["server.port"] == int(relay.url.rpartition(":")[2])


async def test_a_caller_that_leaves_is_told_as_such():
    async with FakeNode(script=Script(ttft=300)) as node, Collector() as collector:
        whole = settings(node, collector)
        async with running_app(whole) as app:
            before = Baseline()
            task = asyncio.create_task(ask(app.port, stream()))
            await eventually(lambda: node.inflight)
            task.cancel()
            await asyncio.wait([task])
            await nothing_leaks(app, [node], before)
    call, leg = collector.named("chat tiny")
    assert attributes(call)["ebbtide.outcome"] == Outcome.CLIENT_LEFT
    assert (call.status.code, leg.status.code) == (0, 0)


@pytest.mark.parametrize(
    ("sample", "headers", "traced"), [(0, (), False), (0, SAMPLED, True), (1, UNSAMPLED, False), (1, (), True)]
)
async def test_what_is_traced(sample, headers, traced):
    async with FakeNode() as node, Collector() as collector:
        async with running_app(
            settings(node, collector) | {"otel": {"endpoint": collector.url, "sample": sample}}
        ) as app:
            await ask(app.port, chat(), headers=headers)
            spans = app.inside.spans
            assert not spans._legs, "nothing is kept of calls that ended"
        assert bool(collector.spans) is traced


async def test_a_collector_that_is_away_holds_up_nothing():
    async with FakeNode() as node:
        async with Collector(status=503) as collector:
            url = collector.url
        whole = settings(node, collector=type("Gone", (), {"url": url}))
        began = time.monotonic()
        async with running_app(whole) as app:
            assert (await ask(app.port, chat())).status == 200
        assert time.monotonic() - began < 12


async def test_without_the_setting_nothing_is_made():
    async with FakeNode() as node, running_app({"nodes": [entry(node)]}) as app:
        await ask(app.port, chat(), headers=SAMPLED)
        assert app.inside.spans is None


def test_the_router_does_not_import_the_sdk_unasked():
    code = "import router.app, sys; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_without_the_extra_the_setting_is_refused(monkeypatch):
    from router.dispatch.spans import Spans

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"otel.endpoint: needs the extra: pip install 'ebbtide\[otel\]'"):
        Spans.open("http://127.0.0.1:1", {}, 1.0, time.monotonic)
