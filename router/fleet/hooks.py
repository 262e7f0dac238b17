"""How a node is restarted: by a command, or by a call. Another platform's way is another class with `__call__`.

Rules: a hook is bounded in time by who calls it and leaves nothing behind when that is up; it raises RecycleFailed and
nothing else; it is told which node, and never a prompt or a caller. No shell is involved.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol
from urllib.parse import quote

from router.core.node import Node
from router.errors import ProbeFailed, RecycleFailed
from router.upstream.client import Client

__all__ = ["Command", "Hook", "Http"]

TAIL = 500
"""So many bytes of what a command complained about are told."""
LATE_S = 0.2
"""After a command's end its last words are waited for so long: what it started may keep its output open."""


class Hook(Protocol):
    """Restarts one node. Returns when that has begun or is done; raises RecycleFailed."""

    async def __call__(self, node: Node) -> None: ...


class Command:
    """Runs a program in a process group of its own. Its exit status says whether it worked."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    async def __call__(self, node: Node) -> None:
        told = {"EBBTIDE_NODE": node.name, "EBBTIDE_NODE_URL": node.spec.url}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | told,
                start_new_session=True,
            )
        except OSError as error:
            raise RecycleFailed(f"the hook cannot be run: {error.strerror or error}") from error
        assert process.stderr is not None
        last = bytearray()
        listening = asyncio.create_task(_listen(process.stderr, last), name="hook stderr")
        try:
            status = await process.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(listening), LATE_S)
        finally:
            listening.cancel()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status:
            words = last.decode(errors="replace").strip()
            raise RecycleFailed(f"the hook ended with status {status}" + (f": {words}" if words else ""))


async def _listen(stream: asyncio.StreamReader, last: bytearray) -> None:
    while piece := await stream.read(4096):
        last += piece
        del last[:-TAIL]


class Http:
    """Makes an HTTP call. Any status of 2xx says that it worked."""

    def __init__(self, client: Client, method: str, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self._client = client
        self._method, self._url, self._headers, self._timeout_s = method, url, headers, timeout_s

    async def __call__(self, node: Node) -> None:
        url = self._url.replace("{node}", quote(node.name, safe=""))
        body = {"node": node.name, "url": node.spec.url}
        try:
            said = await self._client.ask(self._method, url, body, headers=self._headers, timeout_s=self._timeout_s)
        except ProbeFailed as error:
            raise RecycleFailed(f"the hook: {error}") from error
        if not said.good:
            raise RecycleFailed(f"the hook answered {said.status}")
