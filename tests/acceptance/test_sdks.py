"""Real client libraries against the real router: every check a library can make, on every version of it."""

import pytest

from tests.acceptance import judges as _registered
from tests.acceptance.checks import Case, Judge, judges
from tests.acceptance.conftest import Runs
from tests.acceptance.sdks import SDKS, Sdk
from tests.acceptance.world import World

assert _registered


def _runtime(sdk: Sdk) -> str:
    return "anthropic" if sdk.package == "anthropic" else sdk.runtime


CASES = [
    pytest.param(
        judge, sdk, marks=pytest.mark.check(judge.check), id=f"{judge.check}-{judge.judge.__name__}-{sdk.name}"
    )
    for sdk in SDKS
    for judge in judges
    if _runtime(sdk) in judge.runtimes
]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("judge", "sdk"), CASES)
async def test_sdk(judge: Judge, sdk: Sdk, world: World, runs: Runs) -> None:
    facts = await runs.of(sdk)
    assert judge.scenario in facts, f"no result: {facts['stderr']}"
    result = facts[judge.scenario]
    assert not (isinstance(result, dict) and "broke" in result), result
    judge.judge(Case(sdk, sdk.name, world, result))
