"""What is counted, on a registry of our own.

Rules: every label value comes from a closed list (workloads, reasons, outcomes, endpoints, relay causes) or from the
settings (node names); whatever else turns up is counted as `other`, so a stranger cannot grow the series. No caller and
no id is a label. Counting is plain arithmetic on dicts, a few hundred nanoseconds each, and belongs to the
event loop's thread; prometheus_client's own children lock and cost a microsecond. It is asked only to write scrapes.
Calls that end are added up by kind; the series get them when somebody asks, and before the names of nodes change.
What nodes are doing is read at scrape time from whoever knows it, not copied here.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from importlib.metadata import version
from itertools import accumulate, repeat
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from router.core.account import DURATION_S, FIRST_TOKEN_S, QUEUE_S, Accounts
from router.core.call import ENDPOINTS, Call, Workload
from router.core.node import State

OTHER = "other"
RELAY = "relay"
PREFIX = "ebbtide_"
MOST_SERIES = 4096
"""Series of one metric; with a thousand nodes and a few words this is not met."""
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

Labels = tuple[str, ...]


class NodeView(Protocol):
    """One node as a scrape sees it. `room` is tokens by `capacity`, `reserve`, `foreign` and workload, where known."""

    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def running(self) -> Mapping[str, int]: ...
    @property
    def room(self) -> Mapping[str, int]: ...


class SourceView(Protocol):
    """One source of nodes as a scrape sees it: how many it told of, when (unix seconds, 0 for never), what is wrong."""

    @property
    def nodes(self) -> Sized: ...
    @property
    def at(self) -> float: ...
    @property
    def trouble(self) -> str | None: ...


class Family:
    """One metric: its name (without prefix), what it means, its labels, and a number for each set of label values."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = PREFIX + name
        self.text = text
        self.labels = labels
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        """Count `amount` more."""
        try:
            self.values[labels] += amount
        except KeyError:
            labels = _bounded(labels, self.values)
            self.values[labels] = self.values.get(labels, 0) + amount

    def forget(self, label: str, value: str) -> None:
        """Drop all series in which that label has that value."""
        if label in self.labels:
            at = self.labels.index(label)
            self.values = {labels: number for labels, number in self.values.items() if labels[at] != value}

    def collect(self) -> Metric:
        """The metric as it stands."""
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Level(Family):
    """A metric that goes up and down. `with level:` holds it one higher for a block."""

    kind = "gauge"

    def set(self, value: float, labels: Labels = ()) -> None:
        """It is `value` now."""
        self.values[labels if labels in self.values else _bounded(labels, self.values)] = value

    def __enter__(self) -> None:
        self.values[()] += 1

    def __exit__(self, *_: object) -> None:
        self.values[()] -= 1

    def collect(self) -> Metric:
        """The metric as it stands."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Spread(Family):
    """A histogram: how many values fell below each bound. `values` holds the sums."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> None:
        super().__init__(name, text, *labels)
        self.bounds = bounds
        self.counts: dict[Labels, list[int]] = {labels: [0] * (len(bounds) + 1) for labels in self.values}

    def see(self, value: float, labels: Labels = ()) -> None:
        """One more value."""
        counts = self.counts.get(labels)
        if counts is None:
            labels = _bounded(labels, self.values)
            counts = self.counts.setdefault(labels, [0] * (len(self.bounds) + 1))
            self.values.setdefault(labels, 0.0)
        counts[bisect_left(self.bounds, value)] += 1
        self.values[labels] += value

    def more(self, counts: Sequence[int], total: float, labels: Labels = ()) -> None:
        """More values: how many fell in each bucket, and their sum."""
        if labels not in self.counts:
            labels = _bounded(labels, self.values)
        before = self.counts.get(labels, repeat(0))
        self.counts[labels] = [one + other for one, other in zip(counts, before, strict=False)]
        self.values[labels] = self.values.get(labels, 0.0) + total

    def forget(self, label: str, value: str) -> None:
        """Drop all series in which that label has that value."""
        super().forget(label, value)
        self.counts = {labels: counts for labels, counts in self.counts.items() if labels in self.values}

    def collect(self) -> Metric:
        """The metric as it stands."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for labels, counts in self.counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, sum_value=self.values[labels])
        return family


class Metrics(Collector):
    """Everything counted in this process. `nodes` are the configured names; `watch` says who knows how they are."""

    def __init__(self, nodes: Iterable[str] = ()) -> None:
        self._nodes = {name: name for name in (*nodes, RELAY)}
        self._ended = Accounts(self._pour)
        self.finished = self._ended.add
        """A call ended, and with it the leg that began to answer, if there was one."""
        self._look: Callable[[], Iterable[NodeView]] = tuple
        self._look_at_waits: Callable[[], Mapping[Labels, int]] = dict
        self._sources: Callable[[], Mapping[str, SourceView]] = dict
        self._more: list[Callable[[], Iterable[Family]]] = []
        self._calls = Family("calls", "Calls that ended.", "endpoint", "workload", "outcome")
        self._classified = Family("classified", "Calls by what told their workload.", "workload", "reason")
        self._duration = Spread("call_duration_seconds", "Whole life of a call.", DURATION_S, "endpoint", "workload")
        self._first_token = Spread(
            "time_to_first_token_seconds",
            "From a streamed call's arrival to its first token.",
            FIRST_TOKEN_S,
            "workload",
            "node",
        )
        self._queued = Spread("queue_seconds", "Wait for room before a call was sent.", QUEUE_S, "workload")
        self._queue_calls = Level("queue_calls", "Calls that wait for room.", "workload")
        self._queue_bytes = Level("queue_bytes", "Body bytes of calls that wait for room.", "workload")
        self._prompt_tokens = Family("prompt_tokens", "Prompt tokens as nodes counted them.", "workload")
        self._output_tokens = Family("output_tokens", "Output tokens as nodes counted them.", "workload")
        self._relayed = Family("relayed", "Calls sent to the relay.", "cause")
        self._legs = Family("legs", "Attempts of calls on a node or the relay.", "node", "outcome")
        self._taken_back = Family(
            "take_backs", "Batch calls whose room was taken back for chat.", "node", "phase", "mode"
        )
        self._read_in_vain = Family(
            "take_back_wasted_tokens", "Prompt tokens that take-backs let nodes read in vain.", "node"
        )
        self._truncated = Family("truncated", "Answers that broke off before their end.", "node")
        self._oversized = Family("oversized_events", "Stream events over the size limit.")
        self._add_process()
        self._add_webhooks()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _add_process(self) -> None:
        """How this process fares."""
        self._exact = Level("tokenizer_exact", "1 if tokens are counted, 0 if they are estimated from bytes.")
        self._reload = Level("config_last_reload_successful", "1 if the settings were read at the last try, else 0.")
        self._reloaded = Level(
            "config_last_reload_success_timestamp_seconds", "When settings that are in force were read, unix time."
        )
        self._lag = Spread("event_loop_lag_seconds", "How late the event loop ran a timer.", LAG_S)
        self.streams = Level("open_streams", "Streams open to clients.")

    def _add_webhooks(self) -> None:
        """What is told of batches that ended."""
        self._webhook_attempts = Family("webhook_attempts", "Attempts to deliver a webhook event.", "outcome")
        self._webhooks_given_up = Family(
            "webhooks_given_up", "Webhook events that nobody took: the last attempt failed, or the receiver said 410."
        )
        self._webhooks_waiting = Level("webhooks_waiting", "Webhook events not yet delivered.")
        self._webhook_oldest = Level("webhook_oldest_seconds", "Age of the oldest webhook event not yet delivered.")

    def families(self) -> list[Family]:
        """Every metric, empty ones too; those of nodes, and those that other rooms know, are filled now."""
        self._pour()
        own = (value for value in vars(self).values() if isinstance(value, Family))
        more = (family for more in self._more for family in more())
        return [*own, *self._node_levels(), *self._source_levels(), *more]

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for at a scrape."""
        for family in self.families():
            yield family.collect()
        python = ".".join(map(str, sys.version_info[:3]))
        build = {"version": version("ebbtide"), "python": python}
        yield InfoMetricFamily(f"{PREFIX}build", "What is running.", value=build)

    def know(self, nodes: Iterable[str]) -> None:
        """Take in the names of nodes that came."""
        self._pour()
        self._nodes.update({name: name for name in nodes})

    def forget(self, node: str) -> None:
        """A node is gone, and its series with it. What is still told of it is counted as `other`."""
        self._pour()
        self._nodes.pop(node, None)
        for family in vars(self).values():
            if isinstance(family, Family):
                family.forget("node", node)

    def watch(
        self,
        look: Callable[[], Iterable[NodeView]],
        waits: Callable[[], Mapping[Labels, int]] = dict,
        sources: Callable[[], Mapping[str, SourceView]] = dict,
    ) -> None:
        """Say who is asked at every scrape.

        `look` how the nodes are, `waits` how many calls wait by workload and reason, `sources` how those are who tell
        of nodes.
        """
        self._look, self._look_at_waits, self._sources = look, waits, sources

    def also(self, more: Callable[[], Iterable[Family]]) -> None:
        """Show these too; asked at every scrape."""
        self._more.append(more)

    def classified(self, call: Call) -> None:
        """A call's workload was told."""
        self._classified.add((call.workload, call.reason))

    def _pour(self) -> None:
        """Bring the series up to what was added up of calls that ended."""
        for (path, workload, place, outcome, answered, counted), some in self._ended.take():
            endpoint, node, calls = path if path in ENDPOINTS else OTHER, self._node(place), sum(some.queued)
            self._calls.add((endpoint, workload, outcome), calls)
            self._queued.more(some.queued, some.queued_s, (workload,))
            self._duration.more(some.duration, some.duration_s, (endpoint, workload))
            if any(some.first_token):
                self._first_token.more(some.first_token, some.first_token_s, (workload, node))
            if answered:
                self._legs.add((node, outcome), calls)
            if counted:
                self._prompt_tokens.add((workload,), some.prompt)
                self._output_tokens.add((workload,), some.output)

    def leg(self, node: str, outcome: str) -> None:
        """One attempt on a node, or on the relay, ended. `outcome` is a word of a closed list."""
        self._legs.add((self._node(node), outcome))

    def relayed(self, cause: str) -> None:
        """A call goes to the relay. `cause` is a word of a closed list."""
        self._relayed.add((cause,))

    def taken_back(self, node: str, phase: str, mode: str, wasted: float) -> None:
        """Room was taken back from batch; `wasted` prompt tokens were read in vain."""
        self._taken_back.add((self._node(node), phase, mode))
        self._read_in_vain.add((self._node(node),), wasted)

    def waiting(self, workload: Workload, calls: int, size: int) -> None:
        """So many calls with so many body bytes wait now."""
        self._queue_calls.set(calls, (workload,))
        self._queue_bytes.set(size, (workload,))

    def truncated(self, node: str) -> None:
        """A node's answer broke off before its end."""
        self._truncated.add((self._node(node),))

    def oversized_event(self) -> None:
        """A stream event was over the size limit."""
        self._oversized.add()

    def webhook(self, outcome: str, *, given_up: bool) -> None:
        """One attempt to deliver an event ended. `outcome` is a word of a closed list."""
        self._webhook_attempts.add((outcome,))
        self._webhooks_given_up.add(amount=given_up)

    def webhooks(self, waiting: int, oldest_s: float) -> None:
        """So many events are not delivered yet, the oldest this old."""
        self._webhooks_waiting.set(waiting)
        self._webhook_oldest.set(oldest_s)

    def tokenizer(self, *, exact: bool) -> None:
        """Whether tokens are counted or estimated."""
        self._exact.set(exact)

    def reloaded(self, at: float | None) -> None:
        """Settings were read, at unix time `at`; None if they could not be used and nothing changed."""
        self._reload.set(at is not None)
        if at is not None:
            self._reloaded.set(at)

    def loop_lag(self, seconds: float) -> None:
        """The event loop ran a timer so late."""
        self._lag.see(seconds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """A scrape and its content type, in the form the Accept header asks for: OpenMetrics or Prometheus text."""
        try:
            encode, content_type = choose_encoder(accept)
            return encode(self.registry), content_type
        except (TypeError, ValueError):
            encode, content_type = choose_encoder("")
            return encode(self.registry), content_type

    def _node(self, name: str | None) -> str:
        return self._nodes.get(name or "", OTHER)

    def _node_levels(self) -> tuple[Level, ...]:
        up = Level("node_up", "Whether the node answers, 1 or 0.", "node")
        state = Level("node_state", "1 for the state the node is in, 0 for the others.", "node", "state")
        running = Level("node_running", "Sequences of ours that run on the node.", "node", "workload")
        room = Level("node_room_tokens", "KV tokens the node has, and who keeps or holds them.", "node", "kind")
        for view in self._look():
            up.set(view.up, (view.name,))
            for one in State:
                state.set(view.state == one, (view.name, one))
            for workload in Workload:
                running.set(view.running.get(workload, 0), (view.name, workload))
            for kind in ("capacity", "reserve", "foreign", *Workload):
                if kind in view.room:
                    room.set(view.room[kind], (view.name, kind))
        waits = Level("waiting_calls", "Calls that wait for room, by why.", "workload", "reason")
        for labels, calls in self._look_at_waits().items():
            waits.set(calls, labels)
        return up, state, running, room, waits

    def _source_levels(self) -> tuple[Level, ...]:
        works = Level("discovery_up", "Whether a source of nodes could be read at the last try, 1 or 0.", "source")
        nodes = Level("discovery_nodes", "Nodes in the last list of a source.", "source")
        at = Level("discovery_success_timestamp_seconds", "When a source last told its list, unix time.", "source")
        for name, view in self._sources().items():
            works.set(view.trouble is None and view.at > 0, (name,))
            nodes.set(len(view.nodes), (name,))
            at.set(view.at, (name,))
        return works, nodes, at


def _bounded(labels: Labels, known: Mapping[Labels, object]) -> Labels:
    """`labels` while there is room for one more series, then `other`."""
    return labels if len(known) < MOST_SERIES else (OTHER,) * len(labels)
