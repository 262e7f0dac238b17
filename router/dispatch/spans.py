"""Spans of calls for OpenTelemetry, by the GenAI conventions: one of the call, one below it for each leg.

Rules: a span is made when its call has ended, from what the Trip knows, so that nothing happens while it runs; it holds
names, numbers and closed words, never a prompt, an answer or a key; a thread of the SDK's sends them, drops what it
cannot send, and never makes a call wait. The SDK is imported only when spans are wanted.

A caller's `traceparent` is the parent, and its sampled flag decides; it goes on to the node as it came, so the node's
span is a sibling of ours.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from router.core.account import Account
from router.core.call import Call, Outcome, Protocol
from router.dispatch.trip import RELAY, Trip
from router.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

__all__ = ["Leg", "Spans"]

CLOSE_S = 3.0
"""Longest wait for spans that are not sent yet, at the end."""
FAILED = frozenset((Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.FAILED, Outcome.CUT))
OPERATIONS = {
    Protocol.CHAT: "chat",
    Protocol.RESPONSES: "chat",
    Protocol.MESSAGES: "chat",
    Protocol.COMPLETION: "text_completion",
}

Attributes = dict[str, str | int | float | bool]


class Leg(NamedTuple):
    """One attempt: seconds of the ledger's clock, whom it asked, how it ended."""

    began_at: float
    ended_at: float
    place: str
    url: str
    engine: str
    outcome: str


class Spans:
    """Told of legs and of calls that ended. `clock` is the ledger's; `relay` is the relay's URL."""

    def __init__(self, tracer: "Tracer", shut: Callable[[], None], clock: Callable[[], float]) -> None:
        self._tracer, self._shut, self._clock = tracer, shut, clock
        self._legs: dict[Trip, list[Leg]] = {}
        self.relay = ""

    @classmethod
    def open(cls, endpoint: str, headers: Mapping[str, str], sample: float, clock: Callable[[], float]) -> "Spans":
        """Spans sent to that collector. Raises SettingsError when the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise SettingsError("otel.endpoint: needs the extra: pip install 'ebbtide[otel]'") from error
        resource = Resource.create({"service.name": "ebbtide", "service.version": version("ebbtide")})
        sampler = ParentBased(TraceIdRatioBased(sample))
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        url = f"{endpoint.removesuffix('/v1/traces')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, headers=dict(headers), timeout=5)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider.get_tracer("ebbtide", version("ebbtide")), provider.shutdown, clock)

    def leg(self, trip: Trip, outcome: str) -> None:
        """A leg ended."""
        node = trip.node
        url = node.spec.url if node is not None else self.relay if trip.place == RELAY else ""
        engine = node.facts.engine if node is not None else "openai"
        one = Leg(trip.sent_at, self._clock(), trip.place, url, engine, outcome)
        self._legs.setdefault(trip, []).append(one)

    def close(self, trip: Trip, account: Account) -> None:
        """A call ended, all its legs told that failed: one that is left ended as the call did."""
        legs, outcome = self._legs.pop(trip, []), account.outcome
        if len(legs) < trip.legs:
            self.leg(trip, outcome)
            legs += self._legs.pop(trip)
        now = self._clock()
        offset_s = time.time() - now
        span = self._span(trip.call, offset_s + trip.began_at)
        if span.is_recording():
            for name, value in _told(account):
                span.set_attribute(name, value)
            if trip.first_token_at is not None:
                span.add_event("first token", timestamp=_ns(offset_s + trip.first_token_at))
            _judge(span, outcome, bad=outcome in FAILED)
            for leg in legs:
                self._below(span, trip.call, leg, offset_s)
        span.end(_ns(offset_s + now))

    def shut(self) -> None:
        """Send what is left, within a bound. Blocks."""
        thread = threading.Thread(target=self._shut, name="last spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _span(self, call: Call, began: float) -> "Span":
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carried = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in call.headers
            if name in (b"traceparent", b"tracestate")
        }
        parent = TraceContextTextMapPropagator().extract(carried)
        return self._tracer.start_span(_name(call), parent, SpanKind.SERVER, start_time=_ns(began))

    def _below(self, span: "Span", call: Call, leg: Leg, offset_s: float) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        where = urlsplit(leg.url)
        told: Attributes = {**_asked(call), "gen_ai.provider.name": leg.engine, "ebbtide.node": leg.place}
        if where.hostname:
            told["server.address"] = where.hostname
            told["server.port"] = where.port or (443 if where.scheme == "https" else 80)
        parent, began = set_span_in_context(span), _ns(offset_s + leg.began_at)
        one = self._tracer.start_span(_name(call), parent, SpanKind.CLIENT, told, start_time=began)
        _judge(one, leg.outcome, bad=leg.outcome not in (Outcome.COMPLETED, Outcome.CLIENT_LEFT, "TakenBack"))
        one.end(_ns(offset_s + leg.ended_at))


def _told(account: Account) -> Iterator[tuple[str, str | int | float | bool]]:
    call, usage, first_s = account.call, account.usage, account.first_token_s
    yield from _asked(call).items()
    yield from (("gen_ai.request.stream", call.stream), ("ebbtide.call", call.id), ("ebbtide.caller", call.caller))
    yield from (("ebbtide.workload", str(call.workload)), ("ebbtide.reason", str(call.reason)))
    yield from (("ebbtide.outcome", str(account.outcome)), ("ebbtide.queue_s", account.queued_s))
    yield "ebbtide.legs", account.legs
    if account.place:
        yield "ebbtide.node", account.place
    if account.status:
        yield "http.response.status_code", account.status
    if call.asked is not None:
        yield "gen_ai.request.max_tokens", call.asked
    if usage is not None:
        yield from (("gen_ai.usage.input_tokens", usage.prompt), ("gen_ai.usage.output_tokens", usage.completion))
    if first_s is not None:
        yield "ebbtide.first_token_s", first_s


def _asked(call: Call) -> Attributes:
    return {"gen_ai.operation.name": _operation(call), "gen_ai.request.model": call.model}


def _operation(call: Call) -> str:
    return OPERATIONS.get(call.endpoint.protocol, call.endpoint.path)


def _name(call: Call) -> str:
    return f"{_operation(call)} {call.model}"


def _judge(span: "Span", outcome: str, *, bad: bool) -> None:
    from opentelemetry.trace import Status, StatusCode

    if bad:
        span.set_attribute("error.type", str(outcome))
        span.set_status(Status(StatusCode.ERROR))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
