"""The routers at this store: each registers and beats; one that is lost is pruned, and its leases end with it.

Lost is: its process is known to be dead, or it has not beaten for `stale_s`. A router that was only frozen finds itself
fenced out of everything it held, and registers again.
"""

import asyncio
from contextlib import suppress

from sqlalchemy import RowMapping, delete, select, update

from router.errors import StoreError
from router.jobs.schema import batches, files, routers
from router.jobs.store.claims import HELD_BY, Claims
from router.jobs.store.database import Transaction
from router.jobs.store.rows import RouterRow
from router.jobs.store.shelf import is_state
from router.jobs.store.wakes import Topic

BEAT_S = 2.0
"""Seconds between beats."""


class Routers(Claims):
    """Who else works at this store."""

    async def watch(self) -> None:
        """Beat, prune and hear other routers until cancelled. Survives a lost database."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._db.listen())
            while True:
                with suppress(StoreError):
                    await self.beat()
                    await self.prune()
                await asyncio.sleep(BEAT_S)

    async def register(self) -> None:
        """Be known, and take over from this router's own past lives."""
        await self.beat()
        await self._prune(restarting=True)

    async def beat(self) -> None:
        """Say that this router lives."""
        async with self._db.write() as tx:
            now = await tx.now()
            row = {"beat_at": now, "pace": self._own_pace(now)}
            if not await tx.run(update(routers).where(routers.c.id == self.router).values(**row)):
                await tx.run(self._db.insert(routers).values(id=self.router, name=self.name, started_at=now, **row))

    async def routers(self) -> list[RouterRow]:
        """Those that beat lately, this one with them."""
        async with self._db.read() as tx:
            live = routers.c.beat_at >= await tx.now() - self._stale_s
            rows = await tx.all(select(routers).where(live).order_by(routers.c.id))
        return [RouterRow(**row) for row in rows]

    async def prune(self) -> list[RouterRow]:
        """End the leases of lost routers and give up their half-written files; who they were."""
        return await self._prune(restarting=False)

    async def _prune(self, *, restarting: bool) -> list[RouterRow]:
        lost: list[RouterRow] = []
        async with self._db.read() as tx:
            rows = await tx.all(select(routers).where(routers.c.id != self.router))
            for row in rows:
                if await self._lost(tx, row, restarting=restarting):
                    lost.append(RouterRow(**row))
        for router in lost:
            async with self._db.write() as tx:
                await self._bury(tx, router.id)
        return lost

    async def _lost(self, tx: Transaction, row: RowMapping, *, restarting: bool) -> bool:
        if row["beat_at"] < await tx.now() - self._stale_s:
            return True
        return await self._db.gone(tx, row["id"], namesake=restarting and row["name"] == self.name)

    async def _bury(self, tx: Transaction, router: str) -> None:
        held = {"owner": None, "lease_until": None}
        if await tx.run(update(batches).where(batches.c.owner == router).values(**held)):
            tx.wake(Topic.BATCHES)
        await self._release(tx, HELD_BY, {"me": router})
        half = is_state(files.c.state, "writing") & (files.c.writer == router)
        await tx.run(update(files).where(half).values(state="deleting", writer=None))
        await tx.run(delete(routers).where(routers.c.id == router))

    async def leave(self) -> None:
        """Give everything back and be known no more."""
        async with self._db.write() as tx:
            await self._bury(tx, self.router)
