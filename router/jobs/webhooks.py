"""Telling receivers that a batch has ended: each event until it is taken, by whichever router holds its lease.

Rules:
- At least once: an event has one id and one body however often it is sent; receivers know a repeat by `webhook-id`.
- An attempt is bounded as a whole, names included; no redirect is followed; of the answer only the status is read.
- 2xx is taken, 410 ends it, everything else is tried again by `retry_s` and then given up.
- A router that stops gives back what it was sending; one that dies leaves it to its lease.
- A lost or full store ends nothing here: what came of an attempt is written down once the store answers.
- Logs name a receiver's host only: path and query may be a secret.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec
import structlog

from router.errors import HookRefused, HookUnreached, ProbeFailed, StoreError
from router.jobs.receivers import Receiver, Receivers
from router.jobs.store import Delivery, Store, Topic
from router.metrics import Metrics
from router.upstream.client import Hooks
from router.upstream.reach import Reach

__all__ = ["Told", "Webhooks"]

AT_ONCE = 16
"""Events one router sends at once."""
LEASE_MORE_S = 30.0
"""A lease lasts for an attempt and so much longer."""
SOON_S, POLL_S, NET_S = 0.05, 1.0, 5.0
"""Least and most time between two looks while something is to be delivered; between two looks otherwise."""
AGAIN_S = 2.0
"""Longest wait between two words to a store that does not answer."""
STOP_S = 1.0
SPREAD = 0.2
"""Waits are up to this part longer, so that what failed together does not come back together."""

log = structlog.get_logger()


class Told(StrEnum):
    """What came of one attempt."""

    DELIVERED = "delivered"
    GONE = "gone"
    STATUS = "status"
    UNANSWERED = "unanswered"
    FORBIDDEN = "forbidden"


class _Attempt(NamedTuple):
    told: Told
    why: str


@dataclass(kw_only=True, eq=False)
class Webhooks:
    """`run` it until cancelled. An attempt may take `timeout_s`; `retry_s` lie between one attempt and the next.

    `clock` is unix seconds as receivers know them.
    """

    store: Store
    receivers: Receivers
    hooks: Hooks
    reach: Reach
    metrics: Metrics
    timeout_s: float = 15.0
    retry_s: Sequence[float] = ()
    clock: Callable[[], float] = time.time
    _open: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Deliver until cancelled."""
        wakes = self.store.wakes
        async with asyncio.TaskGroup() as group:
            while True:
                seen = wakes.count(Topic.ENDED)
                pause_s = await self._look(group)
                await wakes.wait(Topic.ENDED, seen, timeout_s=pause_s)

    async def _look(self, group: asyncio.TaskGroup) -> float:
        """Begin what is due; how long to wait for the next look."""
        try:
            outbox = await self.store.outbox()
            self.metrics.webhooks(outbox.waiting, outbox.oldest_s)
            if outbox.due_in_s is None:
                return NET_S
            free = AT_ONCE - len(self._open)
            if outbox.due_in_s > 0 or not free:
                return min(POLL_S, max(SOON_S, outbox.due_in_s))
            claimed = await self.store.claim_deliveries(limit=free, lease_s=self.timeout_s + LEASE_MORE_S)
        except StoreError as error:
            log.warning("webhooks wait for the store", reason=str(error))
            return POLL_S
        for delivery in claimed:
            # One whose end this router could not write down yet comes due again; it is not sent again.
            if delivery.id not in self._open:
                self._open.add(delivery.id)
                group.create_task(self._deliver(delivery), name=f"webhook {delivery.id}")
        return POLL_S

    async def _deliver(self, delivery: Delivery) -> None:
        """One attempt, and what came of it written down."""
        attempt: _Attempt | None = None
        try:
            attempt = await self._tried(delivery)
            wait_s = self._wait_s(delivery, attempt)
            self._note(delivery, attempt, wait_s)
            await self._insist(delivery, attempt, wait_s)
        except asyncio.CancelledError:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    wait_s = 0.0 if attempt is None else self._wait_s(delivery, attempt)
                    await self._write(delivery, attempt, wait_s)
            raise
        finally:
            self._open.discard(delivery.id)
            self.store.wakes.ring((Topic.ENDED,))

    async def _tried(self, delivery: Delivery) -> _Attempt:
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self._tell(delivery, self.receivers.read(delivery.url))
        except HookRefused as error:
            return _Attempt(Told.FORBIDDEN, str(error))
        except ProbeFailed as error:
            return _Attempt(Told.UNANSWERED, str(error))
        except TimeoutError:
            return _Attempt(Told.UNANSWERED, f"no answer within {self.timeout_s:g} s")
        except Exception:
            log.error("a webhook failed through a fault of ours", webhook=delivery.id, exc_info=True)
            return _Attempt(Told.UNANSWERED, "a fault of the router")
        told = Told.DELIVERED if 200 <= status < 300 else Told.GONE if status == 410 else Told.STATUS
        return _Attempt(told, f"status {status}")

    async def _tell(self, delivery: Delivery, receiver: Receiver) -> int:
        """Send the event to the first of the receiver's addresses that takes a connection; the status."""
        addresses = await self.reach.addresses(receiver.host, receiver.port)
        body, timestamp = _event(delivery), int(self.clock())
        headers = {
            "host": receiver.host_header,
            "content-type": "application/json",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": self.receivers.signature(delivery.caller, delivery.id, timestamp, body),
        }
        bounds_s = (self.timeout_s / len(addresses), self.timeout_s)
        unreached: HookUnreached | None = None
        for address in addresses:
            try:
                url = receiver.at(address)
                return await self.hooks.post(url, receiver.host, body.encode(), headers=headers, bounds_s=bounds_s)
            except HookUnreached as error:
                unreached = error
        assert unreached is not None
        raise unreached

    def _wait_s(self, delivery: Delivery, attempt: _Attempt) -> float | None:
        """How long until the next attempt; None if there is none."""
        if attempt.told in (Told.DELIVERED, Told.GONE) or delivery.attempts >= len(self.retry_s):
            return None
        return self.retry_s[delivery.attempts] * random.uniform(1, 1 + SPREAD)

    async def _insist(self, delivery: Delivery, attempt: _Attempt, wait_s: float | None) -> None:
        """Write down what came of it, however long that takes."""
        pause_s = AGAIN_S / 8
        while True:
            try:
                return await self._write(delivery, attempt, wait_s)
            except StoreError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_S)

    async def _write(self, delivery: Delivery, attempt: _Attempt | None, wait_s: float | None) -> None:
        if attempt is not None and attempt.told is Told.DELIVERED:
            await self.store.delivered(delivery)
        else:
            await self.store.delivery_failed(delivery, retry_in_s=wait_s)

    def _note(self, delivery: Delivery, attempt: _Attempt, wait_s: float | None) -> None:
        taken = attempt.told is Told.DELIVERED
        self.metrics.webhook(attempt.told, given_up=wait_s is None and not taken)
        say = log.info if taken else log.warning
        say(
            "webhook delivered" if taken else "webhook not delivered",
            webhook=delivery.id,
            type=delivery.type,
            batch=delivery.batch_id,
            host=self.receivers.host(delivery.url),
            outcome=attempt.told.value,
            reason=attempt.why,
            attempt=delivery.attempts + 1,
            again_s=None if wait_s is None else round(wait_s),
        )


def _event(delivery: Delivery) -> str:
    """The body: the same bytes at every attempt."""
    told = {
        "id": delivery.id,
        "object": "event",
        "created_at": delivery.created_at,
        "type": delivery.type,
        "data": {"id": delivery.batch_id},
    }
    return msgspec.json.encode(told).decode()
