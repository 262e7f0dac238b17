"""A running router keeps what calls and looks tell of a node, and shows it."""

import json

from tests.fakes import FakeNode, Script
from tests.fleet.looking import raw_server
from tests.fleet.test_watch import AGENT, told
from tests.rig import ask, entry, eventually, running_app, stream


async def test_calls_looks_and_the_agent_reach_the_signals_of_a_node():
    async with (
        FakeNode(name="a", script=Script(n=12)) as node,
        raw_server(told(AGENT)) as agent,
        running_app({"nodes": [entry(node, agent=agent)]}) as app,
    ):
        watch = app.inside.watch
        await eventually(lambda: watch.signals("a"))
        answer = await ask(app.port, stream())
        assert answer.status == 200
        record = watch._records["a"]
        await eventually(lambda: record.calls and record.counters.preemptions is not None, within=5)
        heard = record.calls[-1]
        assert heard.first_token_s > 0
        assert heard.gap_s is not None
        assert not heard.failed
        await watch.step()
        latest = watch.signals("a").latest
        assert latest["rss_bytes"] == 5e9
        assert {"ttft_s", "gap_s", "running", "preemptions"} <= set(latest)
        shown = await app.metrics()
        assert shown['ebbtide_node_agent_up{node="a"}'] == 1
        assert shown['ebbtide_node_diagnosis{node="a",verdict="unknown"}'] == 1
        assert app.held == app.waiting == 0


async def test_a_node_of_a_list_may_have_an_agent_too(rig, tmp_path):
    one, listed = await rig.node(), tmp_path / "nodes.json"
    async with raw_server(told(AGENT)) as agent:
        listed.write_text(json.dumps([entry(one, agent=agent)]))
        app = await rig.router(nodes=[], discovery={"file": str(listed)})
        await app.inside.watch.step()
        assert app.inside.watch.signals("n1").latest["rss_bytes"] == 5e9
        assert (await app.metrics())['ebbtide_node_agent_up{node="n1"}'] == 1
