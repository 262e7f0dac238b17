"""A running router keeps what calls and looks tell of a node, and shows it."""

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
