"""Nodes from GPUStack 2.x: its model instances.

Rules: the watch says when, the list says what. Each record that may change the nodes has the whole list read, at most
every `GAP_S`, and so does each beginning of a watch; besides it is read every `poll_s`, so that a watch that is cut or
deaf costs no more than that. An instance that the router itself has restarted stays a node meanwhile: who restarts it
keeps calls away. Nothing is pieced together from records: a replay, a repetition, a row that is told as deleted and
running at once, or one lost while the watch was away cannot leave a wrong list behind.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from router.errors import DiscoveryFailed, ProbeFailed, SettingsError
from router.fleet.discovery.listing import Hear, Listed
from router.fleet.gpustack.api import Gpustack, Instance

MOST_INSTANCES = 1000
"""As many as there may be nodes in the settings."""
GAP_S = 0.25
"""Least time between two readings of the list."""
AGAIN_S = (1.0, 30.0)
"""First and longest wait before what failed is tried again; it doubles."""

log = logging.getLogger("ebbtide.discovery")


@dataclass(kw_only=True, eq=False)
class Instances:
    """The instances of `server`. `listed` makes a node of one (None: it is not wanted) and may raise SettingsError.

    A watch is dead when it was silent for `silence_s`, and works when something came after `lasting_s`.
    """

    server: Gpustack
    listed: Callable[[Instance], Listed | None]
    name: str = "gpustack"
    poll_s: float = 15.0
    silence_s: float = 45.0
    lasting_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._news = asyncio.Event()
        self._breaks = 0
        self._odd: set[str] = set()

    async def run(self, hear: Hear) -> None:
        """Tell a node for each instance that serves, whenever that may have changed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="discovery gpustack watch")
            await self._read(hear)

    async def _read(self, hear: Hear) -> None:
        again_s = AGAIN_S[0]
        while True:
            self._news.clear()
            try:
                hear(self._nodes(await self.server.instances()))
                again_s, wait_s = AGAIN_S[0], self.poll_s
            except (DiscoveryFailed, ProbeFailed) as error:
                hear(DiscoveryFailed(str(error)))
                again_s, wait_s = min(again_s * 2, AGAIN_S[1]), min(again_s, self.poll_s)
            await self.sleep(min(GAP_S, wait_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    def _nodes(self, instances: Sequence[Instance]) -> list[Listed]:
        """A node for each that serves. Raises DiscoveryFailed."""
        restarting = self.server.restarting
        serving = [one for one in instances if one.serves or (one.placed and one.id in restarting)]
        if len(serving) > MOST_INSTANCES:
            raise DiscoveryFailed(f"GPUStack has over {MOST_INSTANCES} instances that serve")
        odd: dict[str, str] = {}
        found = []
        for instance in serving:
            try:
                node = self.listed(instance)
            except SettingsError as error:
                odd[instance.name] = str(error)
            else:
                found += [] if node is None else [node]
        for name in odd.keys() - self._odd:
            log.warning("instance %.100r of GPUStack is left out: %s", name, odd[name])
        self._odd = set(odd)
        return found

    async def _watch(self) -> None:
        """Set `_news` whenever the list may have changed, and open the watch again whenever it breaks."""
        again_s = AGAIN_S[0]
        while True:
            try:
                await self._listen(self.clock())
                cause = "it ended"
            except ProbeFailed as error:
                cause = str(error)
            if not self._breaks:
                again_s = AGAIN_S[0]
            self._breaks += 1
            if self._breaks == 2:  # once is a server that was restarted, or a proxy that lets nothing live for ever
                log.warning("GPUStack's instances cannot be watched, only asked for every %g s: %s", self.poll_s, cause)
            await self.sleep(again_s)
            again_s = min(again_s * 2, AGAIN_S[1])

    async def _listen(self, began: float) -> None:
        """One watch, to its end. `_breaks` counts those in a row that broke before they lasted. Raises ProbeFailed."""
        async with aclosing(self.server.watch(self.silence_s)) as records:
            begun = False
            async for record in records:
                if not begun or (record is not None and record.matters):
                    self._news.set()
                begun = True
                if self._breaks and self.clock() - began >= self.lasting_s:
                    if self._breaks > 1:
                        log.info("GPUStack's instances are watched again")
                    self._breaks = 0
