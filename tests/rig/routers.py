"""Starts the real router: in this process, where a test can look inside, or as the program operators run.

Rules: settings are the operator's own words (a mapping, written as the YAML file they would write); every bound is
small unless a test says otherwise; port 0 everywhere; a process is stopped by its own pid and its log is shown when it
fails.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fakes import FakeNode
from tests.rig.client import ask
from tests.rig.stem import Forked, Stem
from tests.rig.wait import eventually

START_S = 20.0
QUICK: dict[str, Any] = {
    "server": {"host": "127.0.0.1", "port": 0},
    "batches": {"enabled": False},
    "probe": {"every_s": 0.1, "timeout_s": 1},
    "upstream": {"connect_s": 1, "first_byte_s": 3, "idle_s": 3},
    "log": {"level": "warning", "calls": False},
}


def entry(node: FakeNode, **extra: Any) -> dict[str, Any]:
    """What an operator writes for a node."""
    return {"name": node.name, "url": node.url, "engine": node.dialect, **extra}


def relay_entry(relay: FakeNode, models: Any = ("tiny",), **extra: Any) -> dict[str, Any]:
    """What an operator writes for the relay."""
    return {"url": f"{relay.url}/v1", "models": list(models) if not isinstance(models, dict) else models, **extra}


def with_quick_bounds(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings over the rig's small bounds, section by section. Who names a store wants batches."""
    merged = {key: dict(value) for key, value in QUICK.items()}
    if "store" in settings:
        merged["batches"] = {}
    for key, value in settings.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, Mapping) else value
    return merged


@dataclass
class App:
    """A router in this process. `inside` is what `router.app.running` yields."""

    inside: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def nodes(self) -> list[Any]:
        return list(self.inside.fleet.nodes)

    def node(self, name: str) -> Any:
        return next(node for node in self.nodes if node.name == name)

    @property
    def held(self) -> int:
        """Sequences held on all nodes."""
        return sum(node.budget.held().sequences for node in self.nodes)

    @property
    def waiting(self) -> int:
        """Calls that wait for room."""
        return len(self.inside.admission.waiters())

    async def reload(self, settings: Mapping[str, Any]) -> list[str]:
        """Take in settings as at SIGHUP; what changed, in words."""
        with _written(settings) as path:
            return [str(change) for change in await self.inside.reload(_loaded(path))]

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: `name{labels}` to value."""
        return samples((await ask(self.port, path="/metrics", method="GET")).body.decode())


def samples(text: str) -> dict[str, float]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@asynccontextmanager
async def running_app(settings: Mapping[str, Any], *, ready: bool = True, **options: Any) -> AsyncIterator[App]:
    """The router in the test's own loop. With `ready` every node has been seen before the block begins.

    `options` are those of `router.app.running`.
    """
    from router.app import running

    with _written(settings) as path:
        async with running(_loaded(path), **options) as inside:
            app = App(inside, inside.port)
            if ready:
                await eventually(lambda: all(str(node.state) == "ready" for node in app.nodes), within=5)
            yield app


@contextmanager
def _written(settings: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "ebbtide.yaml"
        path.write_text(yaml.safe_dump(with_quick_bounds(settings)))
        yield path


def _loaded(path: Path) -> Any:
    from router.settings import load

    return load(path, {})


@dataclass
class RouterProcess:
    """A router as operators run it."""

    process: asyncio.subprocess.Process | Forked
    port: int
    log: Path
    config: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        return self.log.read_text()

    async def hang_up(self, text: str) -> str:
        """Write this as the settings file, send SIGHUP, and return what was logged until it was dealt with."""
        before = len(self.said)
        self.config.write_text(text)
        self.process.send_signal(signal.SIGHUP)
        done = ("settings reloaded", "settings not reloaded")
        await eventually(lambda: any(words in self.said[before:] for words in done), within=START_S)
        # All lines of one reload are written in one turn of its loop: whatever it answers next comes after the last.
        await ask(self.port, path="/readyz", method="GET")
        return self.said[before:]


@asynccontextmanager
async def running_process(
    settings: Mapping[str, Any], home: Path, *, env: Mapping[str, str] | None = None, stem: Stem | None = None
) -> AsyncIterator[RouterProcess]:
    """`python -m router serve` on a free port, ready to serve; its file and log live in `home`.

    With a `stem` it is forked from that, in the stem's environment.
    """
    config, log = home / "ebbtide.yaml", home / "router.log"
    port = free_port()
    config.write_text(yaml.safe_dump(with_quick_bounds(settings)))
    command = ["serve", "--config", str(config), "--port", str(port)]
    process: asyncio.subprocess.Process | Forked
    if stem is not None:
        process = await stem.fork(command, home, log)
    else:
        environment = os.environ | _import_path() | dict(env or {})
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router", *command), cwd=home, stdout=sink, stderr=sink, env=environment
            )
    router = RouterProcess(process, port, log, config)
    try:
        await _until_ready(router)
        yield router
    finally:
        await _stop(process)


def _import_path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_ready(router: RouterProcess) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if router.process.returncode is not None:
                raise AssertionError(f"the router stopped with {router.process.returncode}:\n{router.said}")
            try:
                if (await ask(router.port, path="/readyz", method="GET")).status == 200:
                    return
            except ConnectionError:
                pass
            await asyncio.sleep(0.05)


async def _stop(process: asyncio.subprocess.Process | Forked) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            process.kill()
            await process.wait()
