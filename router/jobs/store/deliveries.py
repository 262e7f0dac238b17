"""Webhook events to deliver. Each is written in the transaction that made its batch final, so none is lost.

A claim is a lease: a delivery that is claimed comes due again after it, so a router that dies with it is not the end of
it. It is fenced by the number of attempts: who comes back after its lease can say that the event was taken, which is
true whoever says it, and nothing else.
"""

from sqlalchemy import func, select, update

from router.jobs.schema import batches, deliveries
from router.jobs.store.rows import Delivery, Outbox
from router.jobs.store.shelf import Shelf, locked

OPEN = deliveries.c.due_at.is_not(None)
_CALLER = select(batches.c.caller).where(batches.c.id == deliveries.c.batch_id).scalar_subquery()


class Deliveries(Shelf):
    """The outbox."""

    async def outbox(self) -> Outbox:
        """What is still to be delivered, and when the next of it is due."""
        oldest, due = func.min(deliveries.c.created_at), func.min(deliveries.c.due_at)
        told = select(func.count().label("waiting"), oldest.label("oldest"), due.label("due")).where(OPEN)
        async with self._db.read() as tx:
            now = await tx.now()
            (row,) = await tx.all(told)
        return Outbox(
            waiting=row["waiting"],
            oldest_s=0.0 if row["oldest"] is None else max(0.0, now - row["oldest"]),
            due_in_s=None if row["due"] is None else row["due"] - now,
        )

    async def claim_deliveries(self, *, limit: int = 10, lease_s: float = 60.0) -> list[Delivery]:
        """What is due, for `lease_s` seconds: what was never tried first, then the longest due."""
        if limit < 1:
            return []
        async with self._db.write() as tx:
            now = await tx.now()
            query = select(deliveries, _CALLER.label("caller")).where(OPEN, deliveries.c.due_at <= now)
            query = query.order_by(deliveries.c.attempts > 0, deliveries.c.due_at, deliveries.c.number).limit(limit)
            rows = await tx.all(locked(query, skip=True))
            taken = deliveries.c.number.in_([row["number"] for row in rows])
            await tx.run(
                update(deliveries).where(taken).values(due_at=now + lease_s, attempts=deliveries.c.attempts + 1)
            )
        return [Delivery(**{name: row[name] for name in Delivery.__struct_fields__}) for row in rows]

    async def delivered(self, delivery: Delivery) -> None:
        """It was taken: it is over, whoever holds it by now."""
        await self._put(delivery, None, fenced=False)

    async def delivery_failed(self, delivery: Delivery, *, retry_in_s: float | None) -> bool:
        """Try again after `retry_in_s` seconds, or never. False if another router has claimed it since."""
        return await self._put(delivery, retry_in_s, fenced=True)

    async def _put(self, delivery: Delivery, retry_in_s: float | None, *, fenced: bool) -> bool:
        where = [deliveries.c.id == delivery.id, OPEN]
        if fenced:
            where.append(deliveries.c.attempts == delivery.attempts + 1)
        async with self._db.write() as tx:
            now = await tx.now()
            ends = {"due_at": None, "ended_at": now}
            values = ends if retry_in_s is None else {"due_at": now + retry_in_s}
            return bool(await tx.run(update(deliveries).where(*where).values(**values)))
