"""An asyncio event loop whose clock is virtual: nobody sleeps, time leaps to the next thing that is due.

Rules: the clock moves only when nothing can run now; it never moves back; a loop that has nothing to wait for is stuck
for good and says so. Sockets, threads and subprocesses have no place here.
"""

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any


class StuckError(RuntimeError):
    """Everybody waits and nothing is due."""


class _LeapingSelector(selectors.SelectSelector):
    """Where another selector would sleep, this one moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("everybody waits and nothing is due")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds since the loop was made."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end in virtual time and give what it gives.

    The collector of circular garbage is off meanwhile: a play makes much that lives long and little that is circular.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        if collects:
            gc.enable()
