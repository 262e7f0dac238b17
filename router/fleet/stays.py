"""How nodes have moved from state to state, and how long they stayed, as a scrape shows it.

Rules: it is read from the nodes themselves, so a node that is gone has no series; the stay that goes on is counted up
to the scrape; words are those of closed lists (states and events).
"""

from collections.abc import Callable, Iterable, Iterator

from router.core.node import Node
from router.metrics import Family


class Stays:
    """What `nodes` did. `clock` is theirs."""

    def __init__(self, nodes: Iterable[Node], clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._clock = clock

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        moves = Family(
            "node_transitions",
            "Changes of a node's state. `cause` is a word of the table in docs/nodes.md.",
            "node",
            "from",
            "to",
            "cause",
        )
        stays = Family("node_state_seconds", "Time a node spent in a state, the present one too.", "node", "state")
        now = self._clock()
        for node in self._nodes:
            for (before, event, after), count in node.moves.items():
                moves.add((node.name, before, after, event.name.lower()), count)
            for state, seconds in node.stays(now).items():
                stays.add((node.name, state), seconds)
        yield from (moves, stays)
