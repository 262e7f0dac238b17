"""The batch room on a bench: a real store, a real router around it, fake nodes behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.core.job import BATCH_FINAL, BatchState
from router.jobs.calls import Calls
from router.jobs.checks import Rules
from router.jobs.intake import Intake
from router.jobs.reasons import Reasons
from router.jobs.runner import Runner, Terms
from router.jobs.store import BatchRow, NewBatch, Store, Topic
from router.jobs.upkeep import Upkeep, always
from tests.rig import App

CALLER = "nightly"
CHAT = "/v1/chat/completions"


def line(number: int, *, url: str = CHAT, model: str = "tiny", **body: Any) -> dict[str, Any]:
    """One line of an input file; chat unless the body says otherwise."""
    said = {"messages": [{"role": "user", "content": f"line {number}"}], "max_tokens": 3} if url == CHAT else {}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": model, **said, **body}}


def jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@dataclass
class Results:
    """What a batch left behind, by custom_id."""

    batch: BatchRow
    output: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def body(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = self.output[f"r{number}"]["response"]["body"]
        return body

    @property
    def ids(self) -> set[str]:
        return self.output.keys() | self.errors.keys()


@dataclass
class Room:
    """A store and the loops that work at it."""

    store: Store
    runner: Runner
    reasons: Reasons

    async def submit(
        self, lines: Iterable[Mapping[str, Any]], *, endpoint: str = CHAT, window_s: int = 86400
    ) -> BatchRow:
        """Upload a file and make a batch of it."""
        async with self.store.writing(caller=CALLER, purpose="batch", filename="in.jsonl", expires_s=None) as writer:
            await writer.write(jsonl(lines))
        assert writer.row is not None
        new = NewBatch(
            caller=CALLER,
            endpoint=endpoint,
            input_file_id=writer.row.id,
            completion_window=f"{window_s}s",
            window_s=window_s,
        )
        return await self.store.create_batch(new)

    async def look(self, batch: BatchRow) -> BatchRow:
        row = await self.store.batch(CALLER, batch.id)
        assert row is not None
        return row

    async def until(self, batch: BatchRow, *states: BatchState, within: float = 10.0) -> BatchRow:
        """The batch once it is in one of these states (any final one, if none is named)."""
        wanted = states or BATCH_FINAL
        async with asyncio.timeout(within):
            while (row := await self.look(batch)).state not in wanted:
                await self.store.wakes.wait(Topic.ENDED, self.store.wakes.count(Topic.ENDED), timeout_s=0.02)
        return row

    async def drained(self, batch: BatchRow, *, within: float = 10.0) -> Results:
        """What is in its files once it is final."""
        await self.until(batch, within=within)
        return await self.results(batch)

    async def results(self, batch: BatchRow) -> Results:
        """The files of a batch that is final. No line may be in them twice."""
        row = await self.look(batch)
        assert row.state in BATCH_FINAL
        found = Results(row)
        for file_id, lines in ((row.output_file_id, found.output), (row.error_file_id, found.errors)):
            if file_id is None:
                continue
            file = await self.store.file(CALLER, file_id)
            assert file is not None
            content = b"".join([piece async for piece in self.store.content(file)])
            for raw in content.splitlines():
                one = json.loads(raw)
                assert one["custom_id"] not in found.ids
                lines[one["custom_id"]] = one
        return found


@asynccontextmanager
async def room(
    app: App,
    home: Path,
    *,
    terms: Terms | None = None,
    router: str = "one",
    kind: type[Store] = Store,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[Room]:
    """The batch room of a running router, with its store in `home`; stopping it puts back what runs.

    Lines are tried again after 0.05 to 0.1 s. `clock` is the wall clock of the store.
    """
    inside = app.inside
    store = await kind.open(f"sqlite:///{home}/batch.db", router=router, clock=clock)
    reader = ThreadPoolExecutor(1)
    calls = Calls(inside.fleet, inside.tokens, inside.estimates, reader, long_prompt_tokens=8192)
    runner = Runner(
        store=store,
        dispatcher=inside.dispatcher,
        fleet=inside.fleet,
        calls=calls,
        terms=terms or Terms(retries=3),
        delay=lambda attempt, unit: 0.05 + 0.05 * unit,
    )
    reasons = Reasons(runner=runner, fleet=inside.fleet, admission=inside.admission)
    upkeep = Upkeep(store=store, reasons=reasons.all, every_s=0.25)
    intake = Intake(store=store, rules=Rules(models=lambda name: True), reader=reader)
    try:
        async with background(always(runner.run), upkeep.run(), intake.run()):
            yield Room(store, runner, reasons)
    finally:
        await store.close()
        reader.shutdown()


@asynccontextmanager
async def background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs for the length of the block. What ends by itself is a failure."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        early = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not early, [task.exception() for task in early]
