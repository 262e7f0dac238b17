"""Nodes from a file that something else writes.

Rules: it is looked at, not watched by the system: that works on every file system and costs one stat. A file that was
renamed into place is read at once; one that is written in place is read once it has been still for one look, so that
half a list is never taken for a list. The same file is read once, whatever was in it. All of it happens in a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from router.errors import DiscoveryFailed, SettingsError
from router.fleet.discovery.listing import Hear, Listed

Stamp = tuple[int, int, int]
"""Inode, time of change in nanoseconds, size in bytes."""


class File:
    """A file of nodes. `read` makes nodes of it and raises SettingsError; `every_s` seconds lie between two looks."""

    name = "file"

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Sequence[Listed]],
        *,
        every_s: float = 2.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._read = read
        self._every_s = every_s
        self._sleep = sleep
        self._seen: Stamp | None = None
        self._taken: Stamp | None = None

    async def run(self, hear: Hear) -> None:
        """Tell what is in the file whenever that changed."""
        while True:
            try:
                found = await asyncio.to_thread(self._look)
            except DiscoveryFailed as error:
                hear(error)
            else:
                if found is not None:
                    hear(found)
            await self._sleep(self._every_s)

    def _look(self) -> Sequence[Listed] | None:
        """What is in the file, None if there is nothing new. Raises DiscoveryFailed."""
        before, self._seen = self._seen, None
        try:
            status = self._path.stat()
        except OSError as error:
            self._taken = None
            raise DiscoveryFailed(f"{self._path}: cannot be read: {(error.strerror or '').lower()}") from error
        stamp = self._seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._taken:
            return None
        in_place = self._taken is not None and self._taken[0] == stamp[0]
        if in_place and stamp != before:
            return None
        self._taken = stamp
        try:
            return self._read(self._path)
        except SettingsError as error:
            raise DiscoveryFailed(str(error)) from error
