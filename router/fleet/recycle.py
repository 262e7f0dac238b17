"""Taking nodes out and letting them in again: drain, resume, recycle.

Rules:
- A drained node gets no new calls; batch is taken back from it, the rest ends as it would have.
- Recycling is: drain, up to a bound; the hook, up to a bound; then wait until it really answers one token; then
  probation, one call and then few at once. Whatever goes wrong leaves the node down, where looks and calls bring it
  back if it comes, and is told in the log, in a metric and to who asks for the node.
- Only a drained node is recycled, so nothing is cut before the bound is up.
- A hook may let another node take its place: what is no longer in the fleet is done with.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator

from router.core.care import Care, Record, hindrance, reluctance, taken_out
from router.core.node import Node, State
from router.errors import Conflict, NotFound, ProbeFailed, RecycleFailed
from router.fleet.canary import Taster
from router.fleet.fleet import Fleet
from router.fleet.hooks import Hook
from router.metrics import Family, Level

__all__ = ["DONE", "Recycling"]

LOOK_S = 0.25
"""How often a node that drains, or is waited for, is looked at."""
TASTE_S = 30.0
"""Longest wait for one token of a node that comes back."""
TASTE_EVERY_S = 1.0
DONE = "done"
"""How a recycle ends that worked; any other word is what failed."""

log = logging.getLogger("ebbtide.care")

Sleep = Callable[[float], Awaitable[object]]


def _no_relay() -> Collection[str]:
    return ()


def _untold(name: str, text: str) -> None:
    """Nobody wants to know."""


def _unheld(name: str) -> None:
    """Nobody holds anything of a node."""


class Recycling:
    """Drain, resume and recycle, by name. `run` it as a task: what was begun goes on there.

    `empty` takes batch back from a node, `changed` lets waiting calls ask, `relayed` are models a relay answers for,
    `told` hears of every step, `anew` of a node that began anew, so that what was known of it holds no more. `care` and
    `hook` may be replaced.
    """

    def __init__(
        self,
        fleet: Fleet,
        taster: Taster,
        empty: Callable[[Node], None],
        changed: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.care = Care()
        self.hook: Hook | None = None
        self.hook_s = 120.0
        self.relayed: Callable[[], Collection[str]] = _no_relay
        self.told: Callable[[str, str], None] = _untold
        self.anew: Callable[[str], None] = _unheld
        self.records: dict[str, Record] = {}
        self._fleet, self._taster = fleet, taster
        self._empty, self._changed = empty, changed
        self._clock, self._sleep = clock, sleep
        self._begun: asyncio.Queue[tuple[Node, str]] = asyncio.Queue()
        self._under_way: set[Node] = set()
        self._recycles = Family("node_recycles", "Recycles of nodes that ended, by how.", "node", "outcome")

    async def drain(self, name: str) -> None:
        """Send no new calls there. Raises NotFound or Conflict."""
        node = self._node(name)
        if node.state is State.RECYCLING:
            raise Conflict(f"The node {name} is being recycled.", code="node_is_recycled")
        self._drain(node, "drained by the operator")

    async def resume(self, name: str) -> None:
        """Send calls there again. One that is about to be recycled is not. Raises NotFound or Conflict."""
        node = self._node(name)
        if node.state is not State.DRAINING:
            raise Conflict(f"The node {name} is not drained: it is {node.state}.", code="node_not_drained")
        self._under_way.discard(node)
        node.resume(self._clock(), "resumed by the operator")
        self._tell(node, "resumed by the operator")
        self._changed()

    async def recycle(self, name: str, *, force: bool = False) -> None:
        """Drain the node and have it restarted. Raises NotFound, or Conflict where callers would suffer unless forced.

        Returns when it has begun.
        """
        node = self._node(name)
        if self.hook is None:
            raise Conflict("There is no hook to restart a node with: set care.recycle.", code="no_recycle_hook")
        if node in self._under_way:
            raise Conflict(f"The node {name} is being recycled already.", code="node_is_recycled")
        why_not = None if force else hindrance(node, self._fleet.nodes, self.relayed(), self.care)
        if why_not is not None:
            raise Conflict(f"The node {name} is not recycled now: {why_not}.", code="recycle_refused")
        self._begin(node, "recycled by the operator")

    def offer(self, node: Node, cause: str) -> str | None:
        """Recycle the node by the router's own decision, if nothing speaks against it; what does, in words."""
        if node in self._under_way or taken_out(node):
            return None
        record = self.records.get(node.name, Record())
        if self.hook is None or not self.care.enabled:
            return "a dry run: care.recycle.enabled is false"
        why_not = reluctance(record, self.care, self._clock())
        why_not = why_not or hindrance(node, self._fleet.nodes, self.relayed(), self.care)
        if why_not is None:
            self._begin(node, cause)
        return why_not

    async def run(self) -> None:
        """Carry through what is begun, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                node, cause = await self._begun.get()
                group.create_task(self._carry_through(node, cause), name=f"recycle {node.name}")

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        yield self._recycles
        under_way = Level("node_recycling", "1 while the node is drained and restarted.", "node")
        for node in self._fleet.nodes:
            under_way.set(node in self._under_way, (node.name,))
        yield under_way

    def forget(self, name: str) -> None:
        """The node is gone, and its series with it."""
        self._recycles.forget("node", name)
        self.records.pop(name, None)

    def _node(self, name: str) -> Node:
        node = self._fleet.by_name.get(name)
        if node is None:
            raise NotFound(f"There is no node {name!r}.", param="name", code="node_not_found")
        return node

    def _begin(self, node: Node, cause: str) -> None:
        self._under_way.add(node)
        self._drain(node, cause)
        self._begun.put_nowait((node, cause))

    def _drain(self, node: Node, cause: str) -> None:
        if node.state is not State.DRAINING:
            node.drain(self._clock(), cause)
            self._tell(node, f"draining: {cause}")
        self._empty(node)
        self._changed()

    async def _carry_through(self, node: Node, cause: str) -> None:
        try:
            await self._emptied(node)
            if node not in self._under_way or not self._there(node):
                return  # resumed, or gone, meanwhile
            await self._restart(node, cause)
        except RecycleFailed as error:
            self._ended(node, str(error))
        except Exception:
            log.error("recycling %s failed through a fault of ours", node.name, exc_info=True)
            self._ended(node, "a fault of the router's")
        finally:
            self._under_way.discard(node)

    async def _emptied(self, node: Node) -> None:
        """Wait until no call runs there, within the bound."""
        until = self._clock() + self.care.drain_s
        while node in self._under_way and node.budget.held().sequences:
            if self._clock() >= until:
                self._tell(node, f"{node.budget.held().sequences} calls still run after care.drain_s and are cut")
                return
            await self._sleep(LOOK_S)

    async def _restart(self, node: Node, cause: str) -> None:
        assert self.hook is not None
        node.recycle(self._clock(), cause)
        self._tell(node, "its hook begins")
        try:
            async with asyncio.timeout(self.hook_s):
                await self.hook(node)
        except TimeoutError as error:
            raise RecycleFailed(f"the hook took longer than {self.hook_s:g} s") from error
        await self._sleep(self.care.settle_s)
        await self._answers(node)
        if self._there(node):
            self.anew(node.name)
            node.returned(self._clock(), "answered after its hook")
            self._changed()
        self._ended(node, DONE)

    async def _answers(self, node: Node) -> None:
        """Wait for one token, however the front looks."""
        until, last = self._clock() + self.care.ready_s, "it was not asked"
        while self._there(node):
            left = until - self._clock()
            if left <= 0:
                raise RecycleFailed(f"no answer within {self.care.ready_s:g} s after its hook; {last}")
            try:
                await self._taster.taste(node, min(TASTE_S, left))
            except ProbeFailed as error:
                last = str(error)
                await self._sleep(min(TASTE_EVERY_S, left))
            else:
                return

    def _there(self, node: Node) -> bool:
        return self._fleet.by_name.get(node.name) is node

    def _ended(self, node: Node, outcome: str) -> None:
        record = self.records.setdefault(node.name, Record())
        good = outcome == DONE
        record.ended_at, record.outcome = self._clock(), outcome
        record.failures = 0 if good else record.failures + 1
        self._recycles.add((node.name, DONE if good else "failed"))
        if not good:
            node.lost(self._clock(), outcome)
        self._tell(node, "recycled" if good else f"recycling failed: {outcome}", bad=not good)
        if record.failures >= self.care.failures:
            self._tell(node, f"not recycled by itself any more: {record.failures} failures in a row", bad=True)
        self._changed()

    def _tell(self, node: Node, text: str, *, bad: bool = False) -> None:
        log.log(logging.WARNING if bad else logging.INFO, "node %s: %s", node.name, text)
        self.told(node.name, text)
