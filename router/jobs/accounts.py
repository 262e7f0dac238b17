"""Keeps the relay's account in the store, so that it outlasts this router and all routers at the store share one cap.

What is spent here is written down every few seconds, what others spent is read with it. A router that dies loses what
it spent since; one that cannot reach its store goes by what it knows.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.core.spend import SLOT_S, SLOTS, Spend
from router.jobs.store import Store

EVERY_S = 2.0
"""How often it is written down."""


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """`run` it until cancelled. `spend` is the account there is now; `clock` is unix seconds, that of the account."""

    store: Store
    spend: Callable[[], Spend | None]
    clock: Callable[[], float] = time.time
    every_s: float = EVERY_S

    async def run(self) -> None:
        """Write and read for ever. Raises StoreError."""
        while True:
            await self.balance()
            await asyncio.sleep(self.every_s)

    async def balance(self) -> None:
        """Write down what was spent here, learn what was spent elsewhere. Raises StoreError."""
        spend = self.spend()
        if spend is None:
            return
        untold = spend.take()
        try:
            written = await self.store.book(untold, oldest=int(self.clock()) // SLOT_S - SLOTS)
        except BaseException:
            spend.put_back(untold)
            raise
        spend.know(written)
