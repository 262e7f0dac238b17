"""The composition root: every object of a running router is built here, once, and nowhere else.

One process, one event loop. Every task belongs to one TaskGroup that ends with the server.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import structlog
import uvicorn
import uvloop
from starlette.routing import BaseRoute

from router import assembly, logs
from router.api import cards
from router.api.board import Sources
from router.api.dashboard import Dashboard
from router.api.front import Front
from router.api.house import House
from router.api.protocol import FrontProtocol
from router.batching import Batching, Corridor
from router.core.budget import Permit
from router.core.call import Workload
from router.core.estimate import Estimates
from router.core.events import Events, Topic
from router.core.node import Node, State
from router.dispatch.admission import Admission
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.history import History
from router.dispatch.ledger import Ledger
from router.dispatch.spending import Spending
from router.dispatch.trip import RELAY
from router.errors import SettingsError
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.metrics import Metrics
from router.settings import Settings
from router.tokens import Tokens
from router.upstream.client import Client
from router.upstream.pool import Pool

FIRST_LOOK_S = 5.0
"""Longest wait at start for nodes to tell what they are; the rest are looked at later."""
FILES = 65_536
"""Open files the router asks the system for: enough for 30,000 streams."""
LAG_EVERY_S = 0.5
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects between collections. At CPython's 700 the collector took 16 % of a loaded router's time and found nothing:
what a call leaves behind is freed by its reference counts."""
LAST_WORDS_S = 2.0
"""Time for streams that were cut at the end of the drain to say so to their callers."""

log = structlog.get_logger()


class App:
    """Every object of a running router. `port` is where it listens once it does."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.batching: Batching | None = None
        self.port = 0
        self.draining = False
        self.clock = time.monotonic
        self.metrics = Metrics(entry.name for entry in settings.nodes)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.tokens = Tokens.load()
        self.metrics.tokenizer(exact=self.tokens.exact)
        self.estimates = Estimates()
        self.history, self.events = History(time.time), Events(time.time)
        self.nodes = [assembly.node(entry, settings.pools.batch.reserve, self._moved) for entry in settings.nodes]
        targets = {entry.name: assembly.target(entry.url, entry.api_key) for entry in settings.nodes}
        self.admission = Admission(
            self.nodes,
            assembly.limits(settings),
            self.clock,
            self._noticed,
            assembly.policy(settings),
            self._taken_back,
        )
        self.spending = Spending(assembly.spend(settings))
        self.metrics.also(self.spending.families)
        self.ways, self.relay = assembly.ways(settings, targets), assembly.relay(settings)
        self.dispatcher = Dispatcher(
            self.admission,
            self.ways,
            self.relay,
            assembly.patience(settings),
            Ledger(self.clock, self.metrics, self.estimates, self.spending, self.history),
        )
        self.client = Client(connections=64 + 8 * len(self.nodes))
        self.fleet = Fleet(
            self.nodes,
            Probe(self.client, targets, timeout_s=settings.probe.timeout_s),
            every_s=settings.probe.every_s,
            clock=self.clock,
            changed=self.admission.changed,
        )
        self.metrics.watch(lambda: (assembly.view(node) for node in self.nodes), self.admission.reasons)

    async def open(self) -> None:
        """Open the store, if batches are offered, and the door."""
        routes: Sequence[BaseRoute] = ()
        if self.settings.batches.enabled:
            corridor = Corridor(
                dispatcher=self.dispatcher,
                fleet=self.fleet,
                tokens=self.tokens,
                estimates=self.estimates,
                spending=self.spending,
                metrics=self.metrics,
                history=self.history,
                events=self.events,
            )
            self.batching = await Batching.open(self.settings, corridor)
            routes = self.batching.routes()
        self.dashboard = self._dashboard()
        self.front = Front(self._house(), [*routes, *self.dashboard.routes()])

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Connection pools by node name; the relay's is named `relay`."""
        pools = {name: way.pool for name, way in self.ways.items()}
        return pools if self.relay is None else {**pools, RELAY: self.relay.pool}

    def ready(self) -> bool:
        """Whether a call could be served now."""
        if self.draining:
            return False
        return self.relay is not None or any(node.state in (State.READY, State.PROBATION) for node in self.nodes)

    async def begin_drain(self) -> None:
        """Take no new calls; people's that run go on, lines of batches are put back."""
        self.draining = True
        if self.batching is not None:
            await self.batching.rest()
        self.admission.close()

    async def close(self) -> None:
        """Let go of what the objects hold outside the loop."""
        if self.batching is not None:
            await self.batching.close()
        await self.client.close()
        self.reader.shutdown(cancel_futures=True)
        self.tokens.close()

    async def cut_short(self) -> None:
        """End every running answer now. Streams say so to their callers, with their protocol's end mark."""
        self.dashboard.close()
        for pool in self.pools.values():
            await pool.close()

    def _noticed(self, workload: Workload, calls: int, size: int) -> None:
        self.metrics.waiting(workload, calls, size)
        if workload is Workload.BATCH and self.batching is not None:
            asyncio.get_running_loop().call_soon(self.batching.runner.feed)

    def _taken_back(self, node: Node, permit: Permit, wasted: float) -> None:
        mode = self.admission.policy.mode
        self.metrics.taken_back(node.name, permit.phase, mode, wasted)
        call, batching = permit.call, self.batching
        line = batching.lookout.taken_back(call) if batching is not None and call is not None else None
        said = cards.take_back(node, permit, line, mode)
        model, caller = ("", "") if call is None else (call.model, call.caller)
        self.events.add(Topic.TAKE_BACK, said, node=node.name, model=model, caller=caller)
        log.debug("taken back", node=node.name, phase=permit.phase, mode=mode, wasted_tokens=round(wasted))

    def _moved(self, node: Node, before: State) -> None:
        self.events.add(Topic.NODE, f"{before} → {node.state}: {node.cause}", node=node.name)

    def _dashboard(self) -> Dashboard:
        sources = Sources(
            fleet=self.fleet,
            admission=self.admission,
            history=self.history,
            events=self.events,
            clock=self.clock,
            wall=time.time,
            draining=lambda: self.draining,
            spend=self.spending.spend,
            relay_models=tuple(self.settings.relay.models) if self.settings.relay is not None else (),
            callers=tuple(key.name for key in self.settings.keys),
            lookout=None if self.batching is None else self.batching.lookout,
        )
        return Dashboard(sources, assembly.keyring(self.settings))

    def _house(self) -> House:
        settings = self.settings
        return House(
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            tokens=self.tokens,
            estimates=self.estimates,
            metrics=self.metrics,
            keyring=assembly.keyring(settings),
            terms=assembly.terms(settings),
            relay_models=tuple(settings.relay.models) if settings.relay is not None else (),
            ready=self.ready,
            reader=self.reader,
        )


class Server(uvicorn.Server):
    """uvicorn without its own signals; `listening` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The composition root decides what signals mean."""
        yield


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[App]:
    """A router that listens, for the length of the block. Leaving the block ends what still runs."""
    app = App(settings)
    listener = _listen(settings)
    app.port = listener.getsockname()[1]
    try:
        await app.open()
        server = Server(_uvicorn(app))
        await app.fleet.first_look(FIRST_LOOK_S)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]), name="serve")
            watching = [
                group.create_task(app.fleet.watch(), name="watch"),
                group.create_task(_measure_lag(app.metrics.loop_lag), name="lag"),
                group.create_task(app.dashboard.run(), name="dashboard"),
            ]
            if app.batching is not None:
                watching.append(group.create_task(app.batching.run(), name="jobs"))
            await server.listening.wait()
            try:
                yield app
            finally:
                await app.begin_drain()
                for task in watching:
                    task.cancel()
                await app.cut_short()
                server.should_exit = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await asyncio.shield(serving)
                server.force_exit = True
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
    finally:
        listener.close()
        await app.close()


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit status."""
    logs.configure(level=settings.log.level, form=settings.log.format, calls=settings.log.calls)
    gc.set_threshold(*GC_THRESHOLDS)
    _allow_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


def _allow_files() -> None:
    """A stream takes two files, and the soft limit most shells set is 1,024; the hard one is what the system means."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def look(settings: Settings) -> list[assembly.NodeReport]:
    """One look at every node, for `ebbtide check`."""
    app = App(settings)
    try:
        await app.fleet.first_look(3 * settings.probe.timeout_s + 1.0)
    finally:
        await app.close()
    return [assembly.report(entry, node, app.fleet) for entry, node in zip(settings.nodes, app.nodes, strict=True)]


async def _serve(settings: Settings) -> int:
    """First SIGTERM or SIGINT: finish what runs, within the drain's bound. Second: now."""
    told = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.put_nowait, number)
    async with running(settings) as app:
        gc.collect()
        gc.freeze()
        _greet(app)
        await told.get()
        await app.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.server.drain_s):
                await _drained(app, told)
    return 0


async def _drained(app: App, told: asyncio.Queue[int]) -> None:
    """Wait until no call is open, or a second signal."""
    second = asyncio.ensure_future(told.get())
    try:
        while app.dispatcher.trips and not second.done():
            await asyncio.wait([second], timeout=0.1)
    finally:
        second.cancel()


def _greet(app: App) -> None:
    server = app.settings.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    sys.stderr.write(f"ebbtide: listening on http://{host}:{app.port}\n")
    sys.stderr.flush()


async def _measure_lag(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        observe(max(0.0, loop.time() - due))


def _listen(settings: Settings) -> socket.socket:
    host, port = settings.server.host.strip("[]"), settings.server.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(f"server: cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _uvicorn(app: App) -> uvicorn.Config:
    server = app.settings.server

    class Bounded(FrontProtocol):
        head_limit = server.header_bytes

    return uvicorn.Config(
        app.front,
        http=Bounded,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=server.keepalive_s,
    )
