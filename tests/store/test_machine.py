"""Anything in any order: two routers that claim, answer, put back, die; callers that cancel; windows that close.

Held at every end: each line is in the files once, with exactly the answer whose keeping was confirmed.
"""

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from sqlalchemy import make_url

from router.core.job import BATCH_FINAL, BatchState
from router.errors import Conflict
from router.jobs.store import BatchRow, JobRow, NewResult, Store, Tokens
from router.jobs.store.migrate import migrate
from tests.store.bench import Bench

T = TypeVar("T")
NAMES = ("left", "right")
LINES = 6


class Routers(RuleBasedStateMachine):
    """Two routers at one file."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ebbtide-machine-"))
        shutil.copy(pattern(), self.folder / "ebbtide.db")
        self.runner = asyncio.Runner()
        self.bench = Bench(f"sqlite:///{self.folder}/ebbtide.db")
        self.confirmed: dict[tuple[str, int], bytes] = {}
        self.batches: list[BatchRow] = []
        self.lives = 0

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(what)

    @initialize()
    def begin(self) -> None:
        async def begin() -> None:
            await self.bench.__aenter__()
            self.routers = {name: await self.bench.router(name) for name in NAMES}
            for caller, window in (("ann", 3600), ("bob", 7200)):
                self.batches.append(await self.bench.running(LINES, caller, completion_window="x", window_s=window))

        self.do(begin())

    @rule(target=held, name=st.sampled_from(NAMES), limit=st.integers(1, 5))
    def claim(self, name: str, limit: int) -> Any:
        store = self.routers[name]
        jobs = self.do(self.bench.claim(limit, store, lease_s=60.0))
        assert not {job.key for job in jobs} & set(self.confirmed)
        return multiple(*[(store, job) for job in jobs])

    @rule(hold=held, status=st.sampled_from([200, 400, None]))
    def finish(self, hold: tuple[Store, JobRow], status: int | None) -> None:
        store, job = hold
        body = json.dumps([job.line, job.epoch, store.router]).encode()
        if status is None:
            result = NewResult(error_code="server_error", error_message=body.decode())
        else:
            result = NewResult(status=status, body=body, tokens=Tokens(input=1))
        if store in self.routers.values() and self.do(store.finish(job, result)):
            assert self.confirmed.setdefault(job.key, body) == body

    @rule(hold=held, charged=st.booleans(), wait=st.sampled_from([0, 30]))
    def put_back(self, hold: tuple[Store, JobRow], charged: bool, wait: int) -> None:
        store, job = hold
        if store in self.routers.values():
            self.do(store.put_back(job, not_before=self.bench.clock.now + wait, charged=charged))

    @rule(hold=held)
    def extend(self, hold: tuple[Store, JobRow]) -> None:
        store, job = hold
        if store in self.routers.values():
            lost = self.do(store.extend([job], 60.0))
            assert job.key in lost or job.key not in self.confirmed

    @rule(seconds=st.sampled_from([1, 25, 61, 1800, -500]))
    def tick(self, seconds: int) -> None:
        self.bench.clock.tick(seconds)

    @rule(name=st.sampled_from(NAMES), steps=st.integers(1, 3))
    def upkeep(self, name: str, steps: int) -> None:
        async def upkeep() -> None:
            await self.routers[name].beat()
            await self.routers[name].prune()
            await self.routers[name].sweep(steps=steps)

        self.do(upkeep())

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        async def kill() -> None:
            await self.bench.crash(self.routers[name])
            self.routers[name] = await self.bench.router(name)

        self.do(kill())

    @rule(index=st.integers(0, 1))
    def cancel(self, index: int) -> None:
        async def cancel() -> None:
            batch = self.batches[index]
            try:
                await self.bench.store.cancel_batch(batch.caller, batch.id)
            except Conflict:
                assert (await self.bench.again(batch)).state in BATCH_FINAL

        self.do(cancel())

    @invariant()
    def counts_are_what_was_confirmed(self) -> None:
        for batch in self.batches:
            row = self.do(self.bench.again(batch))
            assert row.completed + row.failed == sum(key[0] == batch.id for key in self.confirmed)

    def teardown(self) -> None:
        try:
            if self.batches:
                self.do(self.end())
        finally:
            self.do(self.bench.__aexit__())
            self.runner.close()
            shutil.rmtree(self.folder)

    async def end(self) -> None:
        self.bench.clock.tick(7200 + 500 * 50)
        await self.bench.settle()
        for batch in self.batches:
            row = await self.bench.again(batch)
            assert row.state in (BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED)
            await self.bench.holds(batch, LINES)
            output, error = await self.bench.results(batch)
            for line in output + error:
                key = (batch.id, int(line["custom_id"][1:]))
                told = line["response"]["body"] if line["response"] else line["error"]["message"]
                if key in self.confirmed:
                    assert told == json.loads(self.confirmed[key]) or told == self.confirmed[key].decode()
                else:
                    assert line["error"]["code"] in ("batch_expired", "batch_cancelled")
        assert await self.bench.run("SELECT line FROM jobs") == []


_pattern: list[Path] = []


def pattern() -> Path:
    """A migrated file to copy."""
    if not _pattern:
        folder = tempfile.mkdtemp(prefix="ebbtide-machine-")
        atexit.register(shutil.rmtree, folder)
        _pattern.append(Path(folder) / "ebbtide.db")
        migrate(make_url(f"sqlite:///{_pattern[0]}"), 10.0)
    return _pattern[0]


TestRouters = Routers.TestCase
TestRouters.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
