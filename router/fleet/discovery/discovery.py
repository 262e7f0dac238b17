"""What all sources of nodes told last.

Rules: a source that fails leaves its last list standing, however long that takes; trouble is logged when it begins and
when it ends; a source that breaks is started again; none can stop another, or the router.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from router.errors import DiscoveryFailed
from router.fleet.discovery.listing import Listed, Source

AGAIN_S = 5.0
"""After a source broke, it is started again this much later."""

log = logging.getLogger("ebbtide.discovery")


class Told(msgspec.Struct):
    """What one source told: its last list, when that was (unix seconds, 0 for never), and what is wrong since."""

    nodes: Sequence[Listed] = ()
    at: float = 0.0
    trouble: str | None = None


class Discovery:
    """All sources. `changed` is called when a source told another list than before; `told` has each by name."""

    def __init__(
        self,
        sources: Iterable[Source],
        changed: Callable[[], None],
        *,
        clock: Callable[[], float] = time.time,
        again_s: float = AGAIN_S,
    ) -> None:
        self.told: dict[str, Told] = {}
        self._sources: list[Source] = []
        self._changed = changed
        self._clock = clock
        self._again_s = again_s
        self._heard = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.use(sources)

    def use(self, sources: Iterable[Source]) -> None:
        """Ask these from now on. What a source of the same name told last stands until the new one tells."""
        self._sources = list(sources)
        self.told = {source.name: self.told.get(source.name, Told()) for source in self._sources}
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._begin()
        self._heard.clear()
        self._note()

    def listed(self) -> Iterator[tuple[str, Listed]]:
        """Every node told of, with its source."""
        return ((name, node) for name, told in self.told.items() for node in told.nodes)

    def stale(self) -> list[str]:
        """Sources whose list may not be that of now."""
        return [name for name, told in self.told.items() if told.trouble is not None]

    async def first(self, timeout: float) -> None:
        """Wait until every source has told something, at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._heard.wait()

    async def run(self) -> None:
        """Listen to all sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._begin()
                await asyncio.Event().wait()
            finally:
                self._group = None
                self._tasks = []

    def _begin(self) -> None:
        if self._group is not None:
            self._tasks = [
                self._group.create_task(self._listen(source), name=f"discovery {source.name}")
                for source in self._sources
            ]

    async def _listen(self, source: Source) -> None:
        hear = partial(self._hear, source)
        while True:
            try:
                await source.run(hear)
            except DiscoveryFailed as error:
                hear(error)
            except Exception:
                log.error("discovery by %s broke through a fault of ours", source.name, exc_info=True)
                hear(DiscoveryFailed("a fault of ours"))
            await asyncio.sleep(self._again_s)

    def _hear(self, source: Source, found: Sequence[Listed] | DiscoveryFailed) -> None:
        told = self.told.get(source.name)
        if told is None or source not in self._sources:
            return
        if isinstance(found, DiscoveryFailed):
            cause = str(found)
            if cause != told.trouble:
                log.warning("discovery by %s failed, its last list stands: %s", source.name, cause)
            told.trouble = cause
        else:
            if told.trouble is not None:
                log.info("discovery by %s works again", source.name)
            before, told.nodes, told.at, told.trouble = told.nodes, tuple(found), self._clock(), None
            if told.nodes != before:
                self._changed()
        self._note()

    def _note(self) -> None:
        if all(told.at or told.trouble is not None for told in self.told.values()):
            self._heard.set()
