"""The batch room as a whole: the store, what is asked of it over HTTP, and the loops that work at it.

Rules: chat needs none of it. It opens before the router listens and closes after the last call; on the way out its
runner puts back what runs before anything else is told to stop.
"""

import asyncio
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from starlette.routing import BaseRoute

from router import assembly
from router.api.auth import Keyring
from router.api.batches import Batches
from router.api.desk import Bounds, Desk, Quota
from router.api.files import Files
from router.api.uploads import Uploads
from router.core.estimate import Estimates
from router.core.events import Events, Topic
from router.core.lateness import LateTerms
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.history import History
from router.dispatch.spending import Spending
from router.errors import SettingsError, StoreError
from router.fleet.fleet import Fleet
from router.jobs.accounts import Accounts
from router.jobs.calls import Calls
from router.jobs.checks import Rules
from router.jobs.gauges import Gauges
from router.jobs.hurry import Hurry
from router.jobs.intake import Allowance, Intake
from router.jobs.lookout import Lookout
from router.jobs.outlet import Outlet
from router.jobs.reasons import Reasons
from router.jobs.runner import Runner, Terms
from router.jobs.store import Event, Store
from router.jobs.upkeep import Upkeep, always
from router.jobs.webhooks import Webhooks
from router.metrics import Metrics
from router.settings import Settings
from router.settings.sections import QuotaEntry
from router.tokens import Tokens
from router.upstream.client import Hooks
from router.upstream.reach import Reach


@dataclass(frozen=True, kw_only=True)
class Corridor:
    """What lines of batches share with people's calls, and their senders with people."""

    keyring: Keyring
    dispatcher: Dispatcher
    fleet: Fleet
    tokens: Tokens
    estimates: Estimates
    spending: Spending
    metrics: Metrics
    history: History
    events: Events


class Batching:
    """One router's batch room. `open` it, `run` it as a task, `rest` before the corridor closes, `close` it last."""

    def __init__(self, store: Store, settings: Settings, corridor: Corridor) -> None:
        batches = settings.batches
        self.store = store
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lines")
        self._quotas = _quotas(settings)
        admission, fleet = corridor.dispatcher.admission, corridor.fleet
        self._calls = Calls(
            fleet,
            corridor.tokens,
            corridor.estimates,
            self._reader,
            long_prompt_tokens=settings.classify.long_prompt_tokens,
        )
        self.runner = Runner(
            store=store,
            dispatcher=corridor.dispatcher,
            fleet=fleet,
            calls=self._calls,
            terms=Terms(lease_s=batches.lease_s, retries=batches.retries),
        )
        self._events = corridor.events
        self._known = Known(settings, fleet)
        self._reasons = Reasons(runner=self.runner, fleet=fleet, admission=admission)
        self._build_loops(settings, corridor)
        self._build_desk(settings, corridor)
        self._running: asyncio.Task[None] | None = None

    def _build_loops(self, settings: Settings, corridor: Corridor) -> None:
        """What goes on beside the runner."""
        store, batches = self.store, settings.batches
        self.lookout = Lookout(store, self.runner, corridor.history)
        self._outlet = _outlet(settings, corridor, self.runner)
        self._hurry = Hurry(store=store, runner=self.runner)
        self._accounts = Accounts(store=store, spend=lambda: corridor.spending.spend)
        self._gauges = Gauges(store, self.runner, self._known.served)
        corridor.metrics.also(self._gauges.families)
        self._upkeep = Upkeep(
            store=store,
            reasons=self._reasons.all,
            ended=self._ended,
            every_s=batches.sweep_s,
            keep_s=batches.keep_s,
        )
        rules = Rules(models=self._known.model, several_models=batches.several_models, lines=batches.max_lines)
        self._intake = Intake(
            store=store, rules=rules, reader=self._reader, allowance=lambda caller: _allowance(self._quotas.get(caller))
        )
        self._hooks = Hooks()
        self._webhooks = Webhooks(
            store=store,
            receivers=assembly.receivers(settings),
            hooks=self._hooks,
            reach=Reach(allow_private=settings.webhooks.allow_private),
            metrics=corridor.metrics,
            timeout_s=settings.webhooks.timeout_s,
            retry_s=settings.webhooks.retry_s,
        )

    def _build_desk(self, settings: Settings, corridor: Corridor) -> None:
        """Where batches are asked for."""
        self._desk = Desk(
            store=self.store,
            keyring=corridor.keyring,
            terms=assembly.terms(settings),
            clock=time.time,
            bounds=_bounds(settings),
            quota=lambda caller: _quota(self._quotas.get(caller)),
            webhook=self._webhooks.receivers.asked,
            waits=self._reasons.of,
        )

    @classmethod
    async def open(cls, settings: Settings, corridor: Corridor) -> Self:
        """Open the store and bring its schema up to date. Raises SettingsError when it cannot be used."""
        name = f"{socket.gethostname()}:{settings.server.port}"
        try:
            store = await Store.open(settings.store.url.get_secret_value(), router=name)
        except (StoreError, OSError) as error:
            raise SettingsError(f"store.url: the database cannot be opened: {error}") from error
        batching = cls(store, settings, corridor)
        with suppress(StoreError):
            await batching._accounts.balance()
        return batching

    def take(self, settings: Settings) -> None:
        """Take in what of changed settings takes effect without a restart."""
        self._quotas = _quotas(settings)
        self._calls.long_prompt_tokens = settings.classify.long_prompt_tokens
        self._desk.terms = assembly.terms(settings)
        self._known.take(settings)
        if self._outlet is not None:
            self._outlet.models, self._outlet.kept_in = _leaving(settings), _kept_in(settings)

    def routes(self) -> list[BaseRoute]:
        """Files, uploads and batches, without version."""
        return [route for room in (Files, Uploads, Batches) for route in room(self._desk).routes()]

    async def run(self) -> None:
        """Work until cancelled. Each loop survives whatever goes wrong in it."""
        async with asyncio.TaskGroup() as loops:
            self._running = loops.create_task(always(self.runner.run), name="jobs runner")
            loops.create_task(always(self._upkeep.run), name="jobs upkeep")
            loops.create_task(always(self._intake.run), name="jobs intake")
            loops.create_task(always(self._gauges.run), name="jobs gauges")
            loops.create_task(always(self._hurry.run), name="jobs hurry")
            loops.create_task(always(self.lookout.run), name="jobs lookout")
            if self._outlet is not None:
                loops.create_task(always(self._outlet.run), name="jobs outlet")
            loops.create_task(always(self._accounts.run), name="jobs accounts")
            loops.create_task(always(self._webhooks.run), name="jobs webhooks")

    def _ended(self, event: Event) -> None:
        self._gauges.ended(event)
        lines = f"{event.completed:,} of {event.total:,} lines done, {event.failed:,} failed"
        self._events.add(Topic.BATCH, f"{event.batch_id} is {event.state}: {lines}", caller=event.caller)

    async def rest(self) -> None:
        """Run no more lines: what runs is ended upstream and put back, uncharged."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def close(self) -> None:
        """Let go of the store."""
        with suppress(StoreError):
            await self._accounts.balance()
        await self.store.close()
        await self._hooks.close()
        self._reader.shutdown(cancel_futures=True)


class Known:
    """Which models a line may ask for: those nodes told of, down or not, and those the operator names."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._fleet = fleet
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """What the operator names from now on."""
        self._named = frozenset(_leaving(settings)) | {model for entry in settings.nodes for model in entry.models}

    def served(self, name: str) -> bool:
        """Whether somebody serves it."""
        return name in self._named or bool(self._fleet.serving(name))

    def model(self, name: str) -> bool:
        """Whether somebody serves it, or may once it tells what it serves."""
        if self.served(name):
            return True
        return any(not node.spec.models and not node.facts.models for node in self._fleet.nodes)


def _outlet(settings: Settings, corridor: Corridor, runner: Runner) -> Outlet | None:
    """The way out for lines of late batches, if the operator opens it."""
    allowed = settings.batches.relay
    if not allowed.enabled or settings.relay is None:
        return None
    return Outlet(
        store=runner.store,
        runner=runner,
        dispatcher=corridor.dispatcher,
        spending=corridor.spending,
        terms=LateTerms(last_share=allowed.last_share, within_s=allowed.within_s),
        models=_leaving(settings),
        kept_in=_kept_in(settings),
        calls=allowed.calls,
    )


def _leaving(settings: Settings) -> Collection[str]:
    """Models whose lines may leave the house."""
    return settings.relay.models if settings.relay is not None and settings.batches.relay.enabled else ()


def _kept_in(settings: Settings) -> frozenset[str]:
    """Callers whose lines may not."""
    return frozenset(key.name for key in settings.keys if not key.fallback)


def _quotas(settings: Settings) -> dict[str, QuotaEntry]:
    return {key.name: key.quota for key in settings.keys if key.quota is not None}


def _bounds(settings: Settings) -> Bounds:
    files, batches = settings.files, settings.batches
    return Bounds(
        file_bytes=files.max_bytes,
        batch_file_bytes=batches.max_file_bytes,
        batch_file_s=files.batch_keep_s,
        output_s=batches.output_keep_s,
    )


def _quota(entry: QuotaEntry | None) -> Quota:
    return Quota() if entry is None else Quota(files=entry.files, bytes=entry.bytes, batches=entry.batches)


def _allowance(entry: QuotaEntry | None) -> Allowance:
    return Allowance() if entry is None else Allowance(lines=entry.lines, tokens=entry.tokens)
