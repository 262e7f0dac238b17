"""What the files for Prometheus and Grafana ask, and a real Prometheus to ask it of."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from router.upstream.client import Client
from tests.rig.routers import free_port

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config/prometheus"
DASHBOARD = ROOT / "config/grafana/dashboards/ebbtide.json"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
SELECTOR = re.compile(r"\b((?:ebbtide[:_]|process_)[a-z0-9_:]+|up)\b(\{[^}]*\})?")
VARIABLES = {"$job": ".*", "$node": ".*", "$__rate_interval": "1m"}
START_S = 20.0


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of one file."""
    return [rule for group in yaml.safe_load((CONFIG / name).read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return rules("alerts.yml")


def panels() -> list[dict[str, Any]]:
    """Everything on the dashboard that is drawn."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def drawn() -> dict[str, str]:
    """Every expression of the dashboard, with its variables filled in, and where it stands."""
    told = {}
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            for name, value in VARIABLES.items():
                expr = expr.replace(name, value)
            told[expr] = f"{panel['title']} {target['refId']}"
    return told


def selectors(expr: str) -> Iterator[str]:
    """The series an expression is made from."""
    bare = re.sub(r"\b(?:by|on|without|group_left|ignoring) ?\([^)]*\)", "", expr)
    for name, labels in SELECTOR.findall(bare):
        yield name + labels


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str
    client: Client

    async def ask(self, expr: str) -> list[Any]:
        """What an expression gives now; AssertionError when it does not parse."""
        said = await self.client.ask("GET", f"{self.url}/api/v1/query?query={quote(expr)}")
        assert said.good, (expr, said.json)
        result: list[Any] = said.json["data"]["result"]
        return result

    async def rules(self) -> list[dict[str, Any]]:
        """Every rule as it is evaluated."""
        said = await self.client.ask("GET", f"{self.url}/api/v1/rules")
        return [rule for group in said.json["data"]["groups"] for rule in group["rules"]]


@asynccontextmanager
async def prometheus(router: int, home: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with our files, quick, that scrapes the router at that port."""
    assert PROMETHEUS is not None
    config = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "300ms", "scrape_timeout": "300ms", "evaluation_interval": "300ms"}
    config["rule_files"] = [str(CONFIG / name) for name in config["rule_files"]]
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{router}"]}]
    file, port = home / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(config))
    options = {"config.file": file, "storage.tsdb.path": home / "data", "web.listen-address": f"127.0.0.1:{port}"}
    with (home / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS, *(f"--{name}={value}" for name, value in options.items()), stdout=log, stderr=log
        )
    try:
        async with Client(connections=8) as client:
            await _ready(client, f"http://127.0.0.1:{port}", process, home / "prometheus.log")
            yield Prometheus(f"http://127.0.0.1:{port}", client)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(client: Client, url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    from router.errors import ProbeFailed

    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, f"Prometheus ended; see {log}"
            try:
                if (await client.ask("GET", f"{url}/-/ready")).good:
                    return
            except ProbeFailed:
                pass
            await asyncio.sleep(0.05)


async def promtool(*arguments: str, told: bytes | None = None) -> tuple[int, str]:
    """Exit status and all that was said."""
    assert PROMTOOL is not None
    process = await asyncio.create_subprocess_exec(
        PROMTOOL,
        *arguments,
        cwd=CONFIG,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(told), 60)
    return process.returncode or 0, said.decode()
