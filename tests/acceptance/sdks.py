"""The client libraries the router is held against, each in an environment of its own.

Environments live under `$EBBTIDE_TEST_CACHE` or `.cache/sdks` and are made once, with the ordinary package clients. One
that cannot be made (no network, no Node) is unavailable with its reason, and its tests are skipped with that reason.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).parent / "clients"
INSTALL_S = 300


@dataclass(frozen=True)
class Sdk:
    """One client library at one version. `scripts` are what it runs: the calls' first, then the batches' if it has one.

    A script stands in `clients` without its ending; it is run with a base URL, a key, a name and scenario names.
    """

    name: str
    runtime: str  # python | node
    package: str
    version: str
    scripts: tuple[str, ...] = ("openai_client", "openai_batches")
    node_major: int = 0

    @property
    def home(self) -> Path:
        cache = os.environ.get("EBBTIDE_TEST_CACHE")
        return (Path(cache) if cache else ROOT / ".cache" / "sdks") / self.name

    @property
    def title(self) -> str:
        """As a reader knows it."""
        runtime = "Node" if self.runtime == "node" else "Python"
        return f"{runtime} {self.package} {self.version}"

    @property
    def command(self) -> list[str]:
        """What runs a script of its language."""
        return [str(self.home / "bin" / "python")] if self.runtime == "python" else ["node"]

    def path(self, script: str) -> Path:
        """Where one of its scripts stands."""
        return CLIENTS / f"{script}.py" if self.runtime == "python" else self.home / f"{script}.mjs"


SDKS = (
    Sdk("py-openai-3.57.0", "python", "openai", "3.57.0"),
    Sdk("py-openai-2.54.0", "python", "openai", "2.54.0"),
    Sdk("py-openai-2.0.0", "python", "openai", "2.0.0"),
    Sdk("node-openai-6.49.0", "node", "openai", "6.49.0", node_major=20),
    Sdk("node-openai-7.59.0", "node", "openai", "7.59.0", node_major=20),
    Sdk("py-anthropic-2.14.0", "python", "anthropic", "2.14.0", ("anthropic_client",)),
)
BY_NAME = {sdk.name: sdk for sdk in SDKS}


@cache
def unavailable(sdk: Sdk) -> str | None:
    """None when the client can be run (it is installed if need be), else the reason why not."""
    if sdk.runtime == "node" and (reason := _node_missing(sdk.node_major)):
        return reason
    with _alone(sdk):
        marker = sdk.home / "installed"
        if not marker.exists():
            try:
                _install(sdk)
            except (subprocess.SubprocessError, OSError) as error:
                shutil.rmtree(sdk.home, ignore_errors=True)
                return f"{sdk.name} cannot be installed: {_last_line(error)}"
            marker.write_text(sdk.version)
        if sdk.runtime == "node":
            for script in CLIENTS.glob("*.mjs"):
                shutil.copyfile(script, sdk.home / script.name)
    return None


@contextmanager
def _alone(sdk: Sdk) -> Iterator[None]:
    """Nobody else installs that client meanwhile."""
    sdk.home.parent.mkdir(parents=True, exist_ok=True)
    with (sdk.home.parent / f"{sdk.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(sdk: Sdk) -> None:
    sdk.home.mkdir(parents=True, exist_ok=True)
    wanted = f"{sdk.package}=={sdk.version}"
    if sdk.runtime == "python":
        _run([sys.executable, "-m", "venv", "--without-pip", str(sdk.home)])
        pip = [sys.executable, "-m", "pip", "--python", str(sdk.home / "bin" / "python"), "install", "--quiet"]
        _run([*pip, "--disable-pip-version-check", "--retries", "1", wanted])
    else:
        npm = ["npm", "install", "--fetch-retries", "1", "--no-audit", "--no-fund", "--loglevel", "error"]
        _run([*npm, "--prefix", str(sdk.home), wanted.replace("==", "@")])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def _node_missing(major: int) -> str | None:
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return "node or npm is not installed"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return None if int(version[1:].partition(".")[0]) >= major else f"node {version} is older than {major}"


def _last_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    return said.strip().splitlines()[-1] if said.strip() else type(error).__name__


if __name__ == "__main__":
    with ThreadPoolExecutor(3) as installing:
        for each, reason in zip(SDKS, installing.map(unavailable, SDKS), strict=True):
            print(f"{each.name}: {reason or 'ready'}")
