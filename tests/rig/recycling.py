"""What a recycle needs in a test: a hook as an operator writes it, something that restarts, findings as told."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.core.detectors import Evidence
from tests.fakes import FakeNode
from tests.rig.client import Reply, ask
from tests.rig.routers import App, free_port

LIMIT = 4 * 2**30


@dataclass
class Found:
    """What is held of a node."""

    verdict: str = "steady"
    projected_limit_s: float | None = None
    rss_bytes: float | None = None
    evidence: tuple[Evidence, ...] = ()


SLOPE = Evidence("rss_bytes_slope", 2.0**30, "bytes/h", 0.0, "flat")
LEAKING = Found("memory_growth", 600.0, 3 * 2**30, (SLOPE,))
SLOWER = Found("memory_growth_with_drift")


def find(app: App, **found: Found) -> None:
    """What is held of each node from now on."""
    app.inside.caring.keeper.find = lambda node: found.get(node.name)


def hook(log: Path, script: str = "") -> list[str]:
    """A command that writes down which node it was called for."""
    return ["/bin/sh", "-c", f'echo "$EBBTIDE_NODE" >> {log}; {script or "true"}']


def care(log: Path, *, command: list[str] | None = None, **recycle: Any) -> dict[str, Any]:
    """The section of the settings, with bounds that tests can wait for."""
    quick = {"command": command or hook(log), "settle_s": 0.3, "ready_s": 5, **recycle}
    return {"care": {"drain_s": 5, "recycle": quick}}


def called(log: Path) -> list[str]:
    """Nodes the hook was called for, in order."""
    return log.read_text().split() if log.exists() else []


@asynccontextmanager
async def restarting(log: Path, *nodes: FakeNode, away_s: float = 0.1) -> AsyncIterator[None]:
    """Whoever the hook was called for is away for a moment and comes back, as a restarted engine does."""
    by_name = {node.name: node for node in nodes}

    async def follow() -> None:
        done = 0
        while True:
            for name in called(log)[done:]:
                done += 1
                await by_name[name].down()
                await asyncio.sleep(away_s)
                await by_name[name].up()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(follow(), name="fake-restarts")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def act(app: App, name: str, what: str, body: Any = None, headers: Any = ()) -> Reply:
    """An operator's word over HTTP."""
    return await ask(app.port, body, path=f"/admin/nodes/{name}/{what}", headers=headers)


@asynccontextmanager
async def agent(match: str) -> AsyncIterator[str]:
    """`ebbtide agent` for processes of that name: where it listens."""
    port = free_port()
    command = ["-m", "router", "agent", "--match", match, "--port", str(port), "--every", "0.08"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    assert b"agent on" in await process.stderr.readline()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.communicate()
