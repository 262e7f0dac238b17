"""Nodes of a running router from the command line: list them, drain, resume or recycle one.

Rules: what the router refuses is told in its own words; `--wait` stays until what was asked for is done, and fails when
it is not. Exit status 0: done, or begun without `--wait`. 1: anything else.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.errors import EbbtideError
from router.upstream.client import Client, Said

__all__ = ["run"]

DEFAULT_URL = "http://127.0.0.1:8080"
POLL_S = 0.5
BACK = frozenset(("ready", "busy", "degraded"))

Row: TypeAlias = Mapping[str, Any]


class Router:
    """A router's door for operators."""

    def __init__(self, client: Client, url: str, key: str | None) -> None:
        self._client = client
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def rows(self) -> Sequence[Row]:
        """All nodes."""
        found: Sequence[Row] = (await self._ask("GET", ""))["data"]
        return found

    async def row(self, name: str) -> Row:
        """One node."""
        return await self._ask("GET", f"/{quote(name, safe='')}")

    async def act(self, name: str, act: str, *, force: bool) -> Row:
        """Do it, and the node after it."""
        body = {"force": True} if force and act == "recycle" else None
        return await self._ask("POST", f"/{quote(name, safe='')}/{act}", body)

    async def _ask(self, method: str, path: str, body: object = None) -> Row:
        said = await self._client.ask(method, f"{self._url}/admin/nodes{path}", body, headers=self._headers)
        if not said.good:
            raise EbbtideError(_words(said))
        found: Row = said.json
        return found


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says."""
    if arguments.action != "list" and arguments.name is None:
        raise EbbtideError(f"which node? ebbtide node {arguments.action} NAME")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    url = arguments.url or os.environ.get("EBBTIDE_URL") or DEFAULT_URL
    async with Client() as client:
        router = Router(client, url, arguments.key or os.environ.get("EBBTIDE_KEY"))
        if arguments.action == "list":
            rows = await router.rows() if arguments.name is None else [await router.row(arguments.name)]
            _show(rows, as_json=arguments.json)
            return 0
        row = await router.act(arguments.name, arguments.action, force=arguments.force)
        done = True
        if arguments.wait:
            row, done = await _until_done(router, arguments.name, arguments.action)
        _show([row], as_json=arguments.json)
        return 0 if done else 1


async def _until_done(router: Router, name: str, act: str) -> tuple[Row, bool]:
    """The node once it is where it should be, or down; and whether it is where it should be."""
    while True:
        row = await router.row(name)
        state = row["state"]
        if act == "drain" and state == "draining" and not row["running"]:
            return row, True
        if act == "resume" and state in {*BACK, "probation"}:
            return row, True
        if act == "recycle" and state in BACK:
            return row, row["last_recycle"] == "done"
        if state == "down":
            return row, False
        await asyncio.sleep(POLL_S)


def _show(rows: Sequence[Row], *, as_json: bool) -> None:
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(rows), indent=2).decode()
        sys.stdout.write(f"{text}\n")
        return
    table = Table("node", "state", "since", "running", "why", "diagnosis")
    for row in rows:
        since = "" if row["state_s"] is None else _ago(row["state_s"])
        diagnosis = row["recycle_due"] or (row["diagnosis"] or {}).get("verdict") or ""
        cells = (row["name"], row["state"], since, str(row["running"]), row["cause"], diagnosis)
        table.add_row(*(Text(_plain(str(cell))) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _words(said: Said) -> str:
    """What the router said against it."""
    try:
        return str(msgspec.json.decode(said.body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return f"the router answered {said.status}"
