"""One-token calls: whether a node really answers, and how long the first token of the same small call takes.

Rules: a canary costs one token, goes to nobody who is loaded, and is thrown away where load came while it ran, so that
two of them can be compared. What goes to the relay goes through the corridor like any call, so its spend cap counts it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.core.node import Node, State
from router.core.robust import median, spread
from router.errors import ProbeFailed
from router.upstream.client import Client, Said
from router.upstream.target import Target

__all__ = ["PROMPT", "PROMPT_TOKENS", "Band", "Canary", "Taster", "payload"]

PROMPT = "Say yes."
PROMPT_TOKENS = 12
"""About what the prompt comes to in any chat template."""
TOOK_S = 60.0
"""A canary that takes longer tells nothing."""
KEPT = 24
"""Canaries of the relay that make its band: six hours of them, unless they are asked more or less often."""
LEAST_SHOWN = 3
"""Canaries below which there is no band."""
OLD_S = 86400.0
"""Canaries older than this say nothing of now."""
ELSEWHERE = frozenset((400, 404, 405, 422, 501))
"""Statuses by which a server says that it does not chat."""

log = logging.getLogger("ebbtide.canary")

Sampled = Callable[[str, float], None]
"""Told a node's name, or `relay`, and the seconds until the first token."""


def payload(model: str) -> dict[str, object]:
    """The same small call, always."""
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "temperature": 0}


class Taster:
    """Asks one node for one token. `targets` says by URL how to be let in there."""

    def __init__(self, client: Client, targets: Mapping[str, Target]) -> None:
        self._client = client
        self._targets = targets

    async def taste(self, node: Node, timeout_s: float = TOOK_S) -> float:
        """Seconds until the token was here. A node that only embeds is asked for that. Raises ProbeFailed."""
        models = node.models()
        if not models:
            raise ProbeFailed("it names no model")
        model = node.own_name(models[0])
        began = time.monotonic()
        said = await self._ask(node, "chat/completions", payload(model), timeout_s)
        if said.status in ELSEWHERE:
            said = await self._ask(node, "embeddings", {"model": model, "input": PROMPT}, timeout_s)
        if not said.good:
            raise ProbeFailed(f"one token: status {said.status}", said.status)
        return time.monotonic() - began

    async def _ask(self, node: Node, path: str, body: Mapping[str, object], timeout_s: float) -> Said:
        target = self._targets.get(node.spec.url)
        if target is None:
            raise ProbeFailed("the node is gone")
        headers = {"authorization": target.authorization.decode()} if target.authorization else None
        return await self._client.ask("POST", target.url(path), dict(body), headers=headers, timeout_s=timeout_s)


class Band:
    """What the relay's canaries took of late: at most the last `KEPT`, none older than `OLD_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Take in one more."""
        self._kept.append((self._clock(), seconds))

    def clear(self) -> None:
        """It was another relay's."""
        self._kept.clear()

    def shown(self) -> tuple[float, float] | None:
        """The middle and the spread in seconds; None for fewer than `LEAST_SHOWN`."""
        since = self._clock() - OLD_S
        took = [seconds for at, seconds in self._kept if at >= since]
        return (median(took), spread(took)) if len(took) >= LEAST_SHOWN else None


class Canary:
    """Asks every idle node, and the relay, again and again, while `enabled`. All of it may be changed.

    `ask_relay` returns the seconds until the relay's first token, None when it may not be asked now.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        taster: Taster,
        ask_relay: Callable[[], Awaitable[float | None]],
        sampled: Sampled,
        *,
        every_s: float,
        relay_every_s: float,
    ) -> None:
        self._nodes = nodes
        self._taster = taster
        self._ask_relay = ask_relay
        self.sampled = sampled
        self.enabled = False
        self.every_s, self.relay_every_s = every_s, relay_every_s

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_nodes(), name="canary nodes")
            group.create_task(self._watch_relay(), name="canary relay")

    async def _watch_nodes(self) -> None:
        while True:
            for node in list(self._nodes) if self.enabled else ():
                await self.look(node)
            await asyncio.sleep(self.every_s)

    async def _watch_relay(self) -> None:
        while True:
            seconds = await self._ask_relay() if self.enabled else None
            if seconds is not None:
                self.sampled("relay", seconds)
            await asyncio.sleep(self.relay_every_s)

    async def look(self, node: Node) -> None:
        """One canary to one node, if nothing runs there."""
        if not idle(node):
            return
        try:
            seconds = await self._taster.taste(node)
        except ProbeFailed as error:
            log.info("canary of node %s: %s", node.name, error)
            return
        if idle(node, ours=1):
            self.sampled(node.name, seconds)


def idle(node: Node, *, ours: int = 0) -> bool:
    """Whether the node answers and has nothing to do, but for so many canaries that a look may have met."""
    load, budget = node.load, node.budget
    answers = node.state in (State.READY, State.DEGRADED)
    return answers and budget.running() <= ours and (load.running or 0) <= ours and not load.waiting
