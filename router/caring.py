"""The care of nodes as a whole: drain and recycle, what is done about a diagnosis, canaries, and the door to it.

Rules: calls need none of it; it looks at the fleet and at what is held of it, and acts through the fleet's own words.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.routing import BaseRoute

from router import assembly
from router.api.admin import Admin
from router.api.auth import Keyring
from router.core.node import Node
from router.dispatch.control import Control
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.trip import RELAY
from router.fleet.canary import Band, Canary, Taster
from router.fleet.fleet import Fleet
from router.fleet.gpustack import Gpustack
from router.fleet.keeper import Keeper
from router.fleet.readmission import Readmission
from router.fleet.recycle import Recycling
from router.metrics import Family, Level, Metrics
from router.settings import Settings
from router.upstream.client import Client
from router.upstream.target import Target


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What the care of nodes works with. `clock` is that of the nodes."""

    fleet: Fleet
    dispatcher: Dispatcher
    client: Client
    targets: Mapping[str, Target]
    keyring: Keyring
    metrics: Metrics
    clock: Callable[[], float]
    gpustack: Callable[[], Gpustack | None]


def canary_families() -> list[Level]:
    """What canaries show at a scrape."""
    return [Level("canary_seconds", "First token of the last canary of a node or the relay.", "node")]


class Caring:
    """`run` it as a task. `keeper.find` and `canary.sampled` are for who measures; `recycling` is the operator's.

    `band` is what the relay's canaries took of late.
    """

    def __init__(self, settings: Settings, needed: Needed) -> None:
        self._client, self._dispatcher, self._gpustack = needed.client, needed.dispatcher, needed.gpustack
        admission = needed.dispatcher.admission
        taster = Taster(needed.client, needed.targets)
        self.recycling = Recycling(needed.fleet, taster, admission.empty, admission.changed, clock=needed.clock)
        self.recycling.relayed = self._relayed
        self.keeper = Keeper(needed.fleet, self.recycling, clock=needed.clock)
        self._readmission = Readmission(needed.fleet.nodes, taster, admission.changed, needed.clock)
        canary = settings.care.canary
        [self._first_tokens] = canary_families()
        self.band = Band(needed.clock)
        self._fleet, self._clock = needed.fleet, needed.clock
        self._bands: dict[str, Band] = {}
        self.canary = Canary(
            needed.fleet.nodes,
            taster,
            Control(needed.dispatcher, needed.clock).ask,
            self._sampled,
            every_s=canary.every_s,
            relay_every_s=canary.relay_every_s,
        )
        self.admin = Admin(
            needed.fleet,
            self.recycling,
            needed.keyring,
            alone=not settings.server.public,
            clock=needed.clock,
            held=self._held,
        )
        for families in (self.recycling.families, self.keeper.families, self.families):
            needed.metrics.also(families)
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Take in changed settings."""
        self.recycling.care = assembly.care(settings)
        self.recycling.hook = assembly.hook(settings, self._client, self._gpustack())
        self.recycling.hook_s = settings.care.recycle.hook_s
        self.canary.enabled = settings.care.canary.enabled
        self.canary.every_s = settings.care.canary.every_s
        self.canary.relay_every_s = settings.care.canary.relay_every_s

    def routes(self) -> list[BaseRoute]:
        """Where an operator asks for it."""
        return self.admin.routes()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.recycling.run(), name="recycling")
            group.create_task(self.keeper.run(), name="keeper")
            group.create_task(self._readmission.run(), name="readmission")
            group.create_task(self.canary.run(), name="canary")

    def families(self) -> list[Family]:
        """What a scrape shows."""
        return [self._first_tokens]

    def forget(self, name: str) -> None:
        """A node is gone, or the relay is another one."""
        self._bands.pop(name, None)
        if name == RELAY:
            self.band.clear()
            self._compare()
        self.recycling.forget(name)
        self._first_tokens.forget("node", name)

    def _sampled(self, name: str, seconds: float) -> None:
        if name != RELAY and name not in self._fleet.by_name:
            return  # it went while it was asked
        self._first_tokens.set(seconds, (name,))
        band = self.band if name == RELAY else self._bands.setdefault(name, Band(self._clock))
        band.add(seconds)
        self._compare()

    def _compare(self) -> None:
        """Say of each node whether it answers the same call sooner than the relay."""
        relay = self.band.shown()
        for node in self._fleet.nodes:
            band = self._bands.get(node.name)
            own = band.shown() if band is not None else None
            node.outruns_relay = relay is not None and own is not None and own[0] < relay[0]

    def _relayed(self) -> tuple[str, ...]:
        relay = self._dispatcher.relay
        return () if relay is None else tuple(relay.models)

    def _held(self, node: Node) -> dict[str, object]:
        finding, record = self.keeper.find(node), self.recycling.records.get(node.name)
        diagnosis = None
        if finding is not None:
            diagnosis = {
                "verdict": finding.verdict,
                "rss_bytes": finding.rss_bytes,
                "projected_limit_s": finding.projected_limit_s,
                "evidence": finding.evidence,
            }
        return {
            "diagnosis": diagnosis,
            "recycle_due": self.keeper.due.get(node.name),
            "last_recycle": record.outcome if record is not None else None,
        }
