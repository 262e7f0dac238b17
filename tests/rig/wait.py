"""Waiting on a condition, never for luck."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")
STEP_S = 0.005


async def eventually(predicate: Callable[[], T], within: float = 5.0) -> T:
    """The first true value of `predicate`, asked again and again for at most `within` seconds."""
    deadline = monotonic() + within
    while not (value := predicate()):
        if monotonic() >= deadline:
            raise AssertionError(f"not within {within} s: {_said(predicate)}, last {value!r}")
        await asyncio.sleep(STEP_S)
    return value


def _said(predicate: Callable[[], object]) -> str:
    code = predicate.__code__
    return f"condition at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
