"""Why a batch waits, in words for whoever looks at it.

A batch waits while none of its lines runs here. What this router knows best is told first: trouble of the store, then
what its calls wait for, then why its lines were put back, then that others go first.
"""

from dataclasses import dataclass

from router.core.call import Reason
from router.core.job import BatchState
from router.core.placement import WaitReason
from router.dispatch.admission import Admission
from router.fleet.fleet import Fleet
from router.jobs.runner import Runner
from router.jobs.store import BatchRow

__all__ = ["Reasons"]

_WAITS = {
    WaitReason.NO_ROOM: "The nodes are full.",
    WaitReason.CHAT_WAITS: "Interactive calls wait for room and go first.",
    WaitReason.CHAT_PREFILL: "An interactive call has just come to the node.",
    WaitReason.CHAT_DECODE: "Interactive calls are being answered on the node.",
    WaitReason.CHAT_EXPECTED: "The pauses between interactive calls are too short for its prompt.",
    WaitReason.BATCH_PREFILL: "Another long prompt is being read on the node.",
    WaitReason.PACKING: "Interactive calls fill the nodes they are placed on.",
    WaitReason.KEPT_ELSEWHERE: "The node that has read a part of its prompt is busy.",
    WaitReason.ENGINE_QUEUE: "The engines have calls waiting.",
    WaitReason.NODES_DOWN: "No node that serves the model is up.",
    WaitReason.NODES_BUSY: "The nodes refuse calls for the moment.",
}


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """`all()` for every batch with lines held here; `of(batch)` for one that somebody looks at."""

    runner: Runner
    fleet: Fleet
    admission: Admission

    def all(self) -> dict[str, str]:
        """Batches that wait although lines of theirs are held here, and why."""
        runner = self.runner
        if runner.trouble is not None:
            return {held.job.batch_id: runner.trouble for held in runner.held.values()}
        waiting = {
            waiter.call.id: _WAITS[waiter.reason]
            for waiter in self.admission.waiters()
            if waiter.call.reason is Reason.JOB
        }
        told: dict[str, str] = dict(runner.setbacks)
        running: set[str] = set()
        for held in runner.held.values():
            batch = held.job.batch_id
            if held.call_id is None:
                continue
            if held.call_id in waiting:
                told[batch] = waiting[held.call_id]
            else:
                running.add(batch)
        return {batch: reason for batch, reason in told.items() if batch not in running}

    def of(self, batch: BatchRow, running: int = 0) -> str | None:
        """Why a batch waits, None if it runs or is over. `running` is how many of its lines run at any router."""
        if batch.state is BatchState.VALIDATING:
            return self.runner.trouble or "Its lines are being checked."
        if batch.state is not BatchState.IN_PROGRESS:
            return None
        told = self.all().get(batch.id)
        if told is not None:
            return told
        if running:
            return None
        if self.runner.trouble is not None:
            return self.runner.trouble
        if batch.model is not None and not self.fleet.serving(batch.model):
            return f"No node serves the model '{batch.model}' now."
        return batch.waiting or "Lines of other batches go first."
