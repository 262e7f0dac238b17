"""Keeps lines whose window is about to close from being taken back.

Rule: the store is asked every few seconds which batches are late; a line of one that is held here is then urgent, and
no longer once its batch is not.
"""

import asyncio
from dataclasses import dataclass

from router.core.lateness import LateTerms, late
from router.jobs.runner import Runner
from router.jobs.store import Store

LATE = LateTerms(last_share=0.15, within_s=60.0)
"""A batch is late in this last part of its window when the pace is too slow, and in its last minute whatever it is."""
EVERY_S = 5.0


@dataclass(kw_only=True, eq=False)
class Hurry:
    """`run` it until cancelled."""

    store: Store
    runner: Runner
    terms: LateTerms = LATE

    async def run(self) -> None:
        """Look for ever. Raises StoreError."""
        while True:
            if self.runner.held:
                await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Mark the lines that are held here. Raises StoreError."""
        urgent = {batch.batch_id for batch in late(await self.store.standings(), self.terms)}
        for held in self.runner.held.values():
            held.past.urgent = held.job.batch_id in urgent
