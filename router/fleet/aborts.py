"""Tells engines that have a way to be told that a call which was taken back is over.

Closing the connection is what ends a call everywhere. SGLang notices that late (some 2 s into a prompt) and has an
abort request besides; a call is named there by the `rid` that went out with it. Nothing waits for the answer, and a
word that is lost costs what it would without it.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from router.core.node import Node
from router.errors import ProbeFailed
from router.upstream.client import Client
from router.upstream.target import Target

TOLD_S = 2.0
WAITING = 256
"""Words that wait to be sent at most; beyond them the oldest are not needed any more."""


class Aborts:
    """`targets` by node URL. `run` it until cancelled."""

    def __init__(self, client: Client, targets: Mapping[str, Target]) -> None:
        self._client = client
        self._targets = targets
        self._words: asyncio.Queue[tuple[Target, str]] = asyncio.Queue(WAITING)

    def tell(self, node: Node, call_id: str) -> None:
        """The call is over there. Does nothing for engines that learn it in time from the connection."""
        target = self._targets.get(node.spec.url)
        if node.facts.engine != "sglang" or target is None:
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._words.put_nowait((target, call_id))

    async def run(self) -> None:
        """Send words as they come."""
        while True:
            target, call_id = await self._words.get()
            key = {} if target.authorization is None else {"authorization": target.authorization.decode()}
            url = target.url("abort_request", rooted=True)
            with contextlib.suppress(ProbeFailed):
                await self._client.post_json(url, {"rid": call_id}, headers=key, timeout_s=TOLD_S)
