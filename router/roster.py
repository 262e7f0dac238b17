"""Which nodes there are: those of the settings and those discovered, put into the rooms that use them.

Rules:
- The settings win: a discovered node with a name or URL that is taken is left out, and that is logged once.
- A node that is still told of stays the same object, with its state, budget and what was learnt of it; what is said of
  it is replaced. One with another URL or engine is another node.
- Nodes that come are looked at before those that go are let go, so that a fleet that moves house always has nodes.
- An agent tells the memory of one node: one that several nodes name is asked for none, and that is logged once.
- A node that goes takes no new calls from that moment; its running calls end as they would have, their room with them.
  Then its connections, its series and its way are gone. What was stored in it is unknown at once.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from router import assembly
from router.core.node import Node, State
from router.dispatch.leg import Way
from router.fleet.discovery import Discovery, Listed
from router.fleet.fleet import Fleet
from router.metrics import Metrics
from router.settings import Settings
from router.upstream.pool import Pool
from router.upstream.target import Target

JITTER = (0.8, 1.2)
"""Waits of nodes that are down differ by so much, so that those that fell together are not tried together."""
MEET_S = 5.0
"""Longest wait for nodes that come to tell what they are."""
SEE_OFF_S = 0.1
"""How often nodes that go are asked whether their last call has ended."""

log = logging.getLogger("ebbtide.nodes")


@dataclass(kw_only=True, eq=False)
class Roster:
    """`ways` and `targets` (by URL) are the maps that others read. `forget` is told the name of a node that goes.

    `leaving` are nodes that were let go and still answer calls; `agents` says by node name where its agent is asked.
    """

    settings: Settings
    fleet: Fleet
    ways: dict[Node, Way]
    targets: dict[str, Target]
    metrics: Metrics
    forget: Callable[[str], None]
    moved: Callable[[Node, State], None] | None = None

    def __post_init__(self) -> None:
        self._said: list[Listed] = []
        self.take(self.settings)
        self.leaving: dict[Node, Way] = {}
        self.agents: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self.discovery = Discovery((), self._news.set)
        self._departures = asyncio.Event()
        self._clashes: set[str] = set()
        self._shared: set[str] = set()

    def pools(self) -> dict[str, Pool]:
        """All connection pools, by the name of the node; those of nodes that go are named so."""
        there = {node.name: way.pool for node, way in self.ways.items() if node not in self.leaving}
        gone = enumerate(self.leaving.items())
        return there | {f"{node.name} (leaving, {index})": way.pool for index, (node, way) in gone}

    def take(self, settings: Settings) -> None:
        """Take in changed settings; `settle` puts them in force. Raises SettingsError, and then nothing has changed."""
        before = {entry.name: (entry, one) for entry, one in zip(self.settings.nodes, self._said, strict=False)}
        said = []
        for entry in settings.nodes:
            was, one = before.get(entry.name, (None, None))
            said.append(one if one is not None and was == entry else assembly.listed(entry))
        self._said = said
        self.settings = settings
        self._bounds = assembly.bounds(settings)

    def start(self) -> None:
        """Put in the nodes there are now, before anything runs."""
        self._put(self._told_of())

    async def settle(self) -> None:
        """Make the fleet what settings and discovery say; done when it is."""
        async with self._turn:
            self._news.clear()
            nodes = self._told_of()
            come = [node for node in nodes if self.fleet.by_name.get(node.name) is not node]
            if come:
                await self.fleet.first_look(MEET_S, come)
            gone = self._put(nodes)
        if come or gone:
            log.info("nodes: %s", "; ".join(filter(None, (_named("added", come), _named("removed", gone)))))

    async def run(self) -> None:
        """Follow what is discovered and see off who goes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.discovery.run(), name="discovery")
            group.create_task(self._follow(), name="roster")
            group.create_task(self._see_off(), name="departures")

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            try:
                await self.settle()
            except Exception:
                log.error("a discovered change was not taken in through a fault of ours", exc_info=True)

    def _told_of(self) -> list[Node]:
        """The nodes there should be; new ones are in no room yet."""
        wanted = list(self._wanted())
        self.agents = self._beside(wanted)
        return [self._node(one) for one in wanted]

    def _beside(self, wanted: Iterable[Listed]) -> dict[str, str]:
        """Where each node's agent is asked. One that is named by several nodes cannot say whose memory it tells."""
        named: dict[str, list[str]] = {}
        for one in wanted:
            if one.agent is not None:
                named.setdefault(one.agent, []).append(one.spec.name)
        shared = {url: ", ".join(sorted(names)) for url, names in named.items() if len(names) > 1}
        for url in sorted(shared.keys() - self._shared):
            log.warning("the agent at %s is named by %s: it is asked for none of them", url, shared[url])
        self._shared = set(shared)
        return {names[0]: url for url, names in named.items() if len(names) == 1}

    def _wanted(self) -> Iterator[Listed]:
        """All nodes there should be, those of the settings first."""
        names: dict[str, str] = {}
        urls: dict[str, str] = {}
        clashes: set[str] = set()
        for source, one in self._all():
            spec = one.spec
            if spec.name in names:
                clashes.add(f"node {spec.name} of {source} is left out: {names[spec.name]} has that name")
            elif spec.url in urls:
                clashes.add(f"node {spec.name} of {source} is left out: {urls[spec.url]} has that URL")
            else:
                names[spec.name], urls[spec.url] = f"one of {source}", f"{spec.name} of {source}"
                yield one
        for clash in sorted(clashes - self._clashes):
            log.warning("%s", clash)
        self._clashes = clashes

    def _all(self) -> Iterator[tuple[str, Listed]]:
        for one in self._said:
            yield "the settings", one
        for source, one in self.discovery.listed():
            yield f"discovery by {source}", one

    def _node(self, one: Listed) -> Node:
        """The node that is told of: the one there is, with what is said of it now, or a new one with a way to it."""
        spec, reserve = one.spec, assembly.reserve(self.settings, one.spec)
        node = self.fleet.by_name.get(spec.name)
        self.targets[spec.url] = one.target
        if node is None or (node.spec.url, node.spec.engine) != (spec.url, spec.engine):
            node = Node(spec, reserve=reserve)
            node.moved = self.moved
            node.jitter = partial(random.uniform, *JITTER)
            self.ways[node] = assembly.way(spec.name, one.target, spec.models, Pool(one.target, self._bounds))
            return node
        before, way = node.spec, self.ways[node]
        way.pool.bounds = self._bounds
        node.respec(spec, reserve=reserve)
        if before.models != spec.models or way.target != one.target:
            self.ways[node] = assembly.way(spec.name, one.target, spec.models, way.pool)
        return node

    def _put(self, nodes: list[Node]) -> list[Node]:
        """Make these the fleet; those that go by it."""
        there = set(nodes)
        gone = [node for node in self.fleet.nodes if node not in there]
        self.metrics.know(node.name for node in nodes)
        for node in gone:
            self.leaving[node] = self.ways[node]
            self.ways[node].pool.retire()
            self.forget(node.name)
            self._departures.set()
        self.fleet.become(nodes)
        for url in self.targets.keys() - {node.spec.url for node in nodes}:
            del self.targets[url]
        for node in self.ways.keys() - self.leaving.keys() - there:
            del self.ways[node]
        return gone

    async def _see_off(self) -> None:
        while True:
            await self._departures.wait()
            self._departures.clear()
            while self.leaving:
                for node in [node for node, way in self.leaving.items() if _done(node, way.pool)]:
                    del self.leaving[node], self.ways[node]
                    if node.name not in self.fleet.by_name:
                        self.metrics.forget(node.name)
                    log.info("node %s is gone: its last call has ended", node.name)
                await asyncio.sleep(SEE_OFF_S)


def _done(node: Node, pool: Pool) -> bool:
    """Whether nobody holds room there and every connection is closed."""
    return next(iter(node.budget), None) is None and not pool.open


def _named(what: str, nodes: Iterable[Node]) -> str:
    names = ", ".join(node.name for node in nodes)
    return f"{what} {names}" if names else ""
