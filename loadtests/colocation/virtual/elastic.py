"""Policies that give nodes to batch and take them back: by a timetable known beforehand, and by what chat does now.

Rules: a try that is taken back is sent again, to the same node while batch may use it. What decodes is left alone.
"""

import math
from collections import deque
from collections.abc import Sequence

from loadtests.colocation.virtual.ask import BATCH, CHAT, Ask, Seq
from loadtests.colocation.virtual.baselines import Alone
from loadtests.colocation.virtual.world import World


class Elastic(Alone):
    """Chat on the first `k` nodes, batch on the others; `k` moves. Batch fills a node's KV, two prompts at a time."""

    PREFILLS = 2

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.returned: deque[tuple[int, Ask]] = deque()
        self.next: Ask | None = None

    def begin(self, world: World) -> None:
        super().begin(world)
        nodes = self.everywhere
        self.lines: list[set[Seq]] = [set() for _ in nodes]
        self.reading: list[set[Seq]] = [set() for _ in nodes]
        self.chats = [0 for _ in nodes]
        self.fill()

    def chat(self, ask: Ask) -> None:
        self.send(ask, self.emptiest(range(max(1, self.k)), ask))

    def move(self, k: int) -> None:
        """Chat shall have `k` nodes from now on."""
        before, self.k = self.k, k
        for node in range(before, k):
            self.take_back(node)
        self.fill()

    def open_to_batch(self, node: int) -> bool:
        """Whether lines may begin there."""
        return node >= self.k

    def fill(self) -> None:
        """Begin lines where they may and where there is room."""
        for node in self.everywhere:
            if self.open_to_batch(node):
                while len(self.reading[node]) < self.PREFILLS and self._begin_line(node):
                    pass

    def _begin_line(self, node: int) -> bool:
        same = next((one for one in self.returned if one[0] == node or not self.open_to_batch(one[0])), None)
        ask = same[1] if same is not None else self.next or self.world.line()
        profile = self.world.engines[node].profile
        held = sum(seq.ask.prompt + seq.ask.output for seq in self.lines[node])
        if ask.prompt + ask.output > profile.holds or held + ask.prompt > 0.9 * profile.kv_tokens:
            self.next = ask if same is None else self.next
            return False
        if same is not None:
            self.returned.remove(same)
        else:
            self.next = None
        seq = self.send(ask, node, 10)
        self.lines[node].add(seq)
        self.reading[node].add(seq)
        return True

    def take_back(self, node: int) -> None:
        """Lines in prefill there make way."""
        for seq in list(self.reading[node]):
            self.world.engines[node].abort(seq)
            self.inflight[self.nodes.pop(seq)] -= 1
            self.lines[node].discard(seq)
            self.returned.append((node, seq.ask))
        self.reading[node].clear()

    def send(self, ask: Ask, node: int, priority: int = 0) -> Seq:
        if ask.kind == CHAT:
            self.chats[node] += 1
        return super().send(ask, node, priority)

    def spoke(self, seq: Seq, now: float) -> None:
        node = self.nodes[seq]
        if seq.ask.kind == BATCH:
            self.reading[node].discard(seq)
            self.fill()

    def ended(self, seq: Seq, now: float) -> None:
        node = self.nodes[seq]
        if seq.ask.kind == CHAT:
            self.chats[node] -= 1
        self.lines[node].discard(seq)
        super().ended(seq, now)
        self.chat_ended() if seq.ask.kind == CHAT else self.fill()

    def chat_ended(self) -> None:
        """A chat is done."""


class Timetable(Elastic):
    """`k` for each minute, made in hindsight."""

    def __init__(self, ks: Sequence[int]) -> None:
        super().__init__(ks[0])
        self.ks = ks

    def begin(self, world: World) -> None:
        super().begin(world)
        for minute, k in enumerate(self.ks):
            world.loop.call_at(60.0 * minute, self.move, k)


class Pack(Elastic):
    """The prototype that showed what a router can do: chat packed on as few nodes as hold it, `each` chats a node.

    `spare` chats of headroom for bursts. A node chat uses takes batch while no chat runs there, and chat that comes
    takes back what is in prefill.
    """

    CALM_S = 20.0

    def __init__(self, each: int, spare: float = 0.25) -> None:
        super().__init__(1)
        self.each = each
        self.spare = spare
        self.fewer_since: float | None = None

    def chat(self, ask: Ask) -> None:
        self.settle(sum(self.chats) + 1)
        nodes = range(self.k)
        below = [node for node in nodes if self.chats[node] < self.each]
        node = max(below, key=lambda one: self.chats[one]) if below else self.emptiest(nodes, ask)
        self.take_back(node)
        self.send(ask, node)

    def open_to_batch(self, node: int) -> bool:
        return node >= self.k or not self.chats[node]

    def chat_ended(self) -> None:
        self.settle(sum(self.chats))
        self.fill()

    def settle(self, chats: int) -> None:
        """As many nodes as the chats need; fewer only when that has held for a while."""
        now = self.world.loop.time()
        wanted = min(len(self.inflight), max(1, math.ceil(chats * (1 + self.spare) / self.each)))
        if wanted >= self.k:
            self.fewer_since = None
            if wanted > self.k:
                self.move(wanted)
        elif self.fewer_since is None:
            self.fewer_since = now
        elif now - self.fewer_since > self.CALM_S:
            self.fewer_since = now
            self.move(self.k - 1)
