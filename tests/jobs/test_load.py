"""The load test of batches, shortened: nodes, router and clients in three processes, each line counted at the end.

The full size is `python loadtests/batches.py`, which also says how fast.
"""

import asyncio
import sys
from pathlib import Path

import pytest

LOADTEST = Path(__file__).parents[2] / "loadtests" / "batches.py"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("shape", [("--lines", "500"), ("--lines", "200", "--upload", "24")])
async def test_many_lines_through_a_router_process(shape: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(LOADTEST),
        *shape,
        "--poll-ms=5000",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.rstrip().endswith("all well")
