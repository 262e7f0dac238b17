"""A batch outlives its routers: killed at any point, frozen, its node lost. At the end every line is answered once.

No line that has an answer is asked again: a kill may cost what was under way at that moment, and nothing else.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from tests.acceptance.batches import Tally, content, counted_exactly, ended, lines, look, submit
from tests.fakes import FakeNode, Script
from tests.rig import RouterProcess, ask, chat, entry, eventually, running_process
from tests.rig.stem import Stem, stem
from tests.store.conftest import database, server, socket_of

__all__ = ["server"]

LINES, KILLS, SLOTS = 200, 20, 4
UNDER_WAY = 2 * SLOTS + 4
"""Lines a kill may cost: those on the nodes, and those whose answers were on their way into the store."""
PACE = Script(ttft=0.12, gap=0.02)
START_S = 5.0
"""How long a router process may take to be ready, on a busy machine."""
SEED = 20_261_129


def settings(nodes: list[FakeNode], store: str, **more: Any) -> dict[str, Any]:
    """Batch nodes that hold `SLOTS` calls each, chat allowed beside them."""
    return {
        "store": {"url": store},
        "nodes": [entry(node, max_sequences=SLOTS + 2) for node in nodes],
        **more,
    }


@pytest.fixture(scope="module")
def tree() -> Iterator[Stem | None]:
    """What the routers of this file are forked from."""
    with stem() as made:
        yield made


@pytest.fixture
async def nodes() -> AsyncIterator[list[FakeNode]]:
    """Two nodes that outlive the routers."""
    async with AsyncExitStack() as stack:
        made = [FakeNode(name=name, slots=SLOTS + 2, script=PACE) for name in ("a", "b")]
        yield [await stack.enter_async_context(node) for node in made]


@pytest.fixture
async def postgres(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """An empty PostgreSQL database, to be migrated by the routers themselves."""
    async with database(socket_of(request.getfixturevalue("server")), "template1") as url:
        yield url


async def kill(router: RouterProcess) -> None:
    router.process.kill()
    await router.process.wait()


@pytest.mark.check("C81")
@pytest.mark.check("C83")
@pytest.mark.timeout(240)
async def test_killed_at_twenty_points_then_a_node_is_lost(nodes, tmp_path, tree):
    """C81, C83, B72."""
    moments, tally = random.Random(SEED), Tally(nodes)
    how = settings(nodes, f"sqlite:///{tmp_path}/ebbtide.db")
    batch_id, progress = "", 0
    for life in range(KILLS):
        async with running_process(how, tmp_path, stem=tree) as router:
            if not life:
                batch_id = await submit(router.port, lines(LINES))
            batch = await look(router.port, batch_id)
            assert batch["request_counts"]["completed"] >= progress
            progress = batch["request_counts"]["completed"]
            assert batch["request_counts"]["failed"] == 0
            await asyncio.sleep(moments.uniform(0.0, 0.5))
            await kill(router)
    assert 0 < progress < LINES
    assert tally.repeats <= KILLS * UNDER_WAY
    began = monotonic()
    async with running_process(how, tmp_path, stem=tree) as router:
        before = tally.completed
        await eventually(lambda: tally.completed > before, within=10)
        assert monotonic() - began < 5 + START_S
        await nodes[0].down()
        assert (await ask(router.port, chat())).status == 200
        await counted_exactly(router.port, batch_id, LINES, within=40)
    assert tally.asked().keys() >= {f"r{number}" for number in range(LINES)}


async def test_with_every_node_lost_the_batch_waits_and_goes_on(nodes, tmp_path, tree):
    """B76: polls stay quick, nothing fails, and it ends once nodes are back."""
    async with running_process(settings(nodes, f"sqlite:///{tmp_path}/ebbtide.db"), tmp_path, stem=tree) as router:
        for node in nodes:
            await node.down()
        batch_id = await submit(router.port, lines(20))
        await asyncio.sleep(3)
        polls = []
        for _ in range(20):
            began = monotonic()
            batch = await look(router.port, batch_id)
            polls.append(monotonic() - began)
        assert (batch["status"], batch["request_counts"]["failed"]) == ("in_progress", 0)
        assert sorted(polls)[len(polls) // 2] < 0.05
        for node in nodes:
            await node.up()
        await counted_exactly(router.port, batch_id, 20, within=10)


@pytest.mark.check("C81")
async def test_cancelled_without_an_owner(nodes, tmp_path, tree):
    """B72: a cancel that comes while no router works on the batch, and C77."""
    how = settings(nodes, f"sqlite:///{tmp_path}/ebbtide.db")
    async with running_process(how, tmp_path, stem=tree) as router:
        batch_id = await submit(router.port, lines(60))
        await _progress(router, batch_id, 5)
        await kill(router)
    async with running_process(how, tmp_path, stem=tree) as router:
        cancelled = await ask(router.port, path=f"/v1/batches/{batch_id}/cancel")
        assert cancelled.json["status"] in ("cancelling", "cancelled")
        batch = await ended(router.port, batch_id, within=10)
        output = await content(router.port, batch["output_file_id"])
        errors = await content(router.port, batch["error_file_id"])
    assert batch["status"] == "cancelled"
    assert len(output) == batch["request_counts"]["completed"] >= 5
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert sorted(line["custom_id"] for line in output + errors) == sorted(f"r{number}" for number in range(60))


async def test_two_routers_of_which_one_freezes(nodes, tmp_path, tree, postgres):
    """B73: who wakes up after its lines were taken over does no line again, and ends what it was doing."""
    tally = Tally(nodes)
    for node in nodes:
        node.script = PACE.but(ttft=0.5)
    how = settings(nodes, postgres, batches={"lease_s": 3})
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running_process(how, homes[0], stem=tree))
        two = await stack.enter_async_context(running_process(how, homes[1], stem=tree))
        batch_id = await submit(one.port, lines(LINES))
        await _progress(two, batch_id, 10)
        os.kill(one.process.pid, signal.SIGSTOP)
        try:
            frozen = tally.inflight
            await _progress(two, batch_id, 30)
            await asyncio.sleep(4)
            await _progress(two, batch_id, 5)
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        await counted_exactly(two.port, batch_id, LINES, within=45)
        assert (await look(one.port, batch_id))["status"] == "completed"
    assert tally.repeats <= frozen + UNDER_WAY


async def test_two_routers_of_which_one_is_killed(nodes, tmp_path, tree, postgres):
    """The other takes its lines over within 30 s, though nobody restarts it."""
    tally = Tally(nodes)
    how = settings(nodes, postgres)
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running_process(how, homes[0], stem=tree))
        two = await stack.enter_async_context(running_process(how, homes[1], stem=tree))
        batch_id = await submit(one.port, lines(60))
        await _progress(two, batch_id, 10)
        under_way = tally.inflight
        await kill(one)
        await counted_exactly(two.port, batch_id, 60, within=45)
    assert tally.repeats <= under_way + UNDER_WAY


async def _progress(router: RouterProcess, batch_id: str, more: int) -> None:
    """Waits until so many more lines have their answer, or all have.

    A router that freezes inside a transaction holds up what others write for ten seconds; the lines go on meanwhile.
    """
    done = (await look(router.port, batch_id))["request_counts"]["completed"]
    deadline = monotonic() + 30
    while True:
        counts = (await look(router.port, batch_id))["request_counts"]
        if counts["completed"] >= done + more or 0 < counts["total"] == counts["completed"]:
            return
        assert monotonic() < deadline, counts
        await asyncio.sleep(0.05)
