"""What is known here of all batches, for the dashboard.

Rules: the database is asked at most every two seconds while somebody looks and every half minute while nobody does
(the last hour's queue is shown to whoever comes); each time for a bounded number of rows; what it said last is kept.
Take-backs are counted by batch from the start of this router.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from router.core.call import Call
from router.dispatch.history import History
from router.jobs.runner import Runner
from router.jobs.store import Lines, Overview, Store

WATCHED_S, UNWATCHED_S = 2.0, 30.0
"""Between two looks while somebody looks at them, and while nobody does."""
MOST_COUNTED = 2048
"""Batches whose take-backs are counted."""
DRAWN = 8
"""Batches whose lines left are kept for the chart, those that are served first; the rest are kept together."""
REST = "rest"


class Lookout:
    """`run` it until cancelled. `watched` says whether somebody looks."""

    def __init__(self, store: Store, runner: Runner, history: History) -> None:
        self._store, self._runner, self._history = store, runner, history
        self.overview = Overview()
        self.taken: Counter[str] = Counter()
        self.watched: Callable[[], bool] = bool
        self._wake = asyncio.Event()

    @property
    def trouble(self) -> str | None:
        """Why no line begins, if none does."""
        return self._runner.trouble

    def wake(self) -> None:
        """Somebody began to look: what is known may be old."""
        self._wake.set()

    def taken_back(self, call: Call) -> str | None:
        """Room of this call was taken back. The batch it is a line of, if it is one."""
        held = next((held for held in self._runner.held.values() if held.call_id == call.id), None)
        if held is None:
            return None
        if held.job.batch_id not in self.taken and len(self.taken) >= MOST_COUNTED:
            del self.taken[next(iter(self.taken))]
        self.taken[held.job.batch_id] += 1
        return f"line {held.job.line} of {held.job.batch_id}"

    async def lines(self, batch_id: str) -> Lines | None:
        """The lines of one batch, by state."""
        return await self._store.standing_of(batch_id)

    async def cancel(self, batch_id: str) -> bool:
        """Stop a batch, whoever has it. False if there is none. Raises Conflict when it has ended."""
        caller = await self._store.caller_of(batch_id)
        if caller is None:
            return False
        await self._store.cancel_batch(caller, batch_id)
        return True

    async def run(self) -> None:
        """Ask the store for ever. Raises StoreError."""
        while True:
            self._wake.clear()
            await self.look()
            await asyncio.sleep(WATCHED_S)
            if not self.watched():
                with suppress(TimeoutError):
                    async with asyncio.timeout(UNWATCHED_S - WATCHED_S):
                        await self._wake.wait()

    async def look(self) -> None:
        """Ask the store once."""
        self.overview = await self._store.overview()
        left: dict[str, int] = {}
        for batch in self.overview.batches:
            if batch.left:
                name = batch.id if len(left) < DRAWN else REST
                left[name] = left.get(name, 0) + batch.left
        self._history.left(left)
