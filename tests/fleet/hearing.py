"""What a Discovery hears from sources, for tests to look at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.core.node import Spec
from router.errors import SettingsError
from router.fleet.discovery import Discovery, Listed, Source
from router.fleet.gpustack import Instance, node_name
from router.upstream.target import Target
from tests.fleet.looking import BOTH

QUICK_S = 0.01


def listed(name: str) -> Listed:
    url = f"http://{name}:8000"
    return Listed(Spec(name=name, url=url, pools=BOTH), Target.parse(url))


def listed_instance(instance: Instance) -> Listed:
    """A node of an instance, unless it is odd."""
    if instance.worker_ip == "odd":
        raise SettingsError("its url cannot be that of a node")
    return Listed(Spec(name=node_name(instance), url=instance.url, pools=BOTH), Target.parse(instance.url))


class Ears:
    """What a Discovery hears. `lists` is every list that was different from the one before."""

    def __init__(self, *sources: Source) -> None:
        self.lists: list[list[str]] = []
        self.discovery = Discovery(sources, self._changed, again_s=QUICK_S)

    def _changed(self) -> None:
        self.lists.append(self.names)

    @property
    def names(self) -> list[str]:
        return [node.spec.name for _, node in self.discovery.listed()]

    @property
    def trouble(self) -> str | None:
        return next(iter(self.discovery.told.values())).trouble


@asynccontextmanager
async def hearing(*sources: Source) -> AsyncIterator[Ears]:
    ears = Ears(*sources)
    task = asyncio.create_task(ears.discovery.run())
    try:
        yield ears
    finally:
        task.cancel()
        await asyncio.wait([task])
