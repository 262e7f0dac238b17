"""A fleet over fakes on real sockets, and a clock that moves when told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from router.core.call import Workload
from router.core.node import Node, Spec
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.upstream.client import Client
from router.upstream.target import Target
from tests.fakes import FakeNode

BOTH = frozenset(Workload)


def spec(fake: FakeNode, **fields: Any) -> Spec:
    return Spec(**{"name": fake.name, "url": fake.url, "pools": BOTH, **fields})


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def probing(specs: Sequence[Spec], *, timeout_s: float = 1.0, key: str | None = None) -> AsyncIterator[Probe]:
    targets = {spec.url: Target.parse(spec.url, api_key=key) for spec in specs}
    async with Client() as client:
        yield Probe(client, targets, timeout_s=timeout_s)


@asynccontextmanager
async def fleet_of(*specs: Spec, timeout_s: float = 1.0, **fields: Any) -> AsyncIterator[Fleet]:
    async with probing(specs, timeout_s=timeout_s) as probe:
        yield Fleet([Node(spec) for spec in specs], probe, **fields)


@asynccontextmanager
async def raw_server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that writes what it is told; yields its URL and leaves no socket behind."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await answer(reader, writer, await reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def told(
    body: str, status: str = "200 OK"
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]:
    """What `raw_server` is to answer: one body, whatever was asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()

    return answer
