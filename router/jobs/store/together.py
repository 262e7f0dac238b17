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


class _Asked(Generic[T, R]):
    """One who asks. The bell rings True once it is answered, False when the turn is its own."""

    __slots__ = ("answer", "bell", "error", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.bell: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.answer: R
        self.error: Exception | None = None

    def ring(self, *, answered: bool) -> None:
        if not self.bell.done():
            self.bell.set_result(answered)

    def told(self) -> R:
        if self.error is not None:
            raise self.error
        return self.answer


class Together(Generic[T, R]):
    """`act` takes at most `most` items, whose sizes sum up to at most `limit` beyond the first, and answers each."""

    def __init__(
        self, act: Callable[[Sequence[T]], Awaitable[Sequence[R]]], size: Callable[[T], int], *, most: int, limit: int
    ) -> None:
        self._act = act
        self._size = size
        self._most = most
        self._limit = limit
        self._taken = False
        self._waiting: dict[_Asked[T, R], None] = {}

    async def ask(self, item: T) -> R:
        """The answer for one item. An error of the act is raised to all it was for."""
        asked: _Asked[T, R] = _Asked(item)
        self._waiting[asked] = None
        if not self._taken:
            self._taken = True
            asked.ring(answered=False)
        try:
            if not await asked.bell:
                await self._do(asked)
            return asked.told()
        finally:
            self._waiting.pop(asked, None)
            if asked.bell.done() and not asked.bell.cancelled() and not asked.bell.result():
                self._pass_on()

    def _pass_on(self) -> None:
        """The turn goes to whoever waits longest."""
        heir = next((one for one in self._waiting if not one.bell.done()), None)
        self._taken = heir is not None
        if heir is not None:
            heir.ring(answered=False)

    async def _do(self, first: _Asked[T, R]) -> None:
        await asyncio.sleep(0)  # those who ask in this turn of the loop come along
        shared = self._shared(first)
        try:
            answers = await self._act([one.item for one in shared])
        except Exception as error:  # noqa: BLE001 - raised by each who asked
            for one in shared:
                one.error = error
        else:
            for one, answer in zip(shared, answers, strict=True):
                one.answer = answer
        for one in shared:
            self._waiting.pop(one, None)
            one.ring(answered=True)

    def _shared(self, first: _Asked[T, R]) -> list[_Asked[T, R]]:
        shared, size = [first], 0
        for one in self._waiting:
            if one is first or one.bell.done():
                continue
            size += self._size(one.item)
            if size > self._limit or len(shared) >= self._most:
                break
            shared.append(one)
        return shared
