"""What the dashboard and the care of nodes are told by the rest of a running router. Nothing here decides."""

from collections.abc import Callable

from router.api import cards
from router.api.board import Canary, Trend
from router.batching import Batching
from router.caring import Caring
from router.core.budget import Permit
from router.core.drift import ALARMS, MEANING, Diagnosis, Evidence, Verdict
from router.core.events import Events, Topic
from router.core.node import Node, State
from router.core.signals import Heard, Signals
from router.core.yielding import Mode
from router.fleet.watch import Watch

__all__ = ["acquaint", "control", "moved", "taken_back", "trend"]


def moved(events: Events) -> Callable[[Node, State], None]:
    """Who writes down that a node's state changed."""

    def tell(node: Node, before: State) -> None:
        events.add(Topic.NODE, f"{before} → {node.state}: {node.cause}", node=node.name)

    return tell


def taken_back(events: Events, batching: Batching | None, node: Node, permit: Permit, mode: Mode) -> None:
    """Write down a take-back."""
    call = permit.call
    line = batching.lookout.taken_back(call) if batching is not None and call is not None else None
    model, caller = ("", "") if call is None else (call.model, call.caller)
    events.add(Topic.TAKE_BACK, cards.take_back(node, permit, line, mode), node=node.name, model=model, caller=caller)


MOST_READINGS = 60
MOST_EVIDENCE = 12
SIZES = {"bytes": (2.0**30, "GiB"), "bytes/h": (2.0**20, "MiB/h")}


def trend(watch: Watch) -> Callable[[str], Trend | None]:
    """Who tells how a node has changed. It is made anew when there is a new reading or a new diagnosis."""
    kept: dict[str, tuple[int | None, Diagnosis, Trend | None]] = {}

    def of(name: str) -> Trend | None:
        found, signals = watch.diagnosis(name), watch.signals(name)
        if signals is None:
            kept.pop(name, None)
            return None
        known = kept.get(name)
        if known is None or known[0] != signals.fine.newest or known[1] is not found:
            known = kept[name] = signals.fine.newest, found, _trend(found, signals)
        return known[2]

    return of


def control(caring: Caring) -> Callable[[], Canary | None]:
    """Who tells the band of the relay's canaries, while there are any."""

    def now() -> Canary | None:
        band = caring.band.shown() if caring.canary.enabled else None
        return None if band is None else Canary(ttft_s=float(f"{band[0]:.4g}"), spread_s=float(f"{band[1]:.4g}"))

    return now


def acquaint(caring: Caring, watch: Watch, events: Events) -> None:
    """Let those who care for nodes know what is held of them, and others what they do and their canaries meet."""
    caring.recycling.told = lambda name, text: events.add(Topic.RECYCLE, text, node=name)

    def find(node: Node) -> Diagnosis | None:
        held = watch.diagnosis(node.name)
        return None if held.verdict is Verdict.UNKNOWN and held.rss_bytes is None else held

    caring.keeper.find = find
    caring.recycling.anew = watch.forget
    sampled = caring.canary.sampled

    def both(name: str, seconds: float) -> None:
        sampled(name, seconds)
        watch.observe(name, Heard(prompt_tokens=0, first_token_s=seconds))

    caring.canary.sampled = both


def _trend(found: Diagnosis, signals: Signals) -> Trend | None:
    memory = signals.fine.channel("rss_bytes")
    if found.verdict is Verdict.UNKNOWN and found.rss_bytes is None and not memory:
        return None
    return Trend(
        ttft_drift=None if found.ttft_drift_ratio is None else found.ttft_drift_ratio - 1.0,
        rss_bytes_an_hour=found.rss_slope_bytes_per_hour,
        rss_bytes=memory[:: -(len(memory) // MOST_READINGS + 1)][::-1],
        verdict=f"{found.verdict.replace('_', ' ')}: {MEANING[found.verdict]}" if found.verdict in ALARMS else "",
        limit_s=found.projected_limit_s,
        evidence=[_told(one) for one in found.evidence[:MOST_EVIDENCE]],
    )


def _told(one: Evidence) -> str:
    """A number that led to a verdict, in words."""
    size, unit = SIZES.get(one.unit, (1.0, one.unit))
    beside = "" if one.against is None else f" against {one.against / size:,.4g}"
    return f"{one.name} {one.value / size:,.4g} {unit}{beside}{f' ({one.what})' if one.what and beside else ''}"
