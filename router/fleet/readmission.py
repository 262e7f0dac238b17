"""Ends the probation of nodes nobody calls: a token of our own, so that no caller has to be the one who tries.

Rules: a call that comes first decides; else the node is asked once, after `GRACE_S`. No answer sends it back to its
wait, which doubles, so a node that stays dead is asked less and less. A node that cannot be asked waits for a call.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from router.core.node import Node, Sign, State
from router.errors import ProbeFailed
from router.fleet.canary import Taster

__all__ = ["Readmission"]

GRACE_S = 2.0
"""A call may decide for so long."""
LOOK_S = 0.5
TASTE_S = 20.0
"""Longest wait for the token."""

log = logging.getLogger("ebbtide.care")


class Readmission:
    """`changed` lets waiting calls ask. `run` it as a task."""

    def __init__(
        self,
        nodes: Sequence[Node],
        taster: Taster,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._taster = nodes, taster
        self._changed, self._clock = changed, clock
        self._asked: set[Node] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for node in list(self._nodes):
                    if self._due(node):
                        self._asked.add(node)
                        group.create_task(self._ask(node), name=f"readmit {node.name}")
                await asyncio.sleep(LOOK_S)

    def _due(self, node: Node) -> bool:
        waits = node.state is State.PROBATION and self._clock() >= node.since + GRACE_S
        return waits and node not in self._asked and bool(node.models()) and not node.budget.holds(node.trial)

    async def _ask(self, node: Node) -> None:
        since = node.since
        try:
            await self._taster.taste(node, TASTE_S)
        except ProbeFailed as error:
            if node.state is State.PROBATION and node.since == since:
                sign = Sign.SILENT if error.status is None else Sign.FAULT
                node.observe(sign, self._clock(), f"asked for one token: {error}")
                log.info("node %s stays out: %s", node.name, error)
        else:
            if node.state is State.PROBATION:
                node.observe(Sign.GOOD, self._clock(), "answered one token")
        finally:
            self._asked.discard(node)
            self._changed()
