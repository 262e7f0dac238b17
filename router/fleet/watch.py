"""What is seen of every node over time, and what it means: signals in rings, and a diagnosis now and then.

Signals come from three sides: calls tell what they met (`observe`), looks tell load and the engine's counters
(`looked`), and an agent beside the engine tells memory. Rules: calls and looks only leave numbers behind, in lists with
a bound; one loop makes a sample of them every `SAMPLE_S`; a diagnosis is worked out in a thread, for a few milliseconds
each; an agent that is slow or gone costs its own numbers and nothing else. Nothing here is ever waited for by a call.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from router.core.drift import ALARMS, Course, Diagnosis, Verdict
from router.core.robust import median
from router.core.signals import HOUR_S, Counters, Heard, Sample, Signals
from router.errors import ProbeFailed
from router.fleet.exposition import read_samples
from router.fleet.probe import Look
from router.metrics import Level
from router.upstream.client import Client

__all__ = ["RELAY", "Memory", "Watch", "read_agent"]

RELAY = "relay"
SAMPLE_S = 15.0
DIAGNOSE_H = 1 / 12
"""Hours between two diagnoses of a node."""
AGENT_S = 2.0
"""Longest wait for an agent."""
STALE_S = 60.0
"""An agent whose numbers are older has stopped reading."""
MOST_CALLS = 512
"""Calls kept between two samples; of more, the latest."""
FIXED_TOKENS = 200
"""Prompt tokens that stand for what every first token costs, so that shorter prompts do not look like a slower node."""
SAME_START_S = 2.0
"""Two starts closer than this are the same: engines round it."""

AGENT_NAMES = {
    "rss_bytes": ("ebbtide_agent_tree_rss_bytes", "process_resident_memory_bytes"),
    "tree_gpu_bytes": ("ebbtide_agent_tree_gpu_memory_bytes",),
    "gpu_bytes": ("ebbtide_agent_gpu_memory_bytes",),
    "limit_bytes": ("ebbtide_agent_memory_limit_bytes",),
    "started_at": ("process_start_time_seconds",),
    "age_s": ("ebbtide_agent_age_seconds",),
}
"""What is read of an agent, by names in order of preference. Any exporter of the standard names will do."""

log = logging.getLogger("ebbtide.watch")


class Memory:
    """What an agent told. None is unknown."""

    __slots__ = ("gpu_bytes", "limit_bytes", "rss_bytes", "started_at")

    def __init__(self, told: Mapping[str, float]) -> None:
        self.rss_bytes = told.get("rss_bytes")
        self.gpu_bytes = told.get("tree_gpu_bytes", told.get("gpu_bytes"))
        self.limit_bytes = told.get("limit_bytes")
        self.started_at = told.get("started_at")


def read_agent(text: str) -> Memory:
    """Read an agent's exposition. Raises ProbeFailed when its numbers are old."""
    found = read_samples(text, {name for names in AGENT_NAMES.values() for name in names})
    told = {}
    for field, names in AGENT_NAMES.items():
        values = next((found[name] for name in names if name in found), [])
        known = [sample.value for sample in values if sample.value is not None and sample.value >= 0]
        if known:
            told[field] = sum(known)
    if told.get("age_s", 0.0) > STALE_S:
        raise ProbeFailed(f"its numbers are {told['age_s']:.0f} s old")
    return Memory(told)


class Record:
    """What is kept of one node, or of the relay."""

    def __init__(self, hour_s: float) -> None:
        self.signals = Signals(hour_s)
        self.course = Course()
        self.calls: deque[Heard] = deque(maxlen=MOST_CALLS)
        self.looks: deque[Look] = deque(maxlen=MOST_CALLS)
        self.counters = Counters()
        self.memory: Memory | None = None
        self.limit_bytes: float | None = None
        self.diagnosed_at = float("-inf")
        self._started_at: float | None = None
        self._restarts: float | None = None

    def sample(self, at: float) -> Sample:
        """Everything left behind since the sample before, as one."""
        calls, looks, memory, counted = list(self.calls), list(self.looks), self.memory, self.counters
        self.calls.clear()
        self.looks.clear()
        self.memory, self.counters = None, Counters()
        loads = [look.load for look in looks]
        gap = _middle(call.gap_s for call in calls)
        started_at = counted.started_at if memory is None or memory.started_at is None else memory.started_at
        return Sample(
            at=at,
            ttft_s=_middle(_per_token(call) for call in calls),
            queue_s=_middle(call.queued_s for call in calls),
            gap_s=gap,
            tokens_per_s=1 / gap if gap else None,
            errors=float(sum(call.failed for call in calls)),
            preemptions=counted.preemptions,
            kv_used=_mean(load.used for load in loads),
            prefix_queries=counted.prefix_queries,
            prefix_hits=counted.prefix_hits,
            rss_bytes=memory.rss_bytes if memory else None,
            part_bytes=counted.part_bytes,
            gpu_bytes=memory.gpu_bytes if memory else None,
            running=_mean(load.running for load in loads),
            waiting=_mean(load.waiting for load in loads),
            restarts=self._restarted(started_at),
        )

    def _restarted(self, started_at: float | None) -> float | None:
        """Restarts seen, once a start is known at all. An agent and an engine may mean different processes."""
        if started_at is None:
            return self._restarts
        before, self._started_at = self._started_at, started_at
        if self._restarts is None:
            self._restarts = 0.0
        elif before is not None and started_at > before + SAME_START_S:
            self._restarts += 1
        return self._restarts


class Watch:
    """The records of all nodes. `agents` says by node name where an agent answers; `hour_s` shrinks time for tests.

    `nodes` gives the names there are now: the record of a node that is gone is dropped.
    """

    def __init__(
        self,
        nodes: Callable[[], Iterable[str]],
        client: Client,
        agents: Callable[[], Mapping[str, str]] = dict,
        *,
        hour_s: float = HOUR_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._nodes = nodes
        self._client = client
        self._agents = agents
        self._hour_s = hour_s
        self._clock = clock
        self._sleep = sleep
        self._records: dict[str, Record] = {}
        self.trouble: dict[str, str] = {}
        """Why an agent's last answer failed, by node."""

    def observe(self, node: str, heard: Heard) -> None:
        """A call on a node (or the relay) ended, and told this."""
        record = self._records.get(node)
        if record is not None:
            record.calls.append(heard)

    def looked(self, node: str, look: Look) -> None:
        """A look at a node was answered."""
        record = self._records.get(node)
        if record is None:
            return
        record.looks.append(look)
        if look.counters is not None:
            record.counters = look.counters

    def diagnosis(self, node: str) -> Diagnosis:
        """What is held of a node now; unknown of one never heard of."""
        record = self._records.get(node)
        return record.course.now if record is not None else Diagnosis()

    def signals(self, node: str) -> Signals | None:
        """The rings of a node, or of `relay`."""
        record = self._records.get(node)
        return record.signals if record is not None else None

    def forget(self, node: str) -> None:
        """A node is gone or begins anew, and what is held of it says nothing any more."""
        self._records.pop(node, None)
        self.trouble.pop(node, None)

    async def run(self) -> None:
        """Sample and diagnose, again and again, until cancelled."""
        every_s = SAMPLE_S * self._hour_s / HOUR_S
        while True:
            began = self._clock()
            await self.step()
            await self._sleep(max(every_s - (self._clock() - began), every_s / 4))

    async def step(self) -> None:
        """One round: ask the agents, take samples, and diagnose who is due."""
        names = (*self._nodes(), RELAY)
        self._records = {name: self._records.get(name) or Record(self._hour_s) for name in names}
        agents = {name: url for name, url in self._agents().items() if name in self._records}
        self.trouble = {name: cause for name, cause in self.trouble.items() if name in agents}
        async with asyncio.TaskGroup() as group:
            for name, url in agents.items():
                group.create_task(self._ask(name, self._records[name], url))
        now = self._clock()
        for record in self._records.values():
            record.signals.add(record.sample(now))
        relay = self._records.setdefault(RELAY, Record(self._hour_s)).signals  # forgotten while agents were asked
        for name, record in list(self._records.items()):
            if name != RELAY and now - record.diagnosed_at >= DIAGNOSE_H * self._hour_s:
                record.diagnosed_at = now
                await self._diagnose(name, record, relay, now)

    async def _ask(self, name: str, record: Record, url: str) -> None:
        try:
            record.memory = read_agent(await self._client.get_text(url, timeout_s=AGENT_S, max_bytes=2**20))
        except ProbeFailed as error:
            if name not in self.trouble:
                log.warning("node %s: its agent gives nothing: %s", name, error)
            self.trouble[name] = str(error)
            return
        record.limit_bytes = record.memory.limit_bytes
        if self.trouble.pop(name, None) is not None:
            log.info("node %s: its agent answers again", name)

    async def _diagnose(self, name: str, record: Record, relay: Signals, now: float) -> None:
        before = record.course.now.verdict
        held = await asyncio.to_thread(record.course.judge, record.signals, now, relay, record.limit_bytes)
        if held.verdict is before:
            return
        level = logging.WARNING if held.verdict in ALARMS else logging.INFO
        log.log(level, "node %s: %s, was %s (%s)", name, held.verdict, before, _numbers(held))

    def families(self) -> Iterator[Level]:
        """What a scrape shows."""
        verdict = Level("node_diagnosis", "1 for what the node is diagnosed with, 0 for the rest.", "node", "verdict")
        numbers = [(Level(name, text, "node"), field) for name, text, field in NUMBERS]
        for name, record in self._records.items():
            if name == RELAY:
                continue
            held = record.course.now
            for one in Verdict:
                verdict.set(held.verdict is one, (name, one))
            for level, field in numbers:
                value = getattr(held, field)
                if value is not None:
                    level.set(value, (name,))
        agent = Level("node_agent_up", "Whether the agent beside the node answers, 1 or 0.", "node")
        for name in self._agents():
            agent.set(name not in self.trouble, (name,))
        yield from (verdict, *(level for level, _ in numbers), agent)


NUMBERS = (
    ("node_rss_bytes", "Resident memory of the node's process tree, as its agent tells it.", "rss_bytes"),
    ("node_rss_slope_bytes_per_hour", "How fast that grows.", "rss_slope_bytes_per_hour"),
    ("node_memory_limit_seconds", "Time until growing memory reaches its limit.", "projected_limit_s"),
    ("node_ttft_drift_ratio", "Time to first token a prompt token, against the fresh node.", "ttft_drift_ratio"),
    ("node_gap_drift_ratio", "Time between two tokens, against the fresh node, at equal load.", "gap_drift_ratio"),
    ("node_relay_drift_ratio", "The relay's drift in the time the node is judged by.", "relay_drift_ratio"),
)
"""Metric, meaning, and where a diagnosis holds it. What is not known is not shown."""


def _numbers(held: Diagnosis) -> str:
    """The first numbers of a diagnosis, for the log."""
    return ", ".join(f"{one.name} {one.value:.4g} {one.unit}" for one in held.evidence[:4]) or "no evidence"


def _per_token(call: Heard) -> float | None:
    return None if call.first_token_s is None else call.first_token_s / (call.prompt_tokens + FIXED_TOKENS)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
