"""Lets lines of late batches out to the relay, within its spend cap and a few at once.

Rules:
- A line waits for a node like any other. Only while its batch is late, and no node takes it, it goes out.
- A line goes out for a caller that may use the relay and a model that may leave, and for no other.
- The store is asked every few seconds who is late; between two looks only what this process knows is used.
"""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import structlog

from router.core.call import Call, Reason
from router.core.lateness import LateTerms, Standing, late
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.queue import Waiter
from router.dispatch.spending import Spending
from router.jobs.runner import Runner
from router.jobs.store import JobRow, Store

TURN_S = 0.1
"""How often those that wait are let out while a batch is late."""

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class Outlet:
    """`run` it until cancelled. `models` may leave the house, `kept_in` are callers that may not; most `calls` at once.

    `every_s` lies between two looks at which batches are late; `late` are those, by id.
    """

    store: Store
    runner: Runner
    dispatcher: Dispatcher
    spending: Spending
    terms: LateTerms
    models: Collection[str]
    kept_in: Collection[str] = ()
    calls: int = 8
    every_s: float = 2.0
    late: dict[str, Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._told: set[str | None] = set()
        self.runner.relays, self.runner.also = self.relays, self.wanted

    async def run(self) -> None:
        """Look and let out for ever. Raises StoreError."""
        try:
            while True:
                await self.look()
                for _ in range(max(1, int(self.every_s / TURN_S))):
                    if self.late:
                        self.let_out()
                    await asyncio.sleep(TURN_S)
        finally:
            self.late = {}

    async def look(self) -> None:
        """Learn which batches are late. Raises StoreError."""
        found = {batch.batch_id: batch for batch in late(await self.store.standings(), self.terms)}
        for batch_id in found.keys() - self.late.keys():
            log.info("a batch is late, its lines may go to the relay", batch=batch_id, left=found[batch_id].left)
        self.late = found

    def wanted(self) -> set[str]:
        """Models that lines of late batches ask for and that no node need serve."""
        asked = {batch.model for batch in self.late.values()}
        return {model for model in self.models if model in asked or None in asked}

    def relays(self, job: JobRow, call: Call) -> bool:
        """Whether a line may go to the relay from the start: no node knows its model, so it could not even wait."""
        if job.batch_id not in self.late or self.runner.fleet.serving(call.model):
            return False
        return self._out() < self.calls and self._may(job, call)

    def let_out(self) -> None:
        """Let lines that wait for a node go to the relay, as many as may."""
        free = self.calls - self._out()
        let = [waiter for waiter, job in self._waiting() if self._may(job, waiter.call)][: max(0, free)]
        for waiter in let:
            waiter.situation.relay, waiter.situation.patience = True, 0.0
        if let:
            self.dispatcher.admission.changed()

    def _waiting(self) -> Iterator[tuple[Waiter, JobRow]]:
        """Lines of late batches that wait in the corridor and are not let out yet."""
        jobs = {held.call_id: held.job for held in self.runner.held.values() if held.job.batch_id in self.late}
        for waiter in self.dispatcher.admission.waiters():
            job = jobs.get(waiter.call.id)
            if job is not None and not waiter.situation.relay:
                yield waiter, job

    def _may(self, job: JobRow, call: Call) -> bool:
        if call.model not in self.models or job.caller in self.kept_in:
            return False
        if not self.spending.capped(call):
            return True
        if call.id not in self._told:
            self._told = {held.call_id for held in self.runner.held.values()} & self._told | {call.id}
            self.spending.affords(call)
        return False

    def _out(self) -> int:
        """Lines that are at the relay, or on their way there."""
        return sum(
            trip.call.reason is Reason.JOB and trip.situation.relay and trip.node is None
            for trip in self.dispatcher.trips
        )
