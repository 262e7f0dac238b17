"""The nodes there are, and the loops that keep looking at them.

Rules: one loop a node, from the moment it comes until it goes, so that a slow node delays only itself; starts are
spread over one period; no traffic ever waits for a look. Nodes come and go: `nodes` is one list, changed in place, and
a node that stays is the same object with all that was learnt of it. Load is read at each look, facts every
`FACTS_EVERY`th; the engine is recognised again, and facts are read again, once a node has been down. A capacity that
facts no longer tell keeps its last known value while the engine is the same. Trouble is logged when it begins and when
it ends, not in between.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from router.core.call import Workload
from router.core.node import Facts, ModelFacts, Node, State
from router.errors import ProbeFailed
from router.fleet.engines import DIALECTS
from router.fleet.probe import Look, Probe, refused, starved

FACTS_EVERY = 10
"""Looks between two readings of the facts; they change only when an engine is restarted or an adapter is loaded."""

log = logging.getLogger("ebbtide.fleet")

Sleep = Callable[[float], Awaitable[object]]


def _nothing() -> None:
    """Nobody wants to know."""


class Fleet:
    """All nodes. `every_s` seconds lie between two looks at one; `changed` is called when waiting calls should ask.

    `nodes` becomes the fleet's own list: whoever holds it sees nodes come and go. Only `become` changes it.

    `trouble` is why the last look at a node failed, by name, and `blind` names nodes whose engine should tell its
    load and does not; both are empty when all is well.
    """

    def __init__(
        self,
        nodes: list[Node],
        probe: Probe,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        changed: Callable[[], None] = _nothing,
    ) -> None:
        self.nodes = nodes
        self.by_name = {node.name: node for node in self.nodes}
        self.trouble: dict[str, str] = {}
        self.blind: set[str] = set()
        self._probe = probe
        self.every_s = every_s
        self._clock = clock
        self._sleep = sleep
        self._changed = changed
        self._engines: dict[Node, str] = {}
        self._looks: dict[Node, int] = {}
        self._coming: set[Node] = set()
        self._group: asyncio.TaskGroup | None = None
        self._watches: dict[Node, asyncio.Task[None]] = {}
        self._kept_contexts: dict[str, tuple[int | None, int | None]] = {}
        self._created = int(time.time())

    def serving(self, model: str) -> list[Node]:
        """Nodes that answer for that public model name, in whatever state."""
        return [node for node in self.nodes if node.serves(model)]

    def interactive_context(self, model: str) -> int | None:
        """The longest context, in tokens, among nodes of the interactive pool that serve the model.

        None when there are none, or when one of them does not tell.
        """
        return self.contexts(model)[0]

    def shortest_context(self, model: str) -> int | None:
        """The shortest known context, in tokens, among nodes that serve the model: below it a count decides nothing."""
        return self.contexts(model)[1]

    def contexts(self, model: str) -> tuple[int | None, int | None]:
        """`interactive_context` and `shortest_context`, kept until the next look: every call asks for them."""
        kept = self._kept_contexts.get(model)
        if kept is not None:
            return kept
        serving = self.serving(model)
        contexts = [(Workload.INTERACTIVE in node.spec.pools, node.context(model)) for node in serving]
        interactive = [context for chat, context in contexts if chat]
        known = [context for context in interactive if context is not None]
        longest = max(known) if known and len(known) == len(interactive) else None
        found = longest, min((context for _, context in contexts if context is not None), default=None)
        if serving:
            self._kept_contexts[model] = found
        return found

    def model_cards(self, elsewhere: Iterable[str] = ()) -> list[dict[str, object]]:
        """Every model there is, as OpenAI lists them, by public name; nodes that are down keep what they last told.

        `elsewhere` names models of the relay. What a node says of a model is kept; `max_model_len` is the longest
        context a call may have.
        """
        served = dict.fromkeys(model for node in self.nodes for model in node.models())
        cards = [self._card(model) for model in served]
        return cards + [self._bare(model, "relay") for model in dict.fromkeys(elsewhere) if model not in served]

    def _bare(self, model: str, owner: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._created, "owned_by": owner}

    def _card(self, model: str) -> dict[str, object]:
        nodes = sorted(self.serving(model), key=lambda node: node.state is State.DOWN)
        told = [known.card for node in nodes if (known := _known(node, model)) is not None and known.card]
        card = self._bare(model, "ebbtide")
        for name, value in (told[0] if told else {}).items():
            if name not in card or isinstance(value, type(card[name])):
                card[name] = value
        card["id"] = model
        contexts = [context for node in nodes if (context := node.context(model)) is not None]
        if contexts:
            card["max_model_len"] = max(contexts)
        return card

    async def first_look(self, timeout: float, nodes: Sequence[Node] | None = None) -> None:
        """Look once at every node, or at `nodes` that are about to come, all at once.

        After `timeout` seconds the rest stay as they are.
        """
        wanted = list(self.nodes if nodes is None else nodes)
        self._coming.update(wanted)
        self._meet(wanted)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                    for node in wanted:
                        group.create_task(self.look(node))
        finally:
            self._coming.difference_update(wanted)

    def become(self, nodes: Sequence[Node]) -> None:
        """The nodes are these from now on: who is new is looked at, who is missing is forgotten."""
        before = dict.fromkeys(self.nodes)
        self.nodes[:] = nodes
        self.by_name.clear()
        self.by_name.update({node.name: node for node in nodes})
        for node in before:
            if self.by_name.get(node.name) is not node:
                self._leave(node)
        self._kept_contexts.clear()
        self._meet(nodes)
        self._begin([node for node in nodes if node not in before])
        self._changed()

    def _meet(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.met(self._clock())

    async def watch(self) -> None:
        """Look at all nodes, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._begin(self.nodes)
                await asyncio.Event().wait()
            finally:
                self._group = None
                self._watches.clear()

    def _begin(self, nodes: Sequence[Node]) -> None:
        """Watch these too, if any are watched."""
        if self._group is None:
            return
        for index, node in enumerate(nodes):
            loop = self._watch(node, self.every_s * index / len(nodes))
            self._watches[node] = self._group.create_task(loop, name=f"watch {node.name}")

    def _leave(self, node: Node) -> None:
        watch = self._watches.pop(node, None)
        if watch is not None:
            watch.cancel()
        self._forget(node)
        if node.name not in self.by_name:
            self.trouble.pop(node.name, None)
            self.blind.discard(node.name)

    async def _watch(self, node: Node, offset_s: float) -> None:
        await self._sleep(offset_s)
        while True:
            began = self._clock()
            await self.look(node)
            took = self._clock() - began
            await self._sleep(max(self.every_s - took, self.every_s / 4))

    async def look(self, node: Node) -> None:
        """Look at one node now and let it take in what was seen."""
        if node.state in (State.DOWN, State.RECYCLING):
            self._forget(node)
        looks = self._looks.get(node, 0)
        engine = self._engines.get(node)
        fresh = looks % FACTS_EVERY == 0 or engine is None
        before, held = _relevant(node), node.budget.held().sequences
        try:
            look = await self._probe.look(node.spec, engine=engine, facts=None if fresh else node.facts)
        except ProbeFailed as error:
            if self._ours(node):
                self._missed(node, error)
        else:
            if self._ours(node):
                self._looks[node] = looks + 1
                self._seen(node, look, held, first=looks == 0)
        self._kept_contexts.clear()
        if _relevant(node) != before:
            self._changed()

    def _ours(self, node: Node) -> bool:
        """Whether the node has not been let go meanwhile."""
        return node in self._coming or self.by_name.get(node.name) is node

    def _seen(self, node: Node, look: Look, held: int, *, first: bool) -> None:
        if look.sure:
            self._engines[node] = look.facts.engine
        facts = look.facts if first else _kept(node.facts, look.facts)
        node.seen(facts, look.load, self._clock(), held=held)
        if self.trouble.pop(node.name, None) is not None:
            log.info("node %s answers again (%s)", node.name, look.facts.engine)
        self._note_blindness(node, look)

    def _note_blindness(self, node: Node, look: Look) -> None:
        blind = look.load.running is None and DIALECTS[look.facts.engine].tells_load
        if blind and node.name not in self.blind:
            log.warning(
                "node %s (%s) does not tell its load: only our own calls are counted", node.name, look.facts.engine
            )
        (self.blind.add if blind else self.blind.discard)(node.name)

    def _missed(self, node: Node, error: ProbeFailed) -> None:
        cause = str(error)
        if node.name not in self.trouble:
            log.warning("node %s: %s", node.name, cause)
        self.trouble[node.name] = cause
        if starved(error):
            return
        gone, was = refused(error), node.state
        node.missed(self._clock(), cause, refused=gone)
        if node.state is State.DOWN and was is not State.DOWN:
            log.warning("node %s is down: %s", node.name, cause)

    def _forget(self, node: Node) -> None:
        """What comes back may be another engine."""
        self._looks.pop(node, None)
        self._engines.pop(node, None)


def _known(node: Node, model: str) -> ModelFacts | None:
    return node.facts.models.get(node.own_name(model))


def _kept(old: Facts, new: Facts) -> Facts:
    """New facts, with the capacities of the old ones where the same engine does not tell them this time."""
    if old.engine != new.engine or old.version != new.version or (new.tokens is not None and new.sequences is not None):
        return new
    return msgspec.structs.replace(
        new,
        tokens=old.tokens if new.tokens is None else new.tokens,
        sequences=old.sequences if new.sequences is None else new.sequences,
    )


def _relevant(node: Node) -> tuple[object, ...]:
    """What a decision depends on and a look can change."""
    budget = node.budget
    contexts = {name: known.context for name, known in node.facts.models.items()}
    return node.state, contexts, budget.tokens, budget.sequences, budget.foreign, bool(node.load.waiting)
