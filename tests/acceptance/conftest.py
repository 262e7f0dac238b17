"""The conformance run: one world a file and one run of each client for all checks, and a record of how each went.

The record is `.cache/conformance.json`: check, client, result, and the reason where a client could not be run. It holds
no times and no dates, so that two runs of one tree write the same file.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.acceptance.batch_world import BatchWorld, a_batch_world
from tests.acceptance.sdks import ROOT, SDKS, Sdk, unavailable
from tests.acceptance.world import KEY, World, a_world

for judging in ("judges", "judges_files", "judges_batches"):
    pytest.register_assert_rewrite(f"tests.acceptance.{judging}")

RECORD = ROOT / ".cache" / "conformance.json"
CLIENT_S = 120
_results = pytest.StashKey[dict[tuple[str, str], str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(id): the conformance check a test holds")
    config.stash[_results] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Nodes, relay and one router process for a file of tests: one that idles to the end of the run is dear."""
    async with a_world(tmp_path_factory.mktemp("acceptance")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def batch_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatchWorld]:
    """The same with a store, for files and batches."""
    async with a_batch_world(tmp_path_factory.mktemp("batches")) as made:
        yield made


class Runs:
    """What each client saw, run once. `key` is asked with a client's name."""

    def __init__(self, script: int, url: str, key: Callable[[str], str]) -> None:
        self._script, self._url, self._key = script, url, key
        self._facts: dict[str, dict[str, Any]] = {}

    async def of(self, sdk: Sdk) -> dict[str, Any]:
        if (reason := unavailable(sdk)) is not None:
            pytest.skip(reason)
        if sdk.name not in self._facts:
            self._facts[sdk.name] = await self._run(sdk)
        return self._facts[sdk.name]

    async def all(self) -> None:
        """Runs every client there is, side by side."""
        ready = [sdk for sdk in SDKS if len(sdk.scripts) > self._script and unavailable(sdk) is None]
        self._facts |= dict(zip((sdk.name for sdk in ready), await asyncio.gather(*map(self._run, ready)), strict=True))

    async def _run(self, sdk: Sdk) -> dict[str, Any]:
        script = str(sdk.path(sdk.scripts[self._script]))
        command = [*sdk.command, script, self._url, self._key(sdk.name), sdk.name]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(CLIENT_S):
                said, wrong = await process.communicate()
        except TimeoutError:
            process.kill()
            said, wrong = await process.communicate()
        lines = [json.loads(line) for line in said.split(b"\n") if line]
        return {line["scenario"]: line["result"] for line in lines} | {"stderr": wrong.decode()[-2000:]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runs(world: World) -> Runs:
    return Runs(0, world.router.url, lambda _: KEY)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def batch_runs(batch_world: BatchWorld) -> Runs:
    """Nothing here depends on time, so the clients run side by side."""
    runs = Runs(1, batch_world.router.url, batch_world.key)
    await runs.all()
    return runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    marks = [mark.args[0] for mark in item.iter_markers("check")]
    if marks and (report.when == "call" or report.skipped or report.failed):
        sdk = getattr(item, "callspec", None) and item.callspec.params.get("sdk")  # type: ignore[attr-defined]
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        result = (
            "pass" if report.passed else f"skipped: {reason.removeprefix('Skipped: ')}" if report.skipped else "FAIL"
        )
        results = item.config.stash[_results]
        for mark in marks:
            key = (mark, sdk.name if sdk else "raw")
            results[key] = _worse(results.get(key, "pass"), result)
    return report


def _worse(one: str, other: str) -> str:
    return max(one, other, key=lambda result: (result == "FAIL", result != "pass"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.stash[_results]
    if not results:
        return
    RECORD.parent.mkdir(exist_ok=True)
    old = json.loads(RECORD.read_text()) if RECORD.exists() else []
    merged = {(row["check"], row["client"]): row["result"] for row in old} | results
    order = ["raw", *(sdk.name for sdk in SDKS)]
    rows = [
        {"check": check, "client": client, "result": result}
        for (check, client), result in sorted(merged.items(), key=lambda at: (int(at[0][0][1:]), order.index(at[0][1])))
    ]
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
