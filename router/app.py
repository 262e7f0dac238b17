"""The composition root: every object of a running router is built here, once, and nowhere else.

One process, one event loop. Every task belongs to one TaskGroup that ends with the server.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec
import uvicorn
import uvloop

from router import logs
from router.api.auth import Caller, Keyring
from router.api.front import Front
from router.api.house import House
from router.api.protocol import FrontProtocol
from router.api.terms import Terms
from router.core.call import Workload
from router.core.estimate import Estimates
from router.core.node import Node, Spec, State
from router.dispatch import request
from router.dispatch.admission import Admission, Limits
from router.dispatch.dispatcher import Dispatcher, Patience
from router.dispatch.ledger import Ledger
from router.dispatch.leg import Way
from router.dispatch.trip import RELAY
from router.errors import SettingsError
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.metrics import Metrics
from router.settings import NodeEntry, Settings
from router.tokens import Tokens
from router.upstream.client import Client
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target

FIRST_LOOK_S = 5.0
"""Longest wait at start for nodes to tell what they are; the rest are looked at later."""
LAG_EVERY_S = 0.5
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects between collections. At CPython's 700 the collector took 16 % of a loaded router's time and found nothing:
what a call leaves behind is freed by its reference counts."""
LAST_WORDS_S = 2.0
"""Time for streams that were cut at the end of the drain to say so to their callers."""


class App:
    """Every object of a running router. `port` is where it listens once it does."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self.draining = False
        self.clock = time.monotonic
        self.metrics = Metrics(entry.name for entry in settings.nodes)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.tokens = Tokens.load()
        self.metrics.tokenizer(exact=self.tokens.exact)
        self.estimates = Estimates()
        self.nodes = [_node(entry, settings.pools.batch.reserve) for entry in settings.nodes]
        targets = {entry.name: _target(entry.url, entry.api_key) for entry in settings.nodes}
        self.admission = Admission(self.nodes, _limits(settings), self.clock, self.metrics.waiting)
        self.ways, self.relay = _ways(settings, targets), _relay(settings)
        self.dispatcher = Dispatcher(
            self.admission,
            self.ways,
            self.relay,
            _patience(settings),
            Ledger(self.clock, self.metrics, self.estimates),
        )
        self.client = Client(connections=64 + 8 * len(self.nodes))
        self.fleet = Fleet(
            self.nodes,
            Probe(self.client, targets, timeout_s=settings.probe.timeout_s),
            every_s=settings.probe.every_s,
            clock=self.clock,
            changed=self.admission.changed,
        )
        self.metrics.watch(lambda: (_view(node) for node in self.nodes))
        self.front = Front(self._house())

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Connection pools by node name; the relay's is named `relay`."""
        pools = {name: way.pool for name, way in self.ways.items()}
        return pools if self.relay is None else {**pools, RELAY: self.relay.pool}

    def ready(self) -> bool:
        """Whether a call could be served now."""
        if self.draining:
            return False
        now = self.clock()
        return self.relay is not None or any(
            node.state is not State.STARTING and node.usable(now) for node in self.nodes
        )

    def begin_drain(self) -> None:
        """Take no new calls; those that run go on."""
        self.draining = True
        self.admission.close()

    async def close(self) -> None:
        """Let go of what the objects hold outside the loop."""
        await self.client.close()
        self.reader.shutdown(cancel_futures=True)
        self.tokens.close()

    async def cut_short(self) -> None:
        """End every running answer now. Streams say so to their callers, with their protocol's end mark."""
        for pool in self.pools.values():
            await pool.close()

    def _house(self) -> House:
        settings = self.settings
        return House(
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            tokens=self.tokens,
            estimates=self.estimates,
            metrics=self.metrics,
            keyring=Keyring(
                (key.digest, Caller(name=key.name, workload=key.workload, fallback=key.fallback))
                for key in settings.keys
            ),
            terms=Terms(
                request_body_bytes=settings.server.request_body_bytes,
                head_s=settings.server.head_s,
                heartbeat_s=settings.server.heartbeat_s,
                write_stall_s=settings.server.write_stall_s,
                long_prompt_tokens=settings.classify.long_prompt_tokens,
                cors_origins=settings.server.cors_origins,
            ),
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
    server = Server(_uvicorn(app))
    listener = _listen(settings)
    app.port = listener.getsockname()[1]
    await app.fleet.first_look(FIRST_LOOK_S)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]), name="serve")
            watching = [
                group.create_task(app.fleet.watch(), name="watch"),
                group.create_task(_measure_lag(app.metrics.loop_lag), name="lag"),
            ]
            await server.listening.wait()
            try:
                yield app
            finally:
                for task in watching:
                    task.cancel()
                app.begin_drain()
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
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def look(settings: Settings) -> "list[NodeReport]":
    """One look at every node, for `ebbtide check`."""
    app = App(settings)
    try:
        await app.fleet.first_look(3 * settings.probe.timeout_s + 1.0)
    finally:
        await app.close()
    return [_report(entry, node, app.fleet) for entry, node in zip(settings.nodes, app.nodes, strict=True)]


@dataclass(kw_only=True)
class NodeReport:
    """What one look at a node found. None is unknown; `problem` is None when it can be used."""

    name: str
    url: str
    engine: str
    models: list[str]
    context: int | None
    kv_tokens: int | None
    sequences: int | None
    pools: Sequence[str]
    problem: str | None


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
        app.begin_drain()
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
        timeout_keep_alive=int(server.keepalive_s),
    )


def _node(entry: NodeEntry, reserve: float) -> Node:
    spec = Spec(
        name=entry.name,
        url=entry.url,
        pools=entry.pools,
        engine=entry.engine,
        models=entry.models,
        context=entry.context,
        sequences=entry.max_sequences,
        tokens=entry.kv_tokens,
    )
    return Node(spec, reserve=reserve if Workload.INTERACTIVE in entry.pools else 0.0)


def _target(url: str, api_key: object) -> Target:
    secret = getattr(api_key, "get_secret_value", lambda: None)()
    return Target.parse(url, api_key=secret)


def _limits(settings: Settings) -> dict[Workload, Limits]:
    pools = {Workload.INTERACTIVE: settings.pools.interactive, Workload.BATCH: settings.pools.batch}
    return {
        workload: Limits(patience_s=pool.patience_s, queue_calls=pool.queue_calls, queue_bytes=pool.queue_bytes)
        for workload, pool in pools.items()
    }


def _patience(settings: Settings) -> Patience:
    upstream = settings.upstream
    return Patience(
        first_byte_s=upstream.first_byte_s,
        first_byte_per_prompt_token_s=upstream.first_byte_per_prompt_token_s,
        retries=upstream.retries,
        retry_ratio=upstream.retry_ratio,
    )


def _ways(settings: Settings, targets: Mapping[str, Target]) -> dict[str, Way]:
    bounds = _bounds(settings)
    return {entry.name: _way(bounds, entry.name, targets[entry.name], entry.models) for entry in settings.nodes}


def _relay(settings: Settings) -> Way | None:
    relay = settings.relay
    if relay is None:
        return None
    return _way(_bounds(settings), RELAY, _target(relay.url, relay.api_key), relay.models)


def _way(bounds: Bounds, name: str, target: Target, models: Mapping[str, str]) -> Way:
    return Way(name=name, target=target, pool=Pool(target, bounds), starts=request.starts(target), models=models)


def _bounds(settings: Settings) -> Bounds:
    upstream = settings.upstream
    return Bounds(connect_s=upstream.connect_s, first_byte_s=upstream.first_byte_s, idle_s=upstream.idle_s)


class _View(msgspec.Struct, frozen=True):
    """A node as a scrape sees it."""

    name: str
    up: bool
    state: str
    running: Mapping[str, int]
    room: Mapping[str, int]


def _view(node: Node) -> _View:
    budget = node.budget
    held = {workload: budget.held(workload) for workload in Workload}
    room = {str(workload): room.tokens for workload, room in held.items()}
    if budget.tokens is not None:
        room["capacity"] = budget.tokens
    running = {str(workload): room.sequences for workload, room in held.items()}
    return _View(node.name, node.state in (State.READY, State.PROBATION), node.state, running, room)


def _report(entry: NodeEntry, node: Node, fleet: Fleet) -> NodeReport:
    models = node.models()
    known = [context for context in map(node.context, models) if context is not None]
    problem = fleet.trouble.get(node.name)
    if problem is None and not models:
        problem = "it serves no model"
    return NodeReport(
        name=node.name,
        url=entry.url,
        engine=node.facts.engine if problem is None else entry.engine,
        models=models,
        context=max(known, default=None),
        kv_tokens=node.budget.tokens,
        sequences=node.budget.sequences,
        pools=sorted(node.spec.pools),
        problem=problem,
    )
