"""Doing at once what many ask for one by one.

Who asks while an act is under way waits for the next one, and the first to get the turn acts for all who wait. Nobody
waits for more to come. There is no task: the turn is held by one of those who ask, and if that one is cancelled, the
next takes over.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Together(Generic[T, R]):
    """`act` takes at most `most` items, whose sizes sum up to at most `limit` beyond the first, and answers each."""

    def __init__(
        self, act: Callable[[Sequence[T]], Awaitable[Sequence[R]]], size: Callable[[T], int], *, most: int, limit: int
    ) -> None:
        self._act = act
        self._size = size
        self._most = most
        self._limit = limit
        self._turn = asyncio.Lock()
        self._waiting: dict[asyncio.Future[R], T] = {}

    async def ask(self, item: T) -> R:
        """The answer for one item. An error of the act is raised to all it was for."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = item
        try:
            async with self._turn:
                if not answer.done():
                    await self._do(answer)
            return await answer
        finally:
            self._waiting.pop(answer, None)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # seen, also if the one who asked was cancelled

    async def _do(self, first: asyncio.Future[R]) -> None:
        await asyncio.sleep(0)  # those who ask in this turn of the loop come along
        shared = self._shared(first)
        try:
            answers = await self._act([self._waiting[answer] for answer in shared])
        except Exception as error:  # noqa: BLE001 - raised by each who asked
            for answer in shared:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for answer, told in zip(shared, answers, strict=True):
                if not answer.done():
                    answer.set_result(told)
        for answer in shared:
            self._waiting.pop(answer, None)

    def _shared(self, first: asyncio.Future[R]) -> list[asyncio.Future[R]]:
        shared, size = [first], 0
        for answer, item in self._waiting.items():
            if answer is first:
                continue
            size += self._size(item)
            if size > self._limit or len(shared) >= self._most:
                break
            shared.append(answer)
        return shared
