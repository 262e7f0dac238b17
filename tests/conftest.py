"""Fixtures every room may use. See `tests/fakes` for nodes and `tests/rig` for the router and raw clients."""

import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from router.process import GC_THRESHOLDS
from tests.fakes import FakeNode
from tests.rig import App, Baseline, entry, nothing_leaks, relay_entry, running_app


def pytest_collection_finish() -> None:
    """The collector runs as seldom as in a router's process, and leaves alone what every test has imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class Rig:
    """A router and its nodes for one test. Everything started here is stopped, and searched for leaks, at its end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._running = Baseline()
        self.nodes: list[FakeNode] = []
        self.apps: list[App] = []

    async def node(self, name: str = "", **options: Any) -> FakeNode:
        """One more fake node, listening."""
        node = FakeNode(name=name or f"n{len(self.nodes) + 1}", **options)
        self.nodes.append(await self._stack.enter_async_context(node))
        return node

    async def relay(self, key: str | None = "relay-key", **options: Any) -> FakeNode:
        """A fake relay: plain OpenAI, with a key."""
        return await self.node("relay-service", dialect="openai", requires_key=key, **options)

    async def router(
        self, *nodes: FakeNode | dict[str, Any], ready: bool = True, resolve: Any = None, **settings: Any
    ) -> App:
        """The router in front of these nodes (all that are not relays, when none is named, nor `nodes` said).

        `resolve` looks up names in place of the system.
        """
        chosen = nodes or [node for node in self.nodes if node.name != "relay-service"]
        entries = [node if isinstance(node, dict) else entry(node) for node in chosen]
        relay = settings.pop("relay", None)
        if isinstance(relay, FakeNode):
            relay = relay_entry(relay, api_key=relay.requires_key)
        whole = {"nodes": entries, **settings} | ({"relay": relay} if relay else {})
        options = {"resolve": resolve} if resolve else {}
        app = await self._stack.enter_async_context(running_app(whole, ready=ready, **options))
        self._running = Baseline()
        self.apps.append(app)
        return app

    async def settle(self) -> None:
        """The leak check: nothing held, nobody waiting, no busy connection, no task that was not there before."""
        for app in self.apps:
            await nothing_leaks(app, self.nodes, self._running)


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    """A healthy vLLM-like node that serves `tiny`."""
    async with FakeNode() as fake:
        yield fake


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """A bench for one test; the leak check runs at its end, unless the test failed."""
    before = Baseline()
    async with AsyncExitStack() as stack:
        bench = Rig(stack)
        yield bench
        if not request.node.stash.get(_failed, False):
            await bench.settle()
    if not request.node.stash.get(_failed, False):
        assert not before.new()
