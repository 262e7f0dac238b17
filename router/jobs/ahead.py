"""What lines say, read together before their turn comes, so that beginning one asks the store for nothing."""

from collections.abc import Callable, Iterable

from router.errors import StoreError
from router.jobs.store import JobRow, Store

__all__ = ["Ahead"]

AHEAD_BYTES = 8 * 2**20
"""Most bytes of lines that are kept for later."""


class Ahead:
    """Keeps what was read until it is taken. A line that is not here is asked for when its turn comes.

    `waits` says whether a line's turn is still to come.
    """

    def __init__(self, store: Store, waits: Callable[[JobRow], bool]) -> None:
        self._store = store
        self._waits = waits
        self._kept: dict[tuple[str, int], bytes] = {}
        self.bytes = 0

    async def read(self, jobs: Iterable[JobRow]) -> None:
        """Read as many of these, from the first, as there is room for."""
        room, wanted = AHEAD_BYTES - self.bytes, []
        for job in filter(self._waits, jobs):
            room -= job.length
            if room < 0:
                break
            wanted.append(job)
        try:
            lines = await self._store.lines(wanted) if wanted else ()
        except StoreError:
            return
        for job, line in zip(wanted, lines, strict=False):
            if line is not None and self._waits(job) and job.key not in self._kept:
                self._kept[job.key] = line
                self.bytes += len(line)

    def take(self, job: JobRow) -> bytes:
        """What was read of it, which is kept no longer; nothing if it was not."""
        line = self._kept.pop(job.key, b"")
        self.bytes -= len(line)
        return line
