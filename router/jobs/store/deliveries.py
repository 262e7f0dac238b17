"""Webhook events to deliver. Each is written in the transaction that made its batch final, so none is lost.

A delivery that is claimed comes due again after the lease: a router that dies with it is not the end of it.
"""

from sqlalchemy import select, update

from router.jobs.schema import deliveries
from router.jobs.store.rows import Delivery
from router.jobs.store.shelf import Shelf, locked


class Deliveries(Shelf):
    """The outbox."""

    async def claim_deliveries(self, *, limit: int = 10, lease_s: float = 60.0) -> list[Delivery]:
        """What is due, the longest due first, for `lease_s` seconds."""
        async with self._db.read() as tx:
            due = deliveries.c.due_at <= await tx.now()
            if await tx.first(select(deliveries.c.number).where(due).limit(1)) is None:
                return []
        async with self._db.write() as tx:
            now = await tx.now()
            query = select(deliveries).where(deliveries.c.due_at <= now).order_by(deliveries.c.due_at).limit(limit)
            rows = await tx.all(locked(query, skip=True))
            taken = deliveries.c.number.in_([row["number"] for row in rows])
            await tx.run(
                update(deliveries).where(taken).values(due_at=now + lease_s, attempts=deliveries.c.attempts + 1)
            )
        return [Delivery(**{name: row[name] for name in Delivery.__struct_fields__}) for row in rows]

    async def delivered(self, delivery: Delivery) -> None:
        """It was taken: it is over."""
        await self.delivery_failed(delivery, retry_at=None)

    async def delivery_failed(self, delivery: Delivery, *, retry_at: float | None) -> None:
        """Try again at `retry_at`, or never."""
        async with self._db.write() as tx:
            ended_at = await tx.now() if retry_at is None else None
            open_ = (deliveries.c.id == delivery.id, deliveries.c.due_at.is_not(None))
            await tx.run(update(deliveries).where(*open_).values(due_at=retry_at, ended_at=ended_at))
