"""Real client libraries on files and batches: every check a library can make, on every version of it."""

import pytest

from tests.acceptance import judges_batches as _batches
from tests.acceptance import judges_files as _files
from tests.acceptance.batch_world import BatchWorld
from tests.acceptance.checks import Judge, batch_judges
from tests.acceptance.conftest import Runs
from tests.acceptance.sdks import Sdk
from tests.acceptance.test_sdks import cases, held_against

assert _batches
assert _files


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("judge", "sdk"), cases(batch_judges))
async def test_sdk(judge: Judge, sdk: Sdk, batch_world: BatchWorld, batch_runs: Runs) -> None:
    await held_against(judge, sdk, batch_world, batch_runs)
