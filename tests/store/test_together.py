"""Asking together: what shares an act, who takes the turn over, and who is told of an error."""

import asyncio
from collections.abc import Sequence

import pytest

from router.jobs.store.together import Together
from tests.rig import eventually


class Desk:
    """Answers in capitals, once it is let, but for what is wrong; remembers what came together."""

    def __init__(self, *, most: int = 10, limit: int = 100) -> None:
        self.acts: list[list[str]] = []
        self.open = asyncio.Event()
        self.together: Together[str, str] = Together(self.act, len, most=most, limit=limit)

    async def act(self, items: Sequence[str]) -> list[str]:
        self.acts.append(list(items))
        await self.open.wait()
        if "wrong" in items:
            raise ValueError(items)
        return [item.upper() for item in items]

    def ask(self, *items: str) -> list[asyncio.Task[str]]:
        return [asyncio.ensure_future(self.together.ask(item)) for item in items]

    async def begun(self, acts: int) -> None:
        await eventually(lambda: len(self.acts) >= acts, within=5)


async def test_who_asks_meanwhile_shares_the_next_act() -> None:
    desk = Desk()
    asked = desk.ask("a", "b")
    await desk.begun(1)
    asked += desk.ask("c", "d", "e")
    await asyncio.sleep(0)
    desk.open.set()
    assert await asyncio.gather(*asked) == ["A", "B", "C", "D", "E"]
    assert desk.acts == [["a", "b"], ["c", "d", "e"]]
    assert await desk.together.ask("f") == "F"


async def test_an_act_has_its_bounds_and_one_item_always_fits() -> None:
    desk = Desk(most=3, limit=4)
    desk.open.set()
    words = ["a", "b", "c", "d", "x" * 50, "ee", "ff", "g"]
    assert await asyncio.gather(*desk.ask(*words)) == [word.upper() for word in words]
    assert desk.acts == [["a", "b", "c"], ["d"], ["x" * 50, "ee", "ff"], ["g"]]


async def test_who_gives_up_in_its_act_leaves_the_turn_to_the_next() -> None:
    desk = Desk()
    first, second = desk.ask("a", "b")
    await desk.begun(1)
    (late,) = desk.ask("c")
    await asyncio.sleep(0)
    first.cancel()
    await desk.begun(2)
    assert desk.acts[1] == ["b", "c"]
    desk.open.set()
    assert await asyncio.gather(second, late) == ["B", "C"]
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await desk.together.ask("d") == "D"


async def test_who_gives_up_as_its_turn_comes_passes_it_on() -> None:
    desk = Desk()
    (first,) = desk.ask("a")
    await desk.begun(1)
    second, third = desk.ask("b", "c")
    await asyncio.sleep(0)
    desk.open.set()
    await first  # the turn is the second's now, which does not know yet
    second.cancel()
    assert await third == "C"
    assert desk.acts[-1] == ["c"]
    assert await desk.together.ask("d") == "D"


async def test_an_error_is_told_to_all_it_was_for_and_to_nobody_else() -> None:
    desk = Desk()
    asked = desk.ask("a", "wrong")
    await desk.begun(1)
    (late,) = desk.ask("c")
    await asyncio.sleep(0)
    desk.open.set()
    assert [type(told) for told in await asyncio.gather(*asked, return_exceptions=True)] == [ValueError, ValueError]
    assert await late == "C"
