"""Bells: whoever waits for work is woken when there may be some.

A bell only says "look again". Other routers' bells come over PostgreSQL's NOTIFY and may be lost, so every wait has a
timeout, and polling at that pace is the net.
"""

import asyncio
from collections.abc import Iterable
from enum import StrEnum


class Topic(StrEnum):
    """What may have happened."""

    BATCHES = "batches"
    JOBS = "jobs"
    STOPPED = "stopped"
    ENDED = "ended"


class Wakes:
    """One bell for each topic. Waiters compare counts, so a bell between two waits is not missed."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Topic, 0)
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = {topic: set() for topic in Topic}

    def count(self, topic: Topic) -> int:
        """How often it rang."""
        return self._counts[topic]

    def ring(self, topics: Iterable[Topic]) -> None:
        """Wake all who wait for these."""
        for topic in topics:
            self._counts[topic] += 1
            for waiting in self._waiting[topic]:
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, topic: Topic, seen: int, *, timeout_s: float = 1.0) -> int:
        """Return the count once it differs from `seen`, or after `timeout_s`."""
        if self._counts[topic] == seen:
            rung = asyncio.get_running_loop().create_future()
            self._waiting[topic].add(rung)
            try:
                await asyncio.wait((rung,), timeout=timeout_s)
            finally:
                self._waiting[topic].discard(rung)
                rung.cancel()
        return self._counts[topic]
