"""What must be left when everybody has gone: nothing.

Room, waiters, connections that are neither closed nor idle, and tasks beyond those there were before.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from tests.fakes import FakeNode
from tests.rig.routers import App
from tests.rig.wait import eventually

SETTLE_S = 2.0


class Baseline:
    """The tasks there are at one moment."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()

    def new(self) -> list[str]:
        """Names of tasks that were not there, without the current one and those of the fakes."""
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        return sorted(str(task) for task in tasks if not task.get_name().startswith("fake-") and not task.done())


def held(app: App) -> list[str]:
    """Rooms still held, on every node."""
    found = []
    for node in app.nodes:
        room = node.budget.held()
        if room.tokens or room.sequences or list(node.budget):
            found.append(f"{node.name} holds {room}")
    return found


def _pools(app: App) -> Iterable[tuple[str, Any]]:
    pools = app.inside.pools
    return pools.items() if isinstance(pools, dict) else enumerate(pools)


def leaks(app: App, nodes: Iterable[FakeNode], baseline: Baseline) -> list[str]:
    """Everything that is still there, in words; empty when all is well."""
    found = held(app)
    found += [f"pool {name}: {pool.open - pool.idle} busy" for name, pool in _pools(app) if pool.open != pool.idle]
    found += [f"{node.name}: {node.inflight} in flight" for node in nodes if node.inflight]
    found += [f"{node.name}: {node.faults}" for node in nodes if node.faults]
    found += [f"{len(app.inside.dispatcher.trips)} trips"] * bool(app.inside.dispatcher.trips)
    found += [f"{app.waiting} waiting"] * bool(app.waiting)
    found += [f"task {task}" for task in baseline.new()]
    return found


async def nothing_leaks(app: App, nodes: Iterable[FakeNode], baseline: Baseline) -> None:
    """Waits a moment for everything to be given back, then names what was not."""
    nodes = list(nodes)
    try:
        await eventually(lambda: not leaks(app, nodes, baseline), SETTLE_S)
    except AssertionError:
        raise AssertionError("left behind: " + "; ".join(leaks(app, nodes, baseline))) from None
