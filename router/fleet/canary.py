"""One-token calls: whether a node really answers, and how long the first token of the same small call takes.

Rules: a canary costs one token, goes to nobody who is loaded, and is thrown away where load came while it ran, so that
two of them can be compared. What goes to the relay goes through the corridor like any call, so its spend cap counts it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.core.node import Node, State
from router.errors import ProbeFailed
from router.upstream.client import Client, Said
from router.upstream.target import Target

__all__ = ["PROMPT", "PROMPT_TOKENS", "Canary", "Taster", "payload"]

PROMPT = "Say yes."
PROMPT_TOKENS = 12
"""About what the prompt comes to in any chat template."""
TOOK_S = 60.0
"""A canary that takes longer tells nothing."""
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
