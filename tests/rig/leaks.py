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

    def new(self, expected: Iterable[str] = ()) -> list[str]:
        """Tasks that were not there, without the current one, those of the fakes, and one of each `expected` name."""
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        allowed, found = list(expected), []
        for task in tasks:
            if task.get_name() in allowed:
                allowed.remove(task.get_name())
            elif not task.get_name().startswith("fake-") and not task.done():
                found.append(str(task))
        return sorted(found)


def held(app: App) -> list[str]:
    """Rooms still held, on every node, those that were let go included."""
    found = []
    for node in (*app.nodes, *app.inside.roster.leaving):
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
    found += [f"{node.name} is still leaving" for node in app.inside.roster.leaving]
    found += [f"{len(app.inside.dispatcher.trips)} trips"] * bool(app.inside.dispatcher.trips)
    found += [f"{app.waiting} waiting"] * bool(app.waiting)
    sources = [f"discovery {name}" for name in app.inside.roster.discovery.told] + ["discovery gpustack watch"]
    watches = [f"watch {node.name}" for node in app.nodes]
    found += [f"task {task}" for task in baseline.new([*watches, *sources])]
    return found


async def nothing_leaks(app: App, nodes: Iterable[FakeNode], baseline: Baseline) -> None:
    """Waits a moment for everything to be given back, then names what was not."""
    nodes = list(nodes)
    try:
        await eventually(lambda: not leaks(app, nodes, baseline), SETTLE_S)
    except AssertionError:
        raise AssertionError("left behind: " + "; ".join(leaks(app, nodes, baseline))) from None
