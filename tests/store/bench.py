"""A bench for the store: a clock one can turn, routers by name, batches in one call, result files read back."""

import json
from collections import Counter
from typing import Any, Self

from sqlalchemy import text

from router.core.job import BATCH_FINAL, BatchState
from router.jobs.store import BatchRow, Event, JobRow, NewBatch, NewJob, NewResult, Pace, Store, Tokens

CHAT = "/v1/chat/completions"


class Clock:
    """Unix seconds that pass when told."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Bench:
    """One database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.stores: list[Store] = []

    async def __aenter__(self) -> Self:
        self.store = await self.router("first")
        return self

    async def __aexit__(self, *_: object) -> None:
        for store in self.stores:
            await store.close()

    async def router(self, name: str, **options: Any) -> Store:
        """One more router at this database."""
        store = await Store.open(self.url, router=name, **{"clock": self.clock, **options})
        self.stores.append(store)
        return store

    async def crash(self, store: Store) -> None:
        """Its process is gone: nothing is given back, its locks and connections end."""
        self.stores.remove(store)
        await store._db.close()

    async def file(self, data: bytes = b"", caller: str = "ann", **options: Any) -> Any:
        """A file with these bytes."""
        told = {"purpose": "batch", "filename": "in.jsonl", "expires_s": None, **options}
        async with self.store.writing(caller=caller, **told) as writer:
            await writer.write(data)
        return writer.row

    async def validating(self, lines: int = 3, caller: str = "ann", **options: Any) -> BatchRow:
        """A batch whose input is there and nobody has read."""
        data = b"".join(line_bytes(number) for number in range(1, lines + 1))
        file = await self.file(data, caller)
        told = {"completion_window": "24h", "window_s": 86400, **options}
        return await self.store.create_batch(NewBatch(caller=caller, endpoint=CHAT, input_file_id=file.id, **told))

    async def running(self, lines: int = 3, caller: str = "ann", model: str = "m", **options: Any) -> BatchRow:
        """A batch in progress."""
        made = await self.validating(lines, caller, **options)
        return await self.begin(self.store, lines, model) or made

    async def begin(self, store: Store, lines: int, model: str = "m") -> BatchRow | None:
        """Validate the next batch, which has so many lines."""
        batch = await store.claim_validation(30)
        assert batch is not None
        assert await store.add_jobs(batch, new_jobs(lines, model))
        return await store.begin(batch, model=model)

    async def claim(self, limit: int = 100, store: Store | None = None, **options: Any) -> list[JobRow]:
        """Claim lines of model `m`."""
        return await (store or self.store).claim(**{"models": ["m"], "limit": limit, "lease_s": 30.0, **options})

    async def pace(self, batch: BatchRow, store: Store | None = None) -> Pace:
        """How a batch gets on, as one of the routers sees it."""
        watched = await (store or self.store).watched(batch.caller, batch.id)
        assert watched is not None
        return watched[1]

    async def finish_all(self, store: Store | None = None) -> int:
        """Answer every line that can be claimed."""
        count = 0
        while jobs := await self.claim(store=store):
            for job in jobs:
                assert await (store or self.store).finish(job, answer(job))
            count += len(jobs)
        return count

    async def settle(self, store: Store | None = None) -> list[Event]:
        """Sweep until nothing is left to do."""
        events: list[Event] = []
        for _ in range(200):
            swept = await (store or self.store).sweep()
            events += swept.events
            if not swept.more:
                return events
        raise AssertionError("the sweep does not come to an end")

    async def again(self, batch: BatchRow) -> BatchRow:
        """The batch as it is now."""
        row = await self.store.batch(batch.caller, batch.id)
        assert row is not None
        return row

    async def text(self, file_id: str | None, caller: str = "ann") -> bytes:
        """The bytes of a file."""
        if file_id is None:
            return b""
        file = await self.store.file(caller, file_id)
        assert file is not None
        data = b"".join([piece async for piece in self.store.content(file)])
        assert len(data) == file.bytes
        return data

    async def results(self, batch: BatchRow) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of the output and of the error file."""
        batch = await self.again(batch)
        output, error = [
            [json.loads(line) for line in (await self.text(file, batch.caller)).splitlines()]
            for file in (batch.output_file_id, batch.error_file_id)
        ]
        return output, error

    async def holds(self, batch: BatchRow, lines: int) -> Counter[str]:
        """The promise at every final state: each line once, in one of the files. How the lines ended."""
        batch = await self.again(batch)
        assert batch.state in BATCH_FINAL
        output, error = await self.results(batch)
        if batch.state is BatchState.FAILED:
            assert output == error == []
            return Counter()
        assert sorted(line["custom_id"] for line in output + error) == sorted(f"c{n}" for n in range(1, lines + 1))
        assert len({line["id"] for line in output + error}) == lines
        ends = Counter(end_of(line) for line in output + error)
        assert all(end_of(line) == "done" for line in output)
        assert ends["done"] == batch.completed
        assert ends["failed"] == batch.failed
        return ends

    async def run(self, sql: str, **values: Any) -> list[Any]:
        """Any SQL, past every rule of the store."""
        async with self.store._db.write() as tx:
            done = await tx.connection.execute(text(sql), values)
            return list(done.all()) if done.returns_rows else []


def end_of(line: dict[str, Any]) -> str:
    """done, failed, batch_expired, batch_cancelled."""
    if line["response"] is not None:
        assert line["error"] is None
        return "done" if line["response"]["status_code"] < 300 else "failed"
    code = str(line["error"]["code"])
    return code if code.startswith("batch_") else "failed"


def line_bytes(number: int) -> bytes:
    """Line `number` of the bench's input files: 32 bytes with its newline."""
    return b'{"custom_id":"c%d"}' % number + b" " * (31 - len(b'{"custom_id":"c%d"}' % number)) + b"\n"


def new_jobs(lines: int, model: str = "m", first: int = 1) -> list[NewJob]:
    """The jobs of such a file."""
    return [
        NewJob(line=n, custom_id=f"c{n}", offset=(n - 1) * 32, length=31, model=model, size=n % 7)
        for n in range(first, lines + 1)
    ]


def answer(job: JobRow, status: int = 200) -> NewResult:
    """What a node says."""
    body = b'{"line":%d}' % job.line
    return NewResult(status=status, request_id=f"r{job.line}", body=body, tokens=Tokens(input=2, output=1))
