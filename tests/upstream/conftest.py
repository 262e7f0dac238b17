"""Every socket test runs on plain asyncio and on uvloop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine to its end on a new loop and refuse what the loop complains of."""

    def runner(scenario: Coroutine[Any, Any, Any]) -> Any:
        complaints: list[dict[str, Any]] = []

        async def guarded() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
            async with asyncio.timeout(30):
                return await scenario

        with asyncio.Runner(loop_factory=request.param) as loop:
            result = loop.run(guarded())
        assert not complaints, complaints
        return result

    return runner
