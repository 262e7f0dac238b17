"""What the batch room does by the clock: deadlines, result files, the other routers, and why batches wait.

Every loop here survives whatever goes wrong in it: the router goes on serving chat, and the loop tries again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count

import structlog

from router.errors import StoreError
from router.jobs.store import Event, Store

__all__ = ["Upkeep", "always"]

AGAIN_S = 1.0
"""Wait before a loop that failed begins again."""
NOTE_S = 1.0
"""How often the reasons why batches wait are written down, when they changed."""
NOTE_ALL = 10
"""Every so many times, all of them."""

log = structlog.get_logger()


def _unheard(event: Event) -> None:
    """Nobody counts the ends of batches."""


@dataclass(kw_only=True, eq=False)
class Upkeep:
    """`run` it until cancelled. `every_s` lies between two sweeps; batches are forgotten `keep_s` after their end.

    `reasons` tells by batch why it waits; `ended` is told of every batch that became final.
    """

    store: Store
    reasons: Callable[[], Mapping[str, str]] = dict
    ended: Callable[[Event], None] = _unheard
    every_s: float = 1.0
    keep_s: int | None = None

    async def run(self) -> None:
        """Sweep, note and beat until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for loop in (self._sweep, self._note, self.store.watch):
                loops.create_task(always(loop), name=f"jobs {loop.__name__}")

    async def _sweep(self) -> None:
        while True:
            swept = await self.store.sweep(keep_batches_s=self.keep_s)
            for event in swept.events:
                log.info(
                    "batch ended",
                    batch=event.batch_id,
                    caller=event.caller,
                    state=event.state,
                    lines=event.total,
                    completed=event.completed,
                    failed=event.failed,
                    seconds=round(event.seconds, 3),
                )
                self.ended(event)
            await asyncio.sleep(0 if swept.more else self.every_s)

    async def _note(self) -> None:
        told: dict[str, str] = {}
        for turn in count():
            now = dict(self.reasons())
            changed = {batch: now.get(batch) for batch in told.keys() | now.keys() if told.get(batch) != now.get(batch)}
            # A line that ends takes the note away, and may do so between two looks.
            noted = changed if turn % NOTE_ALL else {**changed, **now}
            if noted:
                await self.store.note(noted)
            told = now
            await asyncio.sleep(NOTE_S)


async def always(loop: Callable[[], Awaitable[None]], what: str = "batch work") -> None:
    """Run a loop; what goes wrong in it is logged as that of `what`, and it begins again."""
    while True:
        try:
            await loop()
        except StoreError as error:
            log.warning("the store did not do what was asked", reason=str(error))
        except Exception:
            log.error(f"{what} failed through a fault of ours", exc_info=True)
        await asyncio.sleep(AGAIN_S)
