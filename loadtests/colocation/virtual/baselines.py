"""Those to compare with: what people do without Ebbtide, each with its knob.

Rules: every one sends chat at once to the node with the fewest calls. What differs is which nodes, and when batch goes.
A batch client holds `many` lines in flight over the fleet; a line whose try ended is followed by the next.
"""

import random
from collections import deque
from collections.abc import Iterable

from loadtests.colocation.virtual.ask import BATCH, Ask, Seq
from loadtests.colocation.virtual.world import World

REFRESH_S = 0.05
"""How often a gate reads metrics; llm-d's default."""


class Alone:
    """Chat on all nodes, no batch."""

    def __init__(self) -> None:
        self.inflight: list[int] = []
        self.nodes: dict[Seq, int] = {}

    def begin(self, world: World) -> None:
        """The play begins."""
        self.world = world
        self.inflight = [0] * len(world.engines)
        self.costs = [engine.profile.a + 1000 * engine.profile.b for engine in world.engines]

    def chat(self, ask: Ask) -> None:
        """Send it to the emptiest node."""
        self.send(ask, self.emptiest(self.everywhere, ask))

    @property
    def everywhere(self) -> range:
        """All nodes."""
        return range(len(self.inflight))

    def send(self, ask: Ask, node: int, priority: int = 0) -> Seq:
        """Send an ask to a node."""
        self.inflight[node] += 1
        seq = self.world.engines[node].submit(ask, self, priority)
        self.nodes[seq] = node
        return seq

    def emptiest(self, nodes: Iterable[int], ask: Ask) -> int:
        """The node with the fewest calls in flight for its speed, of those whose context holds the ask."""
        engines, size = self.world.engines, ask.prompt + ask.output
        holding = [node for node in nodes if size <= engines[node].profile.holds] or self.everywhere
        return min(holding, key=lambda node: (self.inflight[node] + 1) * self.costs[node])

    def spoke(self, seq: Seq, now: float) -> None:
        """The first token of a try is here."""

    def ended(self, seq: Seq, now: float) -> None:
        """The last token of a try is here."""
        self.inflight[self.nodes.pop(seq)] -= 1
        if seq.ask.kind == BATCH:
            self.line_ended()

    def line_ended(self) -> None:
        """A line of the batch is done."""


class Direct(Alone):
    """Chat and batch straight to all nodes, by least connections; priorities are sent if `priority` is not 0.

    Under an engine that knows no priorities this is what nginx, vllm-router, sglang-router and LiteLLM come to.
    """

    def __init__(self, many: int, priority: int = 0) -> None:
        super().__init__()
        self.many = many
        self.priority = priority

    def begin(self, world: World) -> None:
        super().begin(world)
        for _ in range(self.many):
            self.line_ended()

    def line_ended(self) -> None:
        line = self.world.line()
        self.send(line, self.emptiest(self.everywhere, line), self.priority)


class Split(Direct):
    """Chat on the first `k` nodes, batch on the others."""

    def __init__(self, k: int, many: int) -> None:
        super().__init__(many)
        self.k = k

    def chat(self, ask: Ask) -> None:
        self.send(ask, self.emptiest(range(self.k), ask))

    def line_ended(self) -> None:
        if self.k < len(self.inflight):
            line = self.world.line()
            self.send(line, self.emptiest(range(self.k, len(self.inflight)), line))


class Gate(Direct):
    """Batch waits in front of a gate that opens by saturation, after llm-d's flow control and its admitters.

    Saturation is the mean over nodes of max(waiting / 5, kv / 0.8), read every 50 ms. `limit` admits below it;
    `sheds` admits with probability 1 - min(300 sat^5, 1) and tries again after a second.
    """

    def __init__(self, many: int, limit: float = 1.0, *, sheds: bool = False, seed: int = 0) -> None:
        super().__init__(many)
        self.limit = limit
        self.sheds = sheds
        self.waiting: deque[Ask] = deque()
        self.coins = random.Random(f"gate {seed}")
        self.ticks = 0

    def begin(self, world: World) -> None:
        super().begin(world)
        self.tick()

    def line_ended(self) -> None:
        self.waiting.append(self.world.line())

    def tick(self) -> None:
        """Metrics were read."""
        loads = [engine.load() for engine in self.world.engines]
        saturation = sum(max(waiting / 5, kv / 0.8) for _, waiting, kv in loads) / len(loads)
        self.ticks += 1
        if self.sheds and self.ticks % 20 == 0:
            for _ in range(len(self.waiting)):
                if self.coins.random() < min(300 * saturation**5, 1.0):
                    self.waiting.rotate(-1)
                else:
                    self.open()
        elif not self.sheds and saturation < self.limit:
            while self.waiting:
                self.open()
        self.world.loop.call_later(REFRESH_S, self.tick)

    def open(self) -> None:
        """One line goes through."""
        line = self.waiting.popleft()
        self.send(line, self.emptiest(self.everywhere, line))
