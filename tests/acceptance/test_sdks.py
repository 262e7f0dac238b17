"""Real client libraries against the real router: every check a library can make, on every version of it."""

from typing import Any

import pytest

from tests.acceptance import judges as _calls
from tests.acceptance.checks import Case, Judge, judges
from tests.acceptance.conftest import Runs
from tests.acceptance.sdks import SDKS, Sdk
from tests.acceptance.world import World

assert _calls


def cases(listed: list[Judge]) -> list[Any]:
    """Every judgement on every client it concerns."""
    return [
        pytest.param(
            judge, sdk, marks=pytest.mark.check(judge.check), id=f"{judge.check}-{judge.judge.__name__}-{sdk.name}"
        )
        for sdk in SDKS
        for judge in listed
        if _runtime(sdk) in judge.runtimes
    ]


def _runtime(sdk: Sdk) -> str:
    return "anthropic" if sdk.package == "anthropic" else sdk.runtime


async def held_against(judge: Judge, sdk: Sdk, world: Any, runs: Runs) -> None:
    """The judgement on what that client saw."""
    facts = await runs.of(sdk)
    assert judge.scenario in facts, f"no result: {facts['stderr']}"
    result = facts[judge.scenario]
    assert not (isinstance(result, dict) and "broke" in result), result
    judge.judge(Case(sdk, sdk.name, world, result))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("judge", "sdk"), cases(judges))
async def test_sdk(judge: Judge, sdk: Sdk, world: World, runs: Runs) -> None:
    await held_against(judge, sdk, world, runs)
