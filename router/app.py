"""The composition root: every object of a running router is built here, once, and nowhere else.

One process, one event loop. Every task belongs to one TaskGroup that ends with the server.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import structlog
from starlette.routing import BaseRoute

from router import assembly, listening, showing
from router.api.auth import Keyring
from router.api.board import Sources
from router.api.dashboard import Dashboard
from router.api.front import Front
from router.api.house import House
from router.api.owners import Owners
from router.batching import Batching, Corridor
from router.caring import Caring, Needed
from router.core.budget import Permit
from router.core.call import Workload
from router.core.estimate import Estimates
from router.core.events import Events
from router.core.node import UP, Node
from router.dispatch.admission import Admission
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.gauges import Gauges
from router.dispatch.history import History
from router.dispatch.ledger import Ledger
from router.dispatch.leg import Way
from router.dispatch.spending import Spending
from router.dispatch.trip import RELAY
from router.errors import SettingsError
from router.fleet.aborts import Aborts
from router.fleet.discovery import Resolve, resolved
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.fleet.stays import Stays
from router.fleet.watch import Watch
from router.jobs.upkeep import always
from router.metrics import Metrics
from router.roster import Roster
from router.settings import Change, Settings, changes
from router.tokens import Tokens
from router.upstream.client import Client
from router.upstream.pool import Pool
from router.upstream.target import Target

FIRST_LOOK_S = 5.0
"""Longest wait at start for nodes to tell what they are; the rest are looked at later."""
CONNECTIONS = 8192
"""Most connections for looks: some eight to each of a thousand nodes."""
LAG_EVERY_S = 0.5
LAST_WORDS_S = 2.0
"""Time for streams that were cut at the end of the drain to say so to their callers."""

log = structlog.get_logger()


class App:
    """Every object of a running router. `port` is where it listens once it does.

    `settings` are those in force, but for what takes a restart: that is as `started` has it. `resolve` looks up names.
    """

    def __init__(self, settings: Settings, resolve: Resolve = resolved) -> None:
        self.started = self.settings = settings
        self._resolve = resolve
        self.batching: Batching | None = None
        self.port = 0
        self.draining = False
        self.clock = time.monotonic
        self.metrics = Metrics()
        self.metrics.reloaded(time.time())
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.tokens = Tokens.load()
        self.metrics.tokenizer(exact=self.tokens.exact)
        self.estimates = Estimates()
        self.history, self.events = History(time.time), Events(time.time)
        self.keyring = Keyring(assembly.callers(settings))
        self.owners = Owners()
        self.nodes: list[Node] = []
        self.client = Client(connections=CONNECTIONS)
        self.watch = Watch(lambda: [node.name for node in self.nodes], self.client, lambda: self.roster.agents)
        self.metrics.also(self.watch.families)
        self.metrics.also(Stays(self.nodes, self.clock).families)
        self._build_corridor(settings)
        self._build_fleet(settings)

    def _build_corridor(self, settings: Settings) -> None:
        """What calls go through."""
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
        ledger = Ledger(self.clock, self.metrics, self.estimates, self.spending, self.watch.observe)
        ledger.history = self.history
        self.spans = ledger.spans = assembly.spans(settings, self.clock)
        self.metrics.also(Gauges(self.nodes, self.admission, ledger, self.clock).families)
        patience = assembly.patience(settings)
        self.ways: dict[Node, Way] = {}
        self.dispatcher = Dispatcher(self.admission, self.ways, assembly.relay(settings), patience, ledger)
        self._old_relays: list[Pool] = []

    def _build_fleet(self, settings: Settings) -> None:
        """Who looks at nodes, cares for them, and puts them in."""
        targets: dict[str, Target] = {}
        self.probe = Probe(self.client, targets, timeout_s=settings.probe.timeout_s, looked=self.watch.looked)
        self.aborts = Aborts(self.client, targets)
        self.fleet = Fleet(
            self.nodes,
            self.probe,
            every_s=settings.probe.every_s,
            clock=self.clock,
            changed=self.admission.changed,
        )
        self.gpustack = assembly.gpustack(settings, self.client)
        self.caring = Caring(
            settings,
            Needed(
                fleet=self.fleet,
                dispatcher=self.dispatcher,
                client=self.client,
                targets=targets,
                keyring=self.keyring,
                metrics=self.metrics,
                clock=self.clock,
                gpustack=lambda: self.gpustack,
            ),
        )
        showing.acquaint(self.caring, self.watch, self.events)
        self.roster = self._roster(targets)
        self.metrics.watch(
            lambda: (assembly.view(node) for node in self.nodes),
            self.admission.reasons,
            lambda: self.roster.discovery.told,
        )

    def _roster(self, targets: dict[str, Target]) -> Roster:
        """Who puts nodes into the fleet; those of the settings are there at once."""
        roster = Roster(
            settings=self.settings,
            fleet=self.fleet,
            ways=self.ways,
            targets=targets,
            metrics=self.metrics,
            forget=self._forget,
            moved=showing.moved(self.events),
        )
        roster.start()
        roster.discovery.use(assembly.sources(self.settings, self._resolve, self.gpustack))
        return roster

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
                keyring=self.keyring,
                history=self.history,
                events=self.events,
            )
            self.batching = await Batching.open(self.settings, corridor)
            routes = self.batching.routes()
        self.house = self._house()
        self.dashboard = self._dashboard()
        self.front = Front(self.house, [*routes, *self.caring.routes(), *self.dashboard.routes()])

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Connection pools by node name; the relay's is named `relay`."""
        pools = self.roster.pools()
        pools |= {f"{RELAY} (leaving, {index})": pool for index, pool in enumerate(self._old_relays)}
        relay = self.dispatcher.relay
        return pools if relay is None else {**pools, RELAY: relay.pool}

    def ready(self) -> bool:
        """Whether a call could be served now."""
        if self.draining:
            return False
        return self.dispatcher.relay is not None or any(node.state in UP for node in self.nodes)

    async def look_first(self) -> None:
        """Hear once from every source of nodes and look once at every node, within a bound."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fleet.first_look(FIRST_LOOK_S))
            group.create_task(self.roster.discovery.first(FIRST_LOOK_S))
        await self.roster.settle()

    async def reload(self, settings: Settings) -> list[Change]:
        """Take in changed settings; what was different. Calls that came before go on as they were let in.

        Raises SettingsError, and then nothing has changed. What takes a restart is left as it is.
        """
        if self.started.server.public and not (settings.keys or self.started.server.allow_public_without_keys):
            raise SettingsError("keys: others can reach the address this router listens on; it needs keys")
        restart = [change for change in changes(self.started, settings) if not change.live]
        live = [change for change in changes(self.settings, settings) if change.live]
        self.roster.take(settings)
        relay = self._changed_relay(settings)
        self.settings = settings
        self.keyring.become(assembly.callers(settings))
        self.dispatcher.relay, self.dispatcher.patience = relay, assembly.patience(settings)
        self.spending.take(assembly.spend(settings))
        if self.spans is not None:
            self.spans.relay = settings.relay.url if settings.relay is not None else ""
        self.house.terms, self.house.relay_models = assembly.terms(settings), _relay_models(settings)
        for workload, limits in assembly.limits(settings).items():
            self.admission._queues[workload].limits = limits
        self.fleet.every_s, self.probe.timeout_s = settings.probe.every_s, settings.probe.timeout_s
        self.admission.policy = assembly.policy(settings)
        self.caring.take(settings)
        if self.batching is not None:
            self.batching.take(settings)
        if any(change.key.startswith("discovery.") for change in live):
            self.gpustack = assembly.gpustack(settings, self.client)
            self.roster.discovery.use(assembly.sources(settings, self._resolve, self.gpustack))
        if any(change.key.startswith("keys") for change in live):
            self.dashboard.renew()
        await self.roster.settle()
        return live + restart

    def _changed_relay(self, settings: Settings) -> Way | None:
        """The relay as it is to be; connections to a place that is no longer it are given up as they fall idle."""
        before = self.dispatcher.relay
        after = assembly.relay(settings, before)
        if after is not None:
            after.pool.bounds = assembly.bounds(settings)
        if before is not None and (after is None or after.pool is not before.pool):
            before.pool.retire()
            self.caring.forget(RELAY)
            self.watch.forget(RELAY)
            self._old_relays = [pool for pool in (*self._old_relays, before.pool) if pool.open]
        return after

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
        if self.spans is not None:
            await asyncio.to_thread(self.spans.shut)
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
            self.batching.runner.feed_soon()

    def _forget(self, name: str) -> None:
        self.owners.forget(name)
        self.caring.forget(name)
        self.watch.forget(name)

    def _taken_back(self, node: Node, permit: Permit, wasted: float) -> None:
        mode = self.admission.policy.mode
        self.metrics.taken_back(node.name, permit.phase, mode, wasted)
        if permit.taken and permit.call is not None:
            self.aborts.tell(node, permit.call.id)
        showing.taken_back(self.events, self.batching, node, permit, mode)
        log.debug("taken back", node=node.name, phase=permit.phase, mode=mode, wasted_tokens=round(wasted))

    def _dashboard(self) -> Dashboard:
        sources = Sources(
            fleet=self.fleet,
            admission=self.admission,
            history=self.history,
            events=self.events,
            clock=self.clock,
            wall=time.time,
            draining=lambda: self.draining,
            spend=lambda: self.spending.spend,
            relay_models=lambda: _relay_models(self.settings),
            callers=lambda: [key.name for key in self.settings.keys],
            lookout=None if self.batching is None else self.batching.lookout,
            trend=showing.trend(self.watch),
            canary=showing.control(self.caring),
        )
        return Dashboard(sources, self.keyring, self.caring.recycling)

    def _house(self) -> House:
        settings = self.settings
        return House(
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            tokens=self.tokens,
            estimates=self.estimates,
            metrics=self.metrics,
            keyring=self.keyring,
            terms=assembly.terms(settings),
            relay_models=_relay_models(settings),
            ready=self.ready,
            reader=self.reader,
            stale=self.roster.discovery.stale,
            owners=self.owners,
        )


@asynccontextmanager
async def running(settings: Settings, resolve: Resolve = resolved) -> AsyncIterator[App]:
    """A router that listens, for the length of the block. Leaving the block ends what still runs."""
    app = App(settings, resolve)
    listener = listening.listen(settings)
    app.port = listener.getsockname()[1]
    try:
        await app.open()
        server = listening.Server(listening.config(app.front, app.settings.server))
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(app.roster.run(), name="roster")]
            await app.look_first()
            serving = group.create_task(server.serve(sockets=[listener]), name="serve")
            watching += [
                group.create_task(app.fleet.watch(), name="watch"),
                group.create_task(always(app.watch.run, "diagnosis"), name="diagnose"),
                group.create_task(_measure_lag(app.metrics.loop_lag), name="lag"),
                group.create_task(always(app.aborts.run, "an abort"), name="aborts"),
                group.create_task(always(app.caring.run, "the care of nodes"), name="caring"),
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


async def look(settings: Settings) -> list[assembly.NodeReport]:
    """One look at every node, for `ebbtide check`."""
    app = App(settings)
    try:
        await app.fleet.first_look(3 * settings.probe.timeout_s + 1.0)
    finally:
        await app.close()
    return [assembly.report(entry, node, app.fleet) for entry, node in zip(settings.nodes, app.nodes, strict=True)]


def _relay_models(settings: Settings) -> tuple[str, ...]:
    return tuple(settings.relay.models) if settings.relay is not None else ()


async def _measure_lag(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        observe(max(0.0, loop.time() - due))
