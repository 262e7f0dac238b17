"""`ebbtide agent`: a small exporter that runs beside an engine and tells the memory of its whole process tree.

Rules: reading goes on by itself in a thread, again and again, and a scrape shows the last reading at once with its age,
so neither many scrapes nor a system that hangs can hold anybody up. It serves numbers only: no command line, no name.
"""

import argparse
import asyncio
import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.errors import SettingsError
from router.tools.trees import Chosen, Gpus, Reading, Tree

__all__ = ["Agent", "run"]

CLIENTS = 32
"""Scrapes at once; more are told 503."""

GAUGES: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("ebbtide_agent_up", "1 if the engine's process is there.", lambda seen: float(seen.processes > 0)),
    ("ebbtide_agent_processes", "Processes of the tree.", lambda seen: float(seen.processes)),
    ("ebbtide_agent_tree_rss_bytes", "Resident memory of the whole process tree.", lambda seen: seen.rss_bytes),
    ("ebbtide_agent_tree_pss_bytes", "The same with shared pages counted once.", lambda seen: seen.pss_bytes),
    ("ebbtide_agent_cgroup_memory_bytes", "Memory of the control group, caches too.", lambda seen: seen.cgroup_bytes),
    ("ebbtide_agent_cgroup_anon_bytes", "Its anonymous memory.", lambda seen: seen.cgroup_anon_bytes),
    ("ebbtide_agent_memory_limit_bytes", "Most memory the tree may have.", lambda seen: seen.limit_bytes),
    ("ebbtide_agent_tree_gpu_memory_bytes", "GPU memory of the tree, where NVML knows.", lambda s: s.tree_gpu_bytes),
    ("process_resident_memory_bytes", "Resident memory of the whole process tree.", lambda seen: seen.rss_bytes),
    ("process_start_time_seconds", "When the oldest root of the tree began.", lambda seen: seen.started_at),
)
"""Name, meaning and value of everything that is one number; a number that is not known is not shown."""


class Agent(Collector):
    """Reads a tree now and then and shows the last reading."""

    def __init__(self, tree: Tree, *, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self._every_s = every_s
        self._clock = clock
        self._seen: Reading | None = None
        self._seen_at = clock()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    async def watch(self) -> None:
        """Read again and again, until cancelled."""
        while True:
            self._seen = await asyncio.to_thread(self._tree.read)
            self._seen_at = self._clock()
            await asyncio.sleep(self._every_s)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for at a scrape."""
        seen = self._seen
        if seen is None:
            return
        for name, text, value in GAUGES:
            number = value(seen)
            if number is not None:
                yield GaugeMetricFamily(name, text, value=number)
        yield GaugeMetricFamily(
            "ebbtide_agent_age_seconds", "Age of these numbers.", value=self._clock() - self._seen_at
        )
        yield CounterMetricFamily("ebbtide_agent_restarts", "Restarts of the tree's root seen.", value=seen.restarts)
        if seen.gpu_bytes:
            gpus = GaugeMetricFamily("ebbtide_agent_gpu_memory_bytes", "Memory in use of a GPU.", labels=("gpu",))
            for gpu, used in seen.gpu_bytes.items():
                gpus.add_metric((gpu,), used)
            yield gpus

    def app(self) -> Starlette:
        """`/metrics`, and `/healthz` that says the agent itself lives."""
        return Starlette(routes=[Route("/metrics", self._metrics), Route("/healthz", _alive)])

    async def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), headers={"content-type": kind})


async def _alive(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def run(arguments: argparse.Namespace) -> int:
    """`ebbtide agent`; the exit status."""
    if (arguments.pid is None) == (arguments.match is None):
        raise SettingsError("say which processes: either --pid or --match")
    try:
        match = re.compile(arguments.match) if arguments.match is not None else None
    except re.error as error:
        raise SettingsError(f"--match is not a regular expression: {error}") from error
    tree = Tree(Chosen(pid=arguments.pid, match=match), gpus=Gpus.open())
    with _listen(arguments.host, arguments.port) as listener:
        asyncio.run(serve(Agent(tree, every_s=arguments.every), listener))
    return 0


async def serve(agent: Agent, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGTERM or SIGINT, or until cancelled."""
    config = uvicorn.Config(
        agent.app(),
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CLIENTS,
        timeout_keep_alive=30,
    )
    host, port = listener.getsockname()[:2]
    sys.stderr.write(f"ebbtide: agent on http://{f'[{host}]' if ':' in host else host}:{port}/metrics\n")
    sys.stderr.flush()
    watching = asyncio.create_task(agent.watch())
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    try:
        await asyncio.wait([watching, serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (watching, serving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
