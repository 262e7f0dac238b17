"""Those who wait, by workload.

A queue is in order of arrival; a call whose room was taken back keeps its place at the front. It is bounded in calls
and in bytes of their bodies.
"""

import asyncio

import msgspec

from router.core.call import Call
from router.core.placement import Situation, WaitReason
from router.dispatch.grant import Grant, RelayGrant


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how much one workload may wait: seconds, calls, bytes of request bodies."""

    patience_s: float
    queue_calls: int
    queue_bytes: int


class Waiter:
    """One call that waits. `asked_at` is when it first asked for room, a retry keeps
    it; `looked_at` when it was last told to wait."""

    __slots__ = ("asked_at", "call", "future", "looked_at", "reason", "situation")

    def __init__(self, call: Call, asked_at: float, situation: Situation) -> None:
        self.call = call
        self.asked_at = asked_at
        self.situation = situation
        self.future: asyncio.Future[Grant | RelayGrant] | None = None
        self.reason = WaitReason.NO_ROOM
        self.looked_at = asked_at

    @property
    def returned(self) -> bool:
        """Whether it had room that was taken back."""
        return self.situation.returned

    @property
    def gone(self) -> bool:
        """Whether it left and has had no turn yet to take itself out of the queue."""
        return self.future is not None and self.future.cancelled()


class Queue:
    """Waiters of one workload in order of arrival."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiters: dict[Waiter, None] = {}
        self.bytes = 0

    def full(self, call: Call) -> bool:
        """Whether one more would be over a bound."""
        over_bytes = self.bytes + len(call.body) > self.limits.queue_bytes
        return len(self.waiters) >= self.limits.queue_calls or over_bytes

    def add(self, waiter: Waiter) -> None:
        """Somebody waits from now on: behind all others, or before those that were never taken back."""
        if waiter.returned:
            before = [other for other in self.waiters if other.returned]
            after = [other for other in self.waiters if not other.returned]
            self.waiters = dict.fromkeys([*before, waiter, *after])
        else:
            self.waiters[waiter] = None
        self.bytes += len(waiter.call.body)

    def drop(self, waiter: Waiter) -> None:
        """Somebody waits no more; again does no harm."""
        if waiter in self.waiters:
            del self.waiters[waiter]
            self.bytes -= len(waiter.call.body)
