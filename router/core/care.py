"""When a node is to be recycled, and what speaks against it. What to do is decided here, without a clock or I/O.

Rules: an operator's word is bound by what protects callers (never the last node, never too many at once), and only
unless forced; what the router decides by itself also keeps its distance in time and gives up where it does not help.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from router.core.detectors import Evidence
from router.core.node import Node
from router.core.states import OUT, State

__all__ = ["SLOWER", "Care", "Finding", "Record", "hindrance", "wanted"]

SLOWER = frozenset(("memory_growth_with_drift", "decode_decay", "cache_collapse", "kv_pressure", "placement_or_noise"))
"""Verdicts that say that this node alone became slower: chat is better off elsewhere."""
UNTOLD = frozenset(("unknown",))
"""Verdicts that say nothing: what was held before stays."""
GROWING = "memory_growth"
"""How verdicts begin that say that memory grows."""
WELL = frozenset((State.READY, State.BUSY, State.DEGRADED))
"""States in which a node carries its part."""


class Finding(Protocol):
    """What is held of a node, and the numbers that led to it. Seconds and bytes; None is unknown."""

    @property
    def verdict(self) -> str: ...
    @property
    def evidence(self) -> Sequence[Evidence]: ...
    @property
    def projected_limit_s(self) -> float | None: ...
    @property
    def rss_bytes(self) -> float | None: ...


class Care(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows. `enabled` lets the router recycle by itself; without it, it only says when it would.

    A node is due `before_limit_s` before its memory is at its limit, or at `rss_limit_bytes`. `cooldown_s` lies between
    two recycles of one node; after `failures` in a row it is left alone.
    """

    enabled: bool = False
    max_unavailable: int = 1
    drain_s: float = 600.0
    settle_s: float = 2.0
    ready_s: float = 900.0
    before_limit_s: float = 3600.0
    rss_limit_bytes: float | None = None
    cooldown_s: float = 3600.0
    failures: int = 2


class Record(msgspec.Struct):
    """What recycling one node came to: when it ended last, how many in a row failed, and how the last one ended."""

    ended_at: float = -1e9
    failures: int = 0
    outcome: str = ""


def wanted(finding: Finding, care: Care) -> str | None:
    """Why a node should be recycled; None if it should not."""
    rss, left, limit = finding.rss_bytes, finding.projected_limit_s, care.rss_limit_bytes
    if limit is not None and rss is not None and rss >= limit:
        return f"its memory is {_gib(rss)} GiB, the limit is {_gib(limit)} GiB"
    if finding.verdict.startswith(GROWING) and left is not None and left < care.before_limit_s:
        return f"its memory grows and reaches its limit in {left / 60:.0f} minutes"
    return None


def hindrance(node: Node, nodes: Sequence[Node], relayed: Collection[str], care: Care) -> str | None:
    """Why a node may not be taken out now, for the sake of callers. `relayed` are models a relay answers for."""
    out = [other for other in nodes if other is not node and other.state not in (*WELL, State.STARTING)]
    if len(out) >= care.max_unavailable:
        names = ", ".join(sorted(other.name for other in out))
        return f"{names} is not there, and at most {care.max_unavailable} may be out at a time (care.max_unavailable)"
    for model in node.models():
        if model in relayed:
            continue
        others = [other for other in nodes if other is not node and other.state in WELL and other.serves(model)]
        for pool in sorted(node.spec.pools):
            if not any(pool in other.spec.pools for other in others):
                return f"it is the last usable node of the {pool} pool for {model}, and no relay answers for it"
    return None


def reluctance(record: Record, care: Care, now: float) -> str | None:
    """Why the router does not recycle a node by itself again."""
    if record.failures >= care.failures:
        return f"recycling failed {record.failures} times in a row: somebody has to look ({record.outcome})"
    left = record.ended_at + care.cooldown_s - now
    return f"it was recycled a short while ago; not again for {left:.0f} s" if left > 0 else None


def taken_out(node: Node) -> bool:
    """Whether somebody has the node out."""
    return node.state in OUT


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
