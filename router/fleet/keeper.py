"""Looks at what is held of each node and acts on it: less chat for who is slower, a recycle for who leaks.

Rules: what is unknown changes nothing; a cause is told when it begins and when what speaks against acting changes, not
at every look; with `care.recycle.enabled` off all is told and nothing is recycled.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from router.core.care import SLOWER, UNTOLD, Finding, wanted
from router.core.node import Node, State
from router.fleet.fleet import Fleet
from router.fleet.recycle import Recycling
from router.metrics import Family, Level

__all__ = ["Keeper"]

EVERY_S = 5.0
"""Time between two looks at the findings."""

log = logging.getLogger("ebbtide.care")


def _nothing(_: Node) -> Finding | None:
    """Nothing is held of any node."""
    return None


class Keeper:
    """`find` tells what is held of a node, None while nothing is; it may be replaced."""

    def __init__(
        self,
        fleet: Fleet,
        recycling: Recycling,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.find: Callable[[Node], Finding | None] = _nothing
        self.recycling = recycling
        self._fleet = fleet
        self._clock, self._sleep = clock, sleep
        self.due: dict[str, str] = {}
        """Why a node should be recycled, by name."""
        self._said: dict[str, str | None] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await self._sleep(EVERY_S)

    def look(self) -> None:
        """Act on what is held now."""
        for node in list(self._fleet.nodes):
            finding = self.find(node)
            if finding is None:
                self._clear(node.name)
            else:
                self._place(node, finding)
                self._consider(node, finding)
        for name in self.due.keys() - self._fleet.by_name.keys():
            self._clear(name)

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        due = Level("node_recycle_due", "1 while the node should be recycled, whether it may be or not.", "node")
        for node in self._fleet.nodes:
            due.set(node.name in self.due, (node.name,))
        yield due

    def _place(self, node: Node, finding: Finding) -> None:
        if finding.verdict in UNTOLD:
            return
        slower = finding.verdict in SLOWER
        before = node.state
        node.diagnosed(self._clock(), f"diagnosis: {finding.verdict}", slower=slower)
        if node.state is not before:
            log.log(logging.WARNING if slower else logging.INFO, "node %s is %s: %s", node.name, node.state, node.cause)

    def _consider(self, node: Node, finding: Finding) -> None:
        cause = wanted(finding, self.recycling.care)
        if cause is None or node.state is State.DOWN:
            self._clear(node.name)
            return
        fresh = node.name not in self.due
        self.due[node.name] = cause
        why_not = self.recycling.offer(node, cause)
        if why_not is not None and (fresh or self._said.get(node.name) != _kind(why_not)):
            log.warning("node %s should be recycled, %s, and is not: %s", node.name, cause, why_not)
            self.recycling.told(node.name, f"should be recycled, {cause}, and is not: {why_not}")
        self._said[node.name] = None if why_not is None else _kind(why_not)

    def _clear(self, name: str) -> None:
        self.due.pop(name, None)
        self._said.pop(name, None)


def _kind(words: str) -> str:
    """The words without their numbers, which change at every look."""
    return "".join(char for char in words if not char.isdigit())
