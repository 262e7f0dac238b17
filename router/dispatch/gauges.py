"""What a scrape shows of the corridor: who waits how long, what holds the room, how fast answers are written.

Rules: a scrape reads plain objects and changes nothing; what is unknown is left out, never zero; a node that is gone
takes its series along.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from router.core.budget import Phase, kept_back
from router.core.call import Workload
from router.core.node import Node
from router.dispatch.admission import Admission
from router.dispatch.ledger import Ledger
from router.dispatch.trip import RELAY
from router.metrics import Family, Level

PHASES = [(workload, phase) for workload in Workload for phase in Phase]


class Gauges:
    """Ask `families` at a scrape. `clock` is the admission's."""

    def __init__(self, nodes: Sequence[Node], admission: Admission, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._nodes, self._admission, self._ledger, self._clock = nodes, admission, ledger, clock

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        yield self._gaps()
        yield self._oldest()
        yield self._objective()
        yield from self._held()
        yield self._sequences()

    def _gaps(self) -> Family:
        gaps = self._ledger.gaps
        here = {RELAY, *(node.name for node in self._nodes)}
        for gone in {labels[1] for labels in gaps.values} - here:
            gaps.forget("node", gone)
        return gaps

    def _oldest(self) -> Family:
        oldest = Level("queue_oldest_seconds", "Longest wait of a call that waits for room, 0 without one.", "workload")
        now = self._clock()
        for workload in Workload:
            oldest.set(0.0, (workload,))
        for waiter in self._admission.waiters():
            key = (waiter.call.workload,)
            oldest.set(max(oldest.values[key], now - waiter.asked_at), key)
        return oldest

    def _objective(self) -> Family:
        text = "First token a chat on the node should have: as stated, or learnt; left out until it is known."
        objective = Level("ttft_objective_seconds", text, "node")
        for node in self._nodes:
            seconds = node.pace.objective_s(self._admission.policy.ttft_p95_s)
            if seconds is not None and Workload.INTERACTIVE in node.spec.pools:
                objective.set(seconds, (node.name,))
        return objective

    def _held(self) -> tuple[Family, Family]:
        labels = ("node", "workload", "phase")
        calls = Level("node_phase_calls", "Calls of ours on the node that read their prompt, or write.", *labels)
        tokens = Level("node_phase_tokens", "KV tokens those calls hold.", *labels)
        for node in self._nodes:
            held: Counter[tuple[str, str]] = Counter()
            count: Counter[tuple[str, str]] = Counter()
            for permit in node.budget:
                key = (permit.workload, permit.phase)
                held[key] += permit.room.tokens
                count[key] += 1
            for key in PHASES:
                calls.set(count[key], (node.name, *key))
                tokens.set(held[key], (node.name, *key))
        return calls, tokens

    def _sequences(self) -> Family:
        text = "Sequences the node has room for (capacity), keeps from batch (reserve), and runs for others (foreign)."
        room = Level("node_room_sequences", text, "node", "kind")
        for node in self._nodes:
            budget = node.budget
            room.set(budget.foreign.sequences, (node.name, "foreign"))
            if budget.sequences is not None:
                room.set(budget.sequences, (node.name, "capacity"))
                room.set(max(0, kept_back(budget.sequences, budget.reserve)), (node.name, "reserve"))
        return room
