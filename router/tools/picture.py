"""A router's state as text: chat, queue, nodes, batches, relay, in the order somebody asks at night.

Rules: words before numbers; a colour never says anything alone; what is unknown is `-`; names that came from outside
lose what a terminal would obey.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.core.call import Outcome, Workload
from router.core.yielding import WaitReason
from router.tools.readings import Between, Scrape
from router.tools.stated import State

__all__ = ["Seen", "picture"]

CHAT = {"workload": str(Workload.INTERACTIVE)}
FAILED = frozenset((Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.FAILED, Outcome.CUT))
THEIRS = frozenset((Outcome.CLIENT_LEFT, Outcome.CLIENT_STALLED, Outcome.CALLER_ERROR))
FAILING = 0.02
"""A larger share of failed chats is no longer fine."""
RUNBOOKS = {"failing": "EbbtideChatFailing", "slow": "EbbtideChatSlow"}
"""Where it stands what to do about chat, by its verdict."""
BAR = 24
MEDIUM, WIDE = 100, 120
"""Columns from which more of a batch is shown; and of a node its engine, drift and memory."""
WORDS = {
    WaitReason.NO_ROOM: "no room on any node",
    WaitReason.CHAT_WAITS: "chat waits for room, and goes first",
    WaitReason.CHAT_PREFILL: "a chat's prompt is being read",
    WaitReason.CHAT_DECODE: "chat is being answered",
    WaitReason.CHAT_EXPECTED: "a chat is expected at any moment",
    WaitReason.BATCH_PREFILL: "another long prompt is being read",
    WaitReason.PACKING: "the node is kept free for chat",
    WaitReason.KEPT_ELSEWHERE: "another node has read part of it",
    WaitReason.ENGINE_QUEUE: "the engine has a queue of its own",
    WaitReason.NODES_DOWN: "no node is up",
    WaitReason.NODES_BUSY: "nodes refuse more for a moment",
}
"""Why calls wait, for people."""


@dataclass
class Seen:
    """What was seen last.

    `lost` is why the router cannot be asked now; `at` is unix seconds of the last scrape; `state` is what its dashboard
    tells; `span_s` how long rates are of, None for since the router's start.
    """

    url: str
    between: Between = field(default_factory=lambda: Between(Scrape(0.0), Scrape(0.0)))
    batches: Sequence[Mapping[str, Any]] | None = None
    state: State = field(default_factory=State)
    span_s: float | None = None
    at: float | None = None
    lost: str | None = None


def picture(seen: Seen, width: int = 140) -> RenderableType:
    """All of it, for so many columns."""
    if seen.at is None:
        return _head(seen)
    now, state = seen.between.after, seen.state
    parts = [_head(seen), _chat(seen), _queue(now, state), _nodes(seen.between, state, width)]
    if seen.batches:
        parts.append(_batches(seen.batches, state, width))
    return Group(*parts, *_relay(now, state), *_events(state.events(), width))


def _head(seen: Seen) -> RenderableType:
    clock = "never seen" if seen.at is None else time.strftime("%H:%M:%S", time.localtime(seen.at))
    if seen.lost is not None:
        when = clock if seen.at is None else f"last seen {clock}"
        return Text(f"{seen.url}  ROUTER LOST ({when}): {seen.lost}", "bold red")
    version = next((labels["version"] for labels, _ in seen.between.after.of("build_info")), "")
    return Text(f"ebbtide {version}  {seen.url}  live {clock}", "bold")


def _chat(seen: Seen) -> RenderableType:
    between = seen.between
    p50, p95 = (between.quantile(share, "time_to_first_token_seconds", **CHAT) for share in (0.5, 0.95))
    objective = max((value for _, value in between.after.of("ttft_objective_seconds")), default=None)
    ends = between.grown("calls_total", "outcome", **CHAT)
    ours = sum(count for end, count in ends.items() if end not in THEIRS)
    failed = sum(count for end, count in ends.items() if end in FAILED) / ours if ours else None
    everything = sum(between.grown("calls_total").values())
    relayed = sum(between.grown("relayed_total").values()) / everything if everything else None
    verdict, style = "fine", "green"
    if not ours:
        verdict, style = "quiet", "dim"
    elif failed is not None and failed > FAILING:
        verdict, style = "failing", "bold red"
    elif p95 is not None and objective is not None and p95 > objective:
        verdict, style = "slow", "bold yellow"
    span = "since its start" if seen.span_s is None else f"last {seen.span_s:.0f} s"
    first = f"first token p50 {_ms(p50)}, p95 {_ms(p95)}, objective {_ms(objective)}"
    rest = f"errors {_share(failed)}, calls on the relay {_share(relayed)}"
    said = Text.assemble("\nCHAT ", (verdict, style), f" ({span})\n  {first}\n  {rest}")
    return said.append(f"\n  what to do: docs/runbooks.md, {RUNBOOKS[verdict]}") if verdict in RUNBOOKS else said


def _queue(now: Scrape, state: State) -> RenderableType:
    text = Text("\nQUEUE")
    for workload in Workload:
        calls = now.one("queue_calls", workload=workload) or 0
        oldest = now.one("queue_oldest_seconds", workload=workload) or 0.0
        text.append(f"\n  {workload:<12}{calls:>6.0f} wait")
        if calls:
            text.append(f", the oldest {_span(oldest)}")
        waits = sorted(now.of("waiting_calls", workload=workload), key=lambda one: -one[1])
        for labels, count in waits:
            text.append(f"\n      {count:.0f}: {WORDS.get(WaitReason(labels['reason']), labels['reason'])}")
    lines = {labels["state"]: value for labels, value in now.of("batch_lines")}
    if lines:
        text.append(
            f"\n  lines       {lines.get('queued', 0):>6.0f} queued, {lines.get('running', 0):.0f} held by routers"
        )
        text.append(_deadlines(now, state))
    if now.one("batch_trouble"):
        text.append("\n  nothing begins: the store is lost or full", "bold red")
    return text


def _deadlines(now: Scrape, state: State) -> str:
    """How old the oldest batch is, when all lines are done, and how long the first window is open."""
    oldest, left, ends_at = now.one("batch_oldest_seconds"), now.one("batch_window_left_seconds"), state.ends_at()
    told = [f"the oldest batch {_span(oldest or 0.0)}"]
    if ends_at is not None:
        told.append(f"all done in {_span(max(0.0, ends_at - time.time()))}")
    if left is not None:
        told.append(f"the first window closes in {_span(max(0.0, left))}")
    return f"\n      {', '.join(told)}" if oldest else ""


def _nodes(between: Between, told: State, width: int) -> RenderableType:
    now, wide, notes = between.after, width >= WIDE, Text()
    columns = ("node", "state", "room", "calls", "p95 first", "p95 gap")
    table = _table(*columns, *(("engine", "drift", "memory an hour") if wide else ()))
    for name in now.values("node_up", "node"):
        state = next((labels["state"] for labels, value in now.of("node_state", node=name) if value), "-")
        if trouble := told.trouble(name):
            notes.append("\n  ").append(_plain(name)).append(": ").append(_plain(trouble, 300))
        calls = sum(value for _, value in now.of("node_phase_calls", node=name))
        first = between.quantile(0.95, "time_to_first_token_seconds", node=name, **CHAT)
        gap = between.quantile(0.95, "token_gap_seconds", node=name, **CHAT)
        style = "green" if state == "ready" else "bold red" if state == "down" else "yellow"
        cells: list[RenderableType] = [
            _plain(name, 16),
            Text(state, style),
            _bar(now, name),
            f"{calls:.0f}",
            _ms(first),
            _ms(gap),
        ]
        if wide:
            drift, growth = told.drift(name), told.growth(name)
            cells.append(_plain(told.engine(name), 16))
            cells.append("-" if drift is None else f"{drift:+.1%}")
            cells.append("-" if growth is None else f"{growth / 2**20:+.1f} MiB")
        table.add_row(*cells)
    legend = Text("room: c chat, D batch writes, P batch is read, x others, r kept for chat, . free", "dim")
    return Group(Text("\nNODES"), table, legend.append(notes))


def _bar(now: Scrape, node: str) -> Text:
    """Who holds a node's KV tokens, each part at least one mark wide."""
    capacity = now.one("node_room_tokens", node=node, kind="capacity")

    def held(workload: str, phase: str) -> float:
        return now.one("node_phase_tokens", node=node, workload=workload, phase=phase) or 0.0

    parts = (
        ("c", "cyan", held(Workload.INTERACTIVE, "prefill") + held(Workload.INTERACTIVE, "decode")),
        ("D", "blue", held(Workload.BATCH, "decode")),
        ("P", "magenta", held(Workload.BATCH, "prefill")),
        ("x", "yellow", now.one("node_room_tokens", node=node, kind="foreign") or 0.0),
    )
    if not capacity:
        return Text(f"{sum(size for _, _, size in parts):,.0f} tokens held, capacity unknown", "dim")
    bar = Text("[")
    for mark, style, size in parts:
        if size:
            bar.append(mark * max(1, min(BAR - len(bar) + 1, round(BAR * size / capacity))), style)
    free = max(0, BAR - len(bar) + 1)
    kept = min(free, round(BAR * (now.one("node_room_tokens", node=node, kind="reserve") or 0.0) / capacity))
    taken = sum(size for _, _, size in parts) / capacity
    return bar.append("." * (free - kept)).append("r" * kept, "dim").append(f"] {taken:4.0%}")


def _batches(batches: Sequence[Mapping[str, Any]], state: State, width: int) -> RenderableType:
    more, now = width >= MEDIUM, time.time()
    table = _table("batch", "status", "done", "failed", "window left", *(("taken back", "done in") if more else ()))
    for batch in batches:
        counts = batch.get("request_counts") or {}
        done, total = counts.get("completed", 0) + counts.get("failed", 0), counts.get("total", 0)
        left = batch.get("expires_at")
        over = batch.get("status") in ("completed", "failed", "expired", "cancelled")
        window = "-" if over or not left else _span(max(0.0, left - now))
        taken, ends_at = state.batch(str(batch.get("id")))
        cells = (_plain(batch.get("id")), _plain(batch.get("status")), f"{done}/{total}", str(counts.get("failed", 0)))
        ends = "-" if ends_at is None or over else _span(max(0.0, ends_at - now))
        table.add_row(*cells, window, *(("-" if taken is None else str(taken), ends) if more else ()))
    return Group(Text("\nBATCHES"), table)


def _relay(now: Scrape, state: State) -> list[RenderableType]:
    spent, cap, canary = now.one("relay_spend_day_usd"), now.one("relay_spend_cap_usd", cap="day"), state.canary()
    told, style = [], ""
    if spent is not None and cap is not None:
        told.append(f"{spent:.2f} of {cap:.2f} US dollars in 24 hours")
        style = "bold yellow" if spent > 0.8 * cap else ""
    if canary is not None:
        told.append(f"control {_ms(canary[0])} ± {_ms(canary[1])}")
    return [Text(f"\nRELAY {', '.join(told)}", style)] if told else []


def _events(events: Sequence[tuple[float, str]], width: int) -> list[RenderableType]:
    if not events:
        return []
    most = max(40, width - 12)
    lines = (f"\n  {time.strftime('%H:%M:%S', time.localtime(at))}  {_plain(text, most)}" for at, text in events)
    return [Text("\nEVENTS" + "".join(lines))]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _span(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _plain(text: object, most: int = 48) -> Text:
    return Text("".join(char for char in str(text) if char.isprintable())[:most])
