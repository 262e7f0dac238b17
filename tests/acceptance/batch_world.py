"""The world of files and batches: one router process with a store, and a node whose models each behave in one way.

Each client library has a key of its own, so that it sees its own files and batches alone. A batch with the window
`PASSING` has its window moved into the past in the database once some of its lines are done.
"""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.acceptance.sdks import SDKS
from tests.fakes import FakeNode, Script, Seen
from tests.rig import RouterProcess, entry, running_process

PASSING = "61m"
RAW, STRANGER = "raw", "stranger"
SAMPLES = ("gpt-3.5-turbo-0125", "gpt-4o-mini", "meta-llama/Meta-Llama-3-8B-Instruct")
"""Models that published input files ask for."""
REFUSALS = (429, 503, 429)
"""What the first tries of a line for `busy` are told."""


@dataclass
class BatchWorld:
    """Everything a check may look at."""

    router: RouterProcess
    node: FakeNode
    store: Path
    tries: Counter[bytes] = field(default_factory=Counter)

    def key(self, name: str) -> str:
        """The key of one client."""
        return f"key-of-{name}"

    def seen(self, said: str) -> list[Seen]:
        """Calls that reached the node and carried these words, oldest first."""
        return [seen for seen in self.node.seen if said.encode() in seen.body]

    def answer(self, seen: Seen) -> Script | None:
        """A bad line is refused as engines do; `busy` refuses its first tries."""
        body = json.loads(seen.body)
        if body.get("max_tokens") == -1:
            return Script(status=400, message="max_tokens must be at least 1, got -1.")
        if body.get("model") != "busy":
            return None
        self.tries[seen.body] += 1
        tries = self.tries[seen.body]
        return Script(status=REFUSALS[tries - 1], ra="1") if tries <= len(REFUSALS) else None


def settings(node: FakeNode, store: Path) -> dict[str, Any]:
    """What an operator would write for it."""
    names = (RAW, STRANGER, *(sdk.name for sdk in SDKS))
    return {
        "store": {"url": f"sqlite:///{store}"},
        "batches": {"sweep_s": 0.1},
        "nodes": [entry(node, max_sequences=64)],
        "keys": [{"name": name, "key": f"key-of-{name}"} for name in names],
    }


@asynccontextmanager
async def a_batch_world(home: Path) -> AsyncIterator[BatchWorld]:
    """The node listening, the router ready, the clock of passing windows running."""
    async with AsyncExitStack() as stack:
        node = FakeNode(name="a", models=["tiny", "slow", "paced", "busy", *SAMPLES], slots=64)
        node.scripts = {"slow": Script(ttft=300), "paced": Script(ttft=0.5)}
        await stack.enter_async_context(node)
        store = home / "ebbtide.db"
        router = await stack.enter_async_context(running_process(settings(node, store), home))
        world = BatchWorld(router, node, store)
        node.on_request = world.answer
        passing = asyncio.get_running_loop().create_task(_pass_windows(store), name="windows")
        try:
            yield world
        finally:
            passing.cancel()


async def _pass_windows(store: Path) -> None:
    move = (
        "UPDATE batches SET created_at = created_at - window_s, expires_at = expires_at - window_s WHERE"
        " completion_window = ? AND state = 'in_progress' AND completed >= 3 AND expires_at > unixepoch()"
    )
    while True:
        await asyncio.sleep(0.2)
        with closing(sqlite3.connect(store, isolation_level=None)) as database:
            database.execute(move, (PASSING,))
