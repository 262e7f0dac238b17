"""The state of a running router in a terminal, again and again.

Rules: nothing is asked but what anybody may ask, and the batches of the key that is given; a router that is lost is
said to be lost over what was seen last, and asked again. Exit status 1 only with `--once`, when there is no answer.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live

from router.errors import EbbtideError, ProbeFailed
from router.tools.picture import Seen, picture
from router.tools.readings import Between, Scrape
from router.tools.stated import State
from router.upstream.client import Client

__all__ = ["run"]

EVERY_S = 2.0
SPAN_S = 60.0
"""Rates and quantiles are of this long."""
MOST_BATCHES = 10
WIDTH = 140
"""Columns where there is no terminal."""


@dataclass
class Watch:
    """One router, looked at through `client`. `seen` is what is shown."""

    client: Client
    url: str
    key: str | None
    scrapes: deque[Scrape] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.seen = Seen(self.url)

    async def look(self) -> Seen:
        """Ask once."""
        seen = self.seen
        try:
            scrape = Scrape.read(await self.client.get_text(f"{self.url}/metrics"), time.monotonic())
        except ProbeFailed as error:
            seen.lost = str(error)
            return seen
        except ValueError:
            seen.lost = "what it answers is no scrape"
            return seen
        self._keep(scrape)
        seen.batches, seen.state = await self._batches(), await self._state()
        seen.lost, seen.at = None, time.time()
        return seen

    def _keep(self, scrape: Scrape) -> None:
        scrapes, began = self.scrapes, scrape.one("process_start_time_seconds")
        if scrapes and scrapes[-1].one("process_start_time_seconds") != began:
            scrapes.clear()
        scrapes.append(scrape)
        while len(scrapes) > 2 and scrapes[1].at <= scrape.at - SPAN_S:
            scrapes.popleft()
        alone = len(scrapes) == 1
        self.seen.between = Between(Scrape(scrape.at) if alone else scrapes[0], scrape)
        self.seen.span_s = None if alone else scrape.at - scrapes[0].at

    async def _batches(self) -> list[dict[str, object]] | None:
        told = await self._ask(f"/v1/batches?limit={MOST_BATCHES}")
        found = told.get("data")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else None

    async def _state(self) -> State:
        """What the dashboard's snapshot tells, where there is one and our key may see it."""
        return State((await self._ask("/dashboard/snapshot")).get("state"))

    async def _ask(self, path: str) -> dict[str, Any]:
        """What a page tells, empty when it tells nothing to us."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        with contextlib.suppress(ProbeFailed):
            told = await self.client.get_json(self.url + path, headers=headers, max_bytes=2**23)
            return told if isinstance(told, dict) else {}
        return {}


def run(arguments: argparse.Namespace) -> int:
    """`ebbtide top`; the exit status."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(arguments, console))
    return 0


async def _run(arguments: argparse.Namespace, console: Console) -> None:
    url = arguments.url.rstrip("/").removesuffix("/v1")
    key = arguments.key or os.environ.get("OPENAI_API_KEY") or None
    async with Client(connections=2) as client:
        watch = Watch(client, url, key)
        if arguments.once or not console.is_terminal:
            seen = await watch.look()
            if seen.lost is not None:
                raise EbbtideError(f"{url}: {seen.lost}")
            console.print(picture(seen, console.width))
            return
        with Live(picture(watch.seen), console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(await watch.look(), console.width), refresh=True)
                await asyncio.sleep(EVERY_S)
