"""What a scrape shows of batches and their store.

Rules: a scrape reads plain objects and never asks the database; that is asked every few seconds, and what it said last
is shown. What is kept in the store is the same whichever router is asked, what is counted is this router's own.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from router.jobs.store import Event, JobRow, StoreUsage
from router.jobs.store.measures import Measures
from router.metrics import OTHER, Family, Level

EVERY_S = 15.0
"""How often the store is asked."""
SEVERAL = "several"
"""In place of a model: lines of batches that ask for more than one."""


class Keeps(Protocol):
    """The store, as far as it is shown."""

    @property
    def measures(self) -> Measures: ...
    async def usage(self) -> StoreUsage: ...


class HeldLine(Protocol):
    """A line under lease; with a task once it has begun."""

    @property
    def job(self) -> JobRow: ...
    @property
    def task(self) -> object: ...


class Runs(Protocol):
    """The runner, as far as it is shown."""

    @property
    def ended(self) -> Mapping[str, int]: ...
    @property
    def taken(self) -> int: ...
    @property
    def held(self) -> Mapping[tuple[str, int], HeldLine]: ...
    @property
    def trouble(self) -> str | None: ...


class Gauges:
    """`run` it until cancelled, ask `families` at a scrape. `knows` tells which models may be shown by name."""

    def __init__(self, store: Keeps, runner: Runs, knows: Callable[[str], bool], *, every_s: float = EVERY_S) -> None:
        self._store, self._runner, self._knows, self._every_s = store, runner, knows, every_s
        self._over = Family("batches_ended", "Batches that became final.", "status")
        self.usage: StoreUsage | None = None

    async def run(self) -> None:
        """Ask the store for ever. Raises StoreError."""
        while True:
            self.usage = await self._store.usage()
            await asyncio.sleep(self._every_s)

    def ended(self, event: Event) -> None:
        """A batch became final."""
        self._over.add((event.state,))

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        yield from self._run()
        yield self._over
        yield from self._kept(self.usage)
        yield from self._store.measures.families()

    def _run(self) -> Iterator[Family]:
        runner = self._runner
        taken = Family("batch_lines_taken", "Lines this router took from the store to run them.")
        taken.add(amount=runner.taken)
        tries = Family("batch_tries", "Tries of lines that ended at this router.", "outcome")
        for outcome, count in runner.ended.items():
            tries.add((outcome,), count)
        held = Level("batch_lines_held", "Lines this router has taken and that have not ended.", "state")
        begun = sum(one.task is not None for one in runner.held.values())
        held.set(begun, ("begun",))
        held.set(len(runner.held) - begun, ("ready",))
        trouble = Level("batch_trouble", "1 while nothing begins because the store is lost or full.")
        trouble.set(runner.trouble is not None)
        yield from (taken, tries, held, trouble)

    def _kept(self, usage: StoreUsage | None) -> Iterator[Family]:
        batches = Level("batches", "Batches in the store that are not final.", "status")
        lines = Level("batch_lines", "Lines in the store that have no end yet.", "state")
        models = Level("batch_lines_left", "The same lines of batches in progress, by the model they ask for.", "model")
        oldest = Level("batch_oldest_seconds", "Age of the oldest batch in progress, 0 without one.")
        files = Level("store_files", "Files of callers in the store.")
        size = Level("store_file_bytes", "Bytes of those files.")
        disk = Level("store_disk_bytes", "Bytes the database takes on disk, SQLite's log included.")
        if usage is None:
            for level in (oldest, files, size, disk):
                level.values.clear()
        else:
            for status, count in usage.states.items():
                batches.set(count, (status,))
            lines.set(usage.queued, ("queued",))
            lines.set(usage.running, ("running",))
            for model, left in usage.models.items():
                shown = SEVERAL if model is None else model if self._knows(model) else OTHER
                models.set(models.values.get((shown,), 0) + left, (shown,))
            oldest.set(usage.oldest_s)
            files.set(usage.files)
            size.set(usage.file_bytes)
            disk.set(usage.disk_bytes)
        yield from (batches, lines, models, oldest, files, size, disk)
