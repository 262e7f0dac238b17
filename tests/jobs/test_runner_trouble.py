"""What goes wrong around the lines: the store, the leases, lines that kill nodes, floods of lines."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from router.core.job import BatchState
from router.errors import StoreFull, StoreLost
from router.jobs.runner import Terms
from router.jobs.store import JobRow, NewResult, Store
from tests.fakes import FakeNode, Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, eventually


class Trouble(Store):
    """A store that can be taken away, or filled up."""

    lost = full = False

    def _check(self, *, writes: bool = True) -> None:
        if self.lost:
            raise StoreLost("taken away by a test")
        if self.full and writes:
            raise StoreFull("filled up by a test")

    async def ping(self) -> None:
        self._check(writes=False)
        await super().ping()

    async def claim(self, **options: Any) -> list[JobRow]:
        self._check()
        return await super().claim(**options)

    async def line(self, job: JobRow) -> bytes:
        self._check(writes=False)
        return await super().line(job)

    async def extend(self, held: Any, lease_s: float) -> set[tuple[str, int]]:
        self._check(writes=False)
        return await super().extend(held, lease_s)

    async def put_back(self, job: JobRow, **options: Any) -> bool:
        self._check()
        return await super().put_back(job, **options)

    async def finish(self, job: JobRow, result: NewResult) -> bool:
        self._check()
        return await super().finish(job, result)


@pytest.mark.parametrize("trouble", ["lost", "full"])
async def test_without_the_store_nothing_begins_and_nothing_is_done_twice(rig, tmp_path, trouble):
    node = await rig.node(script=Script(ttft=0.05), slots=4)
    app = await rig.router()
    async with room(app, tmp_path, kind=Trouble) as jobs:
        batch = await jobs.submit(line(number) for number in range(30))
        await eventually(lambda: node.completed >= 5, within=5)
        setattr(jobs.store, trouble, True)
        await eventually(lambda: jobs.runner.trouble is not None, within=5)
        await eventually(lambda: not (node.inflight or app.held or app.waiting), within=5)
        before = node.accepted
        await asyncio.sleep(0.3)
        assert node.accepted == before
        assert jobs.reasons.of(await jobs.look(batch)) == jobs.runner.trouble
        assert (await ask(app.port, chat())).status == 200
        setattr(jobs.store, trouble, False)
        recovered = monotonic()
        await eventually(lambda: jobs.runner.trouble is None and node.accepted > before + 1, within=5)
        assert monotonic() - recovered < 5
        results = await jobs.drained(batch)
    assert (results.batch.completed, results.batch.failed) == (30, 0)
    assert node.accepted == 31


async def test_a_line_that_another_router_took_is_ended_at_once(rig, tmp_path):
    node = await rig.node(script=Script(ttft=300), slots=4)
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit([line(1)])
        other = await Store.open(f"sqlite:///{tmp_path}/batch.db", router="other")
        taken = []
        while not taken:  # the first router may be quicker and claim it again
            await eventually(lambda: node.inflight == 1, within=5)
            (held,) = jobs.runner.held.values()
            assert await jobs.store.put_back(held.job, charged=False)
            taken = await other.claim(models=["tiny"], limit=1, lease_s=30)
        await eventually(lambda: len(node.aborted) == node.accepted, within=3)
        assert jobs.runner.ended["lost"] == node.accepted
        assert await other.finish(taken[0], NewResult(status=200, body=b'{"by":"other"}'))
        results = await jobs.drained(batch)
        await other.close()
    assert results.body(1) == {"by": "other"}
    assert node.completed == 0


async def test_a_router_that_slept_sends_nothing_before_it_knows_its_leases(rig, tmp_path):
    node = await rig.node(script=Script(ttft=0.05), slots=2)
    app = await rig.router()
    async with room(app, tmp_path, kind=Trouble, terms=Terms(lease_s=2)) as jobs:
        batch = await jobs.submit(line(number) for number in range(12))
        await eventually(lambda: node.completed >= 2, within=5)
        awake, asleep_s = jobs.runner.clock, 60.0
        jobs.store.lost = True
        jobs.runner.clock = lambda: awake() + asleep_s
        for held in jobs.runner.held.values():
            assert held.safe_until < jobs.runner.clock()
        await eventually(lambda: not (node.inflight or app.held or app.waiting), within=5)
        before = node.accepted
        await asyncio.sleep(0.3)
        assert node.accepted == before
        jobs.store.lost = False
        assert (await jobs.drained(batch)).batch.completed == 12


@asynccontextmanager
async def fragile(node: FakeNode) -> AsyncIterator[list[float]]:
    """A node that dies whenever it reads "poison", with all it runs, and is back a moment later."""
    deaths: list[float] = []
    tasks: set[asyncio.Task[None]] = set()

    async def die() -> None:
        await asyncio.sleep(0.02)
        await eventually(lambda: all(hasattr(wire, "transport") for wire in node._wires))
        await node.down()
        await node.up()

    def judge(seen: Any) -> None:
        if b"poison" in seen.body:
            deaths.append(monotonic())
            tasks.add(asyncio.get_running_loop().create_task(die(), name="fake-death"))

    node.on_request = judge
    yield deaths
    await asyncio.gather(*tasks)


async def test_a_line_that_kills_nodes_fails_alone(rig, tmp_path):
    node = await rig.node(script=Script(ttft=0.15), slots=32)
    app = await rig.router(upstream={"retries": 0})
    async with fragile(node) as deaths, room(app, tmp_path, terms=Terms(retries=5)) as jobs:
        lines = [line(number) for number in range(15)] + [line(99, messages=[{"role": "user", "content": "poison"}])]
        results = await jobs.drained(await jobs.submit(lines), within=30)
    assert results.errors.keys() == {"r99"}
    assert results.batch.completed == 15
    assert len(deaths) == 5
    assert results.errors["r99"]["response"]["status_code"] == 502


async def test_the_window_ends_what_runs(rig, tmp_path):
    node = await rig.node(slots=8)
    node.on_request = lambda seen: Script(ttft=300) if b"line 3" in seen.body else None
    app = await rig.router()
    ahead = 0.0
    async with room(app, tmp_path, clock=lambda: time.time() + ahead) as jobs:
        batch = await jobs.submit((line(number) for number in range(5)), window_s=3600)
        async with asyncio.timeout(10):
            while (now := await jobs.look(batch)).completed < 4:
                assert now.state is not BatchState.EXPIRED
                await asyncio.sleep(0.02)
        await eventually(lambda: node.inflight)
        ahead += 3600
        results = await jobs.drained(batch)
        await eventually(lambda: len(node.aborted) == 1)
    assert results.batch.state is BatchState.EXPIRED
    assert results.errors.keys() == {"r3"}
    assert results.errors["r3"]["error"]["code"] == "batch_expired"
    assert len(results.output) == 4


async def test_many_lines_are_drained_quickly_and_few_are_held(rig, tmp_path):
    await rig.node(slots=64)
    app = await rig.router()
    most = 0
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(line(number) for number in range(1000))
        await jobs.until(batch, BatchState.IN_PROGRESS)
        began = monotonic()
        while (await jobs.look(batch)).state is BatchState.IN_PROGRESS:
            most = max(most, len(jobs.runner.held))
            await asyncio.sleep(0.02)
        took = monotonic() - began
        results = await jobs.drained(batch)
        assert not jobs.runner._ahead.bytes
    assert results.batch.completed == 1000
    assert most < 400
    assert took < 40


async def test_every_caller_id_is_its_own_call(rig, tmp_path):
    node = await rig.node(script=Script(cut=1))
    app = await rig.router(upstream={"retries": 0})
    async with room(app, tmp_path, terms=Terms(retries=3)) as jobs:
        await jobs.drained(await jobs.submit([line(1)]))
    ids = Counter(seen.header("x-request-id") for seen in node.seen)
    assert len(ids) == 3


async def test_a_clock_that_is_set_an_hour_on_and_two_back(rig, tmp_path):
    """Nothing under way is begun again, and nothing that waits for a moment waits for the clock to come there again."""
    node = await rig.node(slots=4)
    node.on_request = lambda seen: Script(ttft=0.05, status=503 if node.accepted in (12, 22) else None)
    app = await rig.router(upstream={"retries": 0})
    ahead = 0.0
    async with room(app, tmp_path, clock=lambda: time.time() + ahead) as jobs:
        batch = await jobs.submit(line(number) for number in range(30))
        for step, after in ((3600.0, 10), (-7200.0, 20)):
            await eventually(lambda after=after: node.accepted >= after, within=5)
            ahead += step
            await jobs.store.beat()
            await jobs.store.prune()
        results = await jobs.drained(batch)
    assert (results.batch.state, results.batch.completed) == (BatchState.COMPLETED, 30)
    assert node.accepted == 32
