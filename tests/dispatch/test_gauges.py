"""What a scrape shows of the corridor: waits, objectives, phases, and the time between two tokens."""

import asyncio

from router.core.budget import Phase
from router.core.call import Workload
from tests.fakes import Script
from tests.rig import ask, chat, eventually, stream

BATCH = (("X-Ebbtide-Workload", "batch"),)


def label(name, **labels):
    told = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{told}}}"


async def test_the_gap_between_tokens_by_workload_and_node(rig):
    node = await rig.node(script=Script(n=5, gap=0.03))
    app = await rig.router()
    for headers in ((), BATCH):
        assert (await ask(app.port, stream(stream_options={"include_usage": True}), headers=headers)).status == 200
    await ask(app.port, chat())
    await eventually(lambda: not app.held)
    found = await app.metrics()
    for workload in Workload:
        where = {"node": node.name, "workload": workload}
        total = [value for name, value in found.items() if name.startswith("ebbtide_token_gap_seconds_sum")
                 and f'workload="{workload}"' in name and f'node="{node.name}"' in name]  # fmt: skip
        assert len(total) == 1, where
        assert 0.025 < total[0] < 0.2
    assert sum(value for name, value in found.items() if "token_gap_seconds_count" in name) == 2, "one whole answer"
    assert sum(value for name, value in found.items() if "first_token_seconds_count" in name) == 2


async def test_who_waits_longest_and_what_holds_the_room(rig):
    node = await rig.node(script=Script(ttft=300), slots=1)
    app = await rig.router({"name": "n1", "url": node.url, "max_sequences": 1})
    tasks = [asyncio.create_task(ask(app.port, stream())) for _ in range(2)]
    await eventually(lambda: app.waiting == 1 and app.held == 1)

    async def oldest():
        found = await app.metrics()
        return found[label("ebbtide_queue_oldest_seconds", workload="interactive")]

    (waiter,) = app.inside.admission.waiters()
    await eventually(lambda: app.inside.clock() > waiter.asked_at + 0.05)
    assert 0.05 <= await oldest() < 5
    found = await app.metrics()
    assert found[label("ebbtide_queue_oldest_seconds", workload="batch")] == 0
    one = {"node": "n1", "workload": "interactive"}
    assert found[label("ebbtide_node_phase_calls", **one, phase=Phase.PREFILL)] == 1
    assert found[label("ebbtide_node_phase_tokens", **one, phase=Phase.PREFILL)] > 0
    assert found[label("ebbtide_node_phase_calls", **one, phase=Phase.DECODE)] == 0
    assert found[label("ebbtide_node_room_sequences", node="n1", kind="capacity")] == 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await eventually(lambda: not app.waiting and not app.held)
    assert await oldest() == 0


async def test_the_objective_is_as_stated_or_learnt(rig):
    node = await rig.node()
    app = await rig.router(pools={"interactive": {"ttft_p95_ms": 400}, "batch": {"reserve": 0.25}})
    name = label("ebbtide_ttft_objective_seconds", node=node.name)
    found = await app.metrics()
    assert found[name] == 0.4
    capacity, reserve, foreign = (
        found[label("ebbtide_node_room_tokens", node=node.name, kind=kind)]
        for kind in ("capacity", "reserve", "foreign")
    )
    assert (reserve, foreign) == (capacity / 4, 0)


async def test_an_objective_that_nobody_knows_is_left_out(rig):
    node = await rig.node()
    app = await rig.router()
    name = label("ebbtide_ttft_objective_seconds", node=node.name)
    assert name not in await app.metrics()
    for _ in range(4):
        await ask(app.port, stream())
    assert 0 < (await app.metrics())[name] < 5


async def test_a_node_that_is_gone_takes_its_gaps_along(rig):
    nodes = [await rig.node(script=Script(n=4, gap=0.001)) for _ in range(2)]
    app = await rig.router()
    gaps = app.inside.dispatcher._ledger.gaps
    for node in nodes:
        gaps.see(0.01, ("interactive", node.name))
    assert {"n1", "n2"} <= {labels[1] for labels in gaps.values}
    await app.reload({"nodes": [{"name": "n1", "url": nodes[0].url, "engine": "vllm"}]})
    assert 'node="n2"' not in "".join(name for name in await app.metrics() if "token_gap" in name)
