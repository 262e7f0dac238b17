"""What the relay has cost: one row for a slot of the day, added to by every router at this store."""

from sqlalchemy import delete, select

from router.core.spend import Amounts
from router.jobs.schema import spending
from router.jobs.store.shelf import Shelf


class Spending(Shelf):
    """The relay's account."""

    async def book(self, spent: Amounts, *, oldest: int) -> Amounts:
        """Add dollars to their slots; what all routers spent from slot `oldest` on. Older slots go."""
        current = select(spending).where(spending.c.slot >= oldest)
        if not spent:
            async with self._db.read() as tx:
                return {(row["slot"], row["batch"]): row["usd"] for row in await tx.all(current)}
        new = self._db.insert(spending)
        added = new.on_conflict_do_update(
            index_elements=["slot", "batch"], set_={"usd": spending.c.usd + new.excluded.usd}
        )
        rows = [{"slot": slot, "batch": batch, "usd": usd} for (slot, batch), usd in sorted(spent.items())]
        async with self._db.write() as tx:
            await tx.run(added, rows)
            await tx.run(delete(spending).where(spending.c.slot < oldest))
            return {(row["slot"], row["batch"]): row["usd"] for row in await tx.all(current)}
