"""What the dashboard shows, as one JSON-like state, read from the objects that know it.

Rules:
- Building it changes nothing and asks nobody: the store was asked before (`Lookout`), nodes by their probes.
- Two readers who ask for the same `Wish` get the same state. A wish narrows it to a model, a pool, a node, a key.
- Who is not an administrator sees what `/metrics` tells anybody, and of callers and batches only their own.
- No prompt, no answer and no key is in it. Times are unix seconds; names end in their units.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec

from router.api.cards import Clock, card
from router.core.call import Workload
from router.core.events import Events
from router.core.node import UP, Node
from router.core.spend import Spend
from router.dispatch.admission import Admission
from router.dispatch.history import RECENT, SLOT_S, SLOTS, History, Kind, Slot, Tally
from router.dispatch.queue import Waiter
from router.dispatch.trip import RELAY
from router.fleet.fleet import Fleet
from router.jobs.lookout import Lookout
from router.jobs.store import Progress

T = TypeVar("T")
Told = dict[str, Any]
FAILING = 0.02
"""Share of chat that fails from which chat is said to fail."""
MOST_FAILURES = 6
"""Places and ways of failing that are told."""
MOST_NAMES = 500
"""Names a filter offers."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader wants to see: empty is everything. `only` is set for who may see that caller's things alone."""

    model: str = ""
    pool: str = ""
    node: str = ""
    key: str = ""
    only: str | None = None

    def shows(self, model: str | None, caller: str) -> bool:
        """Whether something of that model and caller is shown."""
        return self.model in ("", model) and self.key in ("", caller)

    def counts(self, kind: Kind) -> bool:
        """Whether calls of that kind are counted."""
        return self.shows(kind.model, kind.caller) and self.node in ("", kind.node)

    def owns(self, caller: str) -> bool:
        """Whether a caller's name may be told."""
        return self.only is None or self.only == caller


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How a node has changed: first tokens against its own past (a share), memory an hour, and its last readings.

    `rss_bytes` are pairs: seconds of a steady clock, and what it was then. `verdict` says in words what is wrong, empty
    if nothing is; `limit_s` when growing memory reaches its limit; `evidence` are the numbers, in words.
    """

    ttft_drift: float | None = None
    rss_bytes_an_hour: float | None = None
    rss_bytes: Sequence[tuple[float, float]] = ()
    verdict: str = ""
    limit_s: float | None = None
    evidence: Sequence[str] = ()


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """How long the relay takes for the same small call: the middle and the spread of its first token."""

    ttft_s: float
    spread_s: float


def _no_trend(_: str) -> Trend | None:
    return None


def _no_spend() -> Spend | None:
    return None


def _no_canary() -> Canary | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Who knows what. `clock` is steady, `wall` unix seconds; `callers` gives the names of keys there are now."""

    fleet: Fleet
    admission: Admission
    history: History
    events: Events
    clock: Callable[[], float]
    wall: Callable[[], float]
    draining: Callable[[], bool]
    spend: Callable[[], Spend | None] = _no_spend
    relay_models: Callable[[], Sequence[str]] = tuple
    callers: Callable[[], Sequence[str]] = tuple
    lookout: Lookout | None = None
    trend: Callable[[str], Trend | None] = _no_trend
    canary: Callable[[], Canary | None] = _no_canary


class Board:
    """The state, for one wish. Slots that are over are summed once."""

    def __init__(self, sources: Sources, wish: Wish) -> None:
        self._from, self._wish = sources, wish
        self._clock = Clock(sources.clock, sources.wall)
        self._points: dict[str, list[Any]] = {}
        self._shown: dict[str, tuple[Progress, Told]] = {}
        self._trends: dict[str, tuple[Trend, Told]] = {}
        self._version = version("ebbtide")

    async def state(self) -> Told:
        """How everything stands now. Others get their turn while a long list is made."""
        source, wish = self._from, self._wish
        self._clock.follow()
        nodes = [node for node in source.fleet.nodes if self._chosen(node)]
        waiters = [waiter for waiter in source.admission.waiters() if self._waits(waiter)]
        recent, relayed = Tally(), Tally()
        for slot in source.history.recent():
            recent.add(slot.sum(lambda kind: kind.workload is Workload.INTERACTIVE and wish.counts(kind)))
            relayed.add(slot.sum(lambda kind: kind.node == RELAY and wish.counts(kind)))
        chats = [waiter for waiter in waiters if waiter.call.workload is Workload.INTERACTIVE]
        return {
            "router": {"version": self._version, "draining": source.draining(), "store_trouble": self._trouble()},
            "choices": self._choices(),
            "chat": self._chat(nodes, recent, relayed, len(chats)),
            "queue": self._queue(waiters, len(chats)),
            "waits": self._why(waiters),
            "nodes": {node.name: self._card(node) async for node in _in_turns(nodes, 8)},
            "batches": self._batches(),
            "relay": self._relay(relayed),
            "events": self._events(),
            "series": await self._series(),
        }

    def _chosen(self, node: Node) -> bool:
        wish = self._wish
        pool = wish.pool in ("", *node.spec.pools)
        return pool and wish.node in ("", node.name) and (not wish.model or node.serves(wish.model))

    def _waits(self, waiter: Waiter) -> bool:
        call = waiter.call
        return self._wish.shows(call.model, call.caller) and self._wish.pool in ("", call.workload)

    def _trouble(self) -> str | None:
        return None if self._from.lookout is None else self._from.lookout.trouble

    def _choices(self) -> dict[str, list[str]]:
        source = self._from
        models = dict.fromkeys(model for node in source.fleet.nodes for model in node.models())
        models |= dict.fromkeys(source.relay_models())
        return {
            "models": list(models)[:MOST_NAMES],
            "pools": [str(workload) for workload in Workload],
            "nodes": [node.name for node in source.fleet.nodes],
            "keys": [name for name in source.callers() if self._wish.owns(name)][:MOST_NAMES],
        }

    def _chat(self, nodes: Sequence[Node], recent: Tally, relayed: Tally, waiting: int) -> Told:
        objective_s, stated = self._objective(nodes)
        p95_s = recent.quantile_s(0.95)
        told = {
            "calls": recent.calls,
            "failed": recent.failed,
            "failures": self._failures(),
            "ttft_p50_s": _short(recent.quantile_s(0.5)),
            "ttft_p95_s": _short(p95_s),
            "objective_s": _short(objective_s),
            "objective_stated": stated,
            "relayed": relayed.calls,
            "waiting": waiting,
            "minutes": RECENT * SLOT_S // 60,
        }
        return {"verdict": self._verdict(nodes, recent, p95_s, objective_s), **told}

    def _failures(self) -> list[Told]:
        """Where chat failed in the last five minutes, and how: most first."""
        sums: dict[tuple[str, str], int] = {}
        for slot in self._from.history.recent():
            for tally in slot.kinds.values():
                if tally.failed and tally.kind.workload is Workload.INTERACTIVE and self._wish.counts(tally.kind):
                    for end, count in tally.ends.items():
                        sums[tally.kind.node, end] = sums.get((tally.kind.node, end), 0) + count
        most = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:MOST_FAILURES]
        return [{"node": node, "outcome": str(end), "calls": count} for (node, end), count in most]

    def _verdict(self, nodes: Sequence[Node], recent: Tally, p95_s: float | None, objective_s: float | None) -> str:
        up = any(node.state in UP for node in nodes)
        if not up:
            return "relay_only" if self._from.relay_models() else "down"
        if not recent.calls:
            return "quiet"
        if recent.failed > FAILING * recent.calls:
            return "failing"
        if p95_s is not None and objective_s is not None and p95_s > objective_s:
            return "slow"
        return "fine"

    def _objective(self, nodes: Sequence[Node]) -> tuple[float | None, bool]:
        """The first token chat should have, and whether the operator stated it; else the slowest node's own."""
        stated = self._from.admission.policy.ttft_p95_s
        if stated is not None:
            return stated, True
        chat = [node for node in nodes if Workload.INTERACTIVE in node.spec.pools]
        return max((own for node in chat if (own := node.pace.objective_s(None)) is not None), default=None), False

    def _queue(self, waiters: Sequence[Waiter], chats: int) -> Told:
        shown = [row for row in self._rows() if row.left]
        ends = [row.ends_at for row in shown if row.ends_at is not None]
        asked = [waiter.asked_at for waiter in waiters]
        return {
            "interactive": chats,
            "batch": len(waiters) - chats,
            "lines": sum(row.left for row in shown),
            "lines_running": sum(row.running for row in shown),
            "batches": len(shown),
            "oldest_call_at": self._clock.unix(min(asked)) if asked else None,
            "oldest_batch_at": min((row.created_at for row in shown), default=None),
            "ends_at": round(max(ends)) if ends else None,
            "window_at": min((row.expires_at for row in shown), default=None),
            "lines_a_minute": 0 if self._from.lookout is None else self._from.lookout.overview.done_a_minute,
        }

    def _why(self, waiters: Sequence[Waiter]) -> list[Told]:
        """Why calls waited in the last five minutes, as shares of all waiting, and how many wait for it now."""
        sums: dict[tuple[str, str], int] = {}
        for slot in self._from.history.recent():
            for wait, seen in slot.waits.items():
                if self._wish.shows(wait.model, wait.caller) and self._wish.pool in ("", wait.workload):
                    key = (str(wait.workload), wait.reason)
                    sums[key] = sums.get(key, 0) + seen
        now: dict[tuple[str, str], int] = {}
        for waiter in waiters:
            key = (str(waiter.call.workload), str(waiter.reason))
            now[key] = now.get(key, 0) + 1
        whole = sum(sums.values())
        keys = sorted(sums.keys() | now.keys(), key=lambda key: (-sums.get(key, 0), key))
        return [
            {
                "workload": key[0],
                "reason": str(key[1]),
                "share": round(sums.get(key, 0) / whole, 3) if whole else 0.0,
                "now": now.get(key, 0),
            }
            for key in keys
        ]

    def _card(self, node: Node) -> Told:
        source = self._from
        told = card(node, self._clock, self._wish.owns)
        told["trend"] = self._trend(node.name)
        told["trail_s"] = [[at, _short(seconds)] for at, seconds in source.history.trail(node.name)]
        told["trouble"] = source.fleet.trouble.get(node.name)
        told["blind"] = node.name in source.fleet.blind
        return told

    def _trend(self, name: str) -> Told | None:
        """How a node has changed; the same object while nothing did."""
        trend = self._from.trend(name)
        if trend is None:
            self._trends.pop(name, None)
            return None
        known = self._trends.get(name)
        if known is None or known[0] is not trend:
            known = self._trends[name] = trend, msgspec.to_builtins(trend)
        return known[1]

    def _rows(self) -> Iterable[Progress]:
        lookout, wish = self._from.lookout, self._wish
        if lookout is None or wish.pool == Workload.INTERACTIVE:
            return []
        rows = lookout.overview.batches
        return [row for row in rows if wish.shows(row.model or wish.model, row.caller) and wish.owns(row.caller)]

    def _batches(self) -> Told | None:
        lookout = self._from.lookout
        if lookout is None:
            return None
        told, kept = {}, self._shown
        for place, row in enumerate(self._rows()):
            taken = lookout.taken[row.id]
            old = kept.get(row.id)
            if old is not None and old[0] is row and old[1]["taken_back"] == taken and old[1]["place"] == place:
                told[row.id] = old
            else:
                told[row.id] = row, {**msgspec.structs.asdict(row), "place": place, "taken_back": taken}
        self._shown = told
        return {name: shown for name, (_, shown) in told.items()}

    def _relay(self, relayed: Tally) -> Told | None:
        source = self._from
        models = source.relay_models()
        if not models:
            return None
        canary = source.canary()
        told: Told = {
            "models": list(models)[:MOST_NAMES],
            "calls": relayed.calls,
            "ttft_p50_s": _short(relayed.quantile_s(0.5)),
            "canary": None if canary is None else msgspec.to_builtins(canary),
        }
        spend = source.spend()
        if spend is not None:
            told["day_usd"] = round(spend.day(source.wall()), 4)
            told["batches_usd"] = round(spend.day(source.wall(), batch=True), 4)
            told["cap_usd"] = spend.usd_a_day
        return told

    def _events(self) -> dict[str, list[Any]]:
        wish = self._wish
        return {
            str(entry.number): [entry.at, str(entry.topic), entry.text, entry.node]
            for entry in self._from.events
            if wish.node in ("", entry.node)
            and (not entry.model or wish.model in ("", entry.model))
            and (not entry.caller or (wish.owns(entry.caller) and wish.key in ("", entry.caller)))
        }

    async def _series(self) -> dict[str, list[Any]]:
        slots = self._from.history.slots()
        kept = {}
        many = 30 if len(self._points) < len(slots) - 2 else SLOTS
        async for slot in _in_turns(slots[:-1], many):
            key = str(slot.at)
            kept[key] = self._points.get(key) or self._point(slot)
        self._points = kept
        return {**kept, str(slots[-1].at): self._point(slots[-1])} if slots else {}

    def _point(self, slot: Slot) -> list[Any]:
        """Waiting calls of each pool, lines left by batch, first tokens, tokens a second, failed calls, of one slot."""
        wish = self._wish
        chat = slot.sum(lambda kind: kind.workload is Workload.INTERACTIVE and wish.counts(kind))
        batch = slot.sum(lambda kind: kind.workload is Workload.BATCH and wish.counts(kind))
        waits = dict.fromkeys(Workload, 0)
        for wait, seen in slot.waits.items():
            if wish.shows(wait.model, wait.caller):
                waits[wait.workload] += seen
        looks = max(1, slot.looks)
        return [
            round(waits[Workload.INTERACTIVE] / looks, 1),
            round(waits[Workload.BATCH] / looks, 1),
            self._lines(slot.lines),
            _short(chat.quantile_s(0.5)),
            _short(chat.quantile_s(0.95)),
            round(chat.output_tokens / SLOT_S, 1),
            round(batch.output_tokens / SLOT_S, 1),
            chat.failed,
        ]

    def _lines(self, lines: Mapping[str, int]) -> Mapping[str, int]:
        wish = self._wish
        if wish.only is None and not wish.key and not wish.model:
            return lines
        mine = {row.id for row in self._rows()}
        return {batch: left for batch, left in lines.items() if batch in mine}


async def _in_turns(items: Iterable[T], many: int) -> AsyncIterator[T]:
    """The same items; after so many of them, whoever else wants the loop has a turn."""
    for index, item in enumerate(items, 1):
        yield item
        if not index % many:
            await asyncio.sleep(0)


def _short(seconds: float | None) -> float | None:
    """Four digits are enough to look at, and a number that has not changed is not sent again."""
    return None if seconds is None else float(f"{seconds:.4g}")
