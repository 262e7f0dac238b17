"""A node: what the operator said, what it told us, what we measured, and whether it may be used.

State is a table. Three kinds of evidence move it: an answer (GOOD), a failure of the node (FAULT), and neither (a
caller's own error, a client that left), which moves nothing. A refusal (429, 503) is saturation, not a fault: the node
is left alone for a moment that doubles while it goes on refusing.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from router.core.budget import Budget, Permit, Room
from router.core.call import Call, Workload
from router.core.pace import GAP, OBJECTIVE, Pace, Past
from router.core.packing import Bearing

FAULTS_TO_DOWN = 3
"""Failures in a row that take a node out. One is chance, two may be one event seen twice."""
BACKOFF_S = (1.0, 60.0)
"""First and longest wait before a node that is down is tried again; it doubles with every failed try."""
REFUSAL_S = (0.5, 8.0)
"""First and longest wait after a refusal."""
QUIET_S = 10.0
"""A node that said anything on a call within this long is alive, whatever its probes do."""
PANIC_S = 1.0
"""With every node out, each is tried again this long after its last failure."""

FEW = 4
"""An answer beside fewer chats than this shows the usual time between two tokens."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator said. `models` maps public names to the node's own; empty means whatever the node lists."""

    name: str
    url: str
    pools: frozenset[Workload]
    engine: str = "auto"
    models: Mapping[str, str] = {}
    context: int | None = None
    sequences: int | None = None
    tokens: int | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One model a node serves. `context` in tokens; `card` is what the node says of it in /v1/models."""

    context: int | None = None
    card: Mapping[str, object] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node told us of itself. None is unknown."""

    engine: str = "openai"
    version: str | None = None
    models: Mapping[str, ModelFacts] = {}
    tokens: int | None = None
    sequences: int | None = None
    streams_usage: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: sequences running and waiting, `used` the share of KV tokens held (0 to 1). None is unknown."""

    running: int | None = None
    waiting: int | None = None
    used: float | None = None


class State(StrEnum):
    """Whether a node may be used."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    PROBATION = "probation"


class Sign(StrEnum):
    """What one call says of the node. GONE is a FAULT before anything reached it: nobody listens there."""

    GOOD = "good"
    FAULT = "fault"
    GONE = "gone"
    REFUSED = "refused"
    NEITHER = "neither"


class Event(StrEnum):
    """What moves the state."""

    ANSWERED = "answered"
    FAILED = "failed too often"
    PROBED = "probe answered"
    TRIED = "tried again"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STARTING: {Event.ANSWERED: State.READY, Event.PROBED: State.READY, Event.FAILED: State.DOWN},
    State.READY: {Event.FAILED: State.DOWN},
    State.DOWN: {Event.ANSWERED: State.READY, Event.PROBED: State.PROBATION, Event.TRIED: State.PROBATION},
    State.PROBATION: {Event.ANSWERED: State.READY, Event.FAILED: State.DOWN},
}
"""State and event to next state; a pair that is not here changes nothing."""


class Node:
    """One server that can answer. Changed only by what is observed; `now` is seconds of any steady clock."""

    __slots__ = (
        "backoff_s",
        "bearing",
        "budget",
        "cause",
        "facts",
        "failed_at",
        "faults",
        "heard_at",
        "hung",
        "load",
        "misses",
        "pace",
        "refusal_s",
        "refused_until",
        "retry_at",
        "since",
        "spec",
        "state",
        "stranger",
        "trial",
        "trickle_s",
    )

    def __init__(self, spec: Spec, *, reserve: float = 0.0) -> None:
        self.spec = spec
        self.facts = Facts()
        self.load = Load()
        self.state = State.STARTING
        self.cause = "not yet seen"
        self.since = self.failed_at = self.heard_at = self.retry_at = self.refused_until = -1e9
        self.faults = self.misses = 0
        self.hung = False
        self.stranger = Room(0, 0)
        self.trial: Permit | None = None
        self.backoff_s = BACKOFF_S[0]
        self.refusal_s = REFUSAL_S[0]
        self.budget = Budget(spec.tokens, spec.sequences, reserve)
        self.pace = Pace()
        self.bearing = Bearing()
        self.trickle_s = 0.0

    @property
    def name(self) -> str:
        """The operator's name for it."""
        return self.spec.name

    def serves(self, model: str) -> bool:
        """Whether it answers for that public model name."""
        return model in self.spec.models if self.spec.models else model in self.facts.models

    def own_name(self, model: str) -> str:
        """The name the node itself knows a public model by."""
        return self.spec.models.get(model, model)

    def models(self) -> list[str]:
        """Public names of what it serves."""
        return list(self.spec.models or self.facts.models)

    def context(self, model: str) -> int | None:
        """Longest prompt and answer together, in tokens, or None if unknown."""
        known = self.facts.models.get(self.spec.models.get(model, model))
        told = known.context if known is not None else None
        said = self.spec.context
        if told is None or said is None:
            return told if said is None else said
        return told if told < said else said

    def room_for(self, call: Call) -> Room:
        """Prompt and expected output of every sequence, the output capped by what the context leaves."""
        context = self.context(call.model)
        output = call.output_tokens
        if context is not None:
            left = context - (call.context_tokens or call.prompt_tokens)
            if output > left:
                output = max(0, left)
        return Room(call.prompt_tokens + output * call.sequences, call.sequences)

    def hold(self, call: Call, now: float, past: Past | None = None) -> Permit:
        """Take room for a call, for the `with` block of the permit."""
        permit = self.budget.hold(self.room_for(call), call.workload, prompt_tokens=call.prompt_tokens, now=now)
        permit.past = past
        if call.workload is Workload.BATCH and self.budget.chats:
            read_s = self.pace.left_s(call.prompt_tokens, past) or 0.0
            for chat in self.budget.chatting():
                chat.stalled_s += read_s
        if call.workload is Workload.INTERACTIVE:
            self.pace.chat_came(now)
        return permit

    def spoke(self, permit: Permit, now: float, *, streamed: bool) -> None:
        """The first token of a call is here; of one that is not streamed the whole answer, which tells no pace."""
        if permit.spoke_at is not None or permit.taken:
            return
        permit.spoke(now)
        if not streamed:
            return
        seconds = now - permit.began_at
        if permit.past is not None and permit.past.times:
            self.pace.resumed(permit.prompt_tokens, seconds, permit.past)
        elif permit.took:
            self.pace.took(permit.prompt_tokens, seconds)
        elif permit.quiet:
            chat = permit.workload is Workload.INTERACTIVE
            self.pace.read_quietly(permit.prompt_tokens, seconds, chat=chat)

    def take_back(self, permit: Permit, now: float) -> float:
        """Take the room of a batch call back. Returns how many prompt tokens were read for nothing."""
        past = permit.past
        wasted = 0.0
        if past is not None:
            until = now if permit.spoke_at is None else permit.spoke_at
            wasted = self.pace.lost(permit.prompt_tokens, until - permit.began_at, past)
            past.node, past.taken_at = self.name, now
        permit.take()
        return wasted

    def chatted(self, permit: Permit, tokens: int, now: float, stated_s: float | None) -> None:
        """An interactive call ended well, `tokens` long. `stated_s` is the objective for its first token, if stated."""
        if permit.spoke_at is None:
            return
        pace, seconds = self.pace, now - permit.spoke_at
        gap_s, objective = pace.gap_s, pace.objective_s(stated_s)
        pace.answered(tokens)
        slow = tokens > 1 and gap_s is not None and seconds / (tokens - 1) > GAP * gap_s
        own_s = OBJECTIVE * (pace.prefill_s(permit.prompt_tokens) or 0.0)
        late = objective is not None and permit.spoke_at - permit.began_at > max(objective, own_s)
        self.bearing.judge(permit.chats, kept=not (slow or late))
        if gap_s is None or permit.chats < FEW:
            pace.wrote(tokens - 1, seconds)

    def respec(self, spec: Spec, *, reserve: float) -> None:
        """Take in what the operator says now. What was learnt stays, and so does who holds room."""
        self.spec = spec
        self.budget.reserve = reserve
        self._size()

    def usable(self, now: float, *, panic: bool = False) -> bool:
        """Whether a call may be sent now. In panic (no node is usable) waits are cut short."""
        quiet = now >= self.refused_until or (panic and now >= self.failed_at + PANIC_S)
        if self.state is State.READY or self.state is State.STARTING:
            return quiet
        due = self.state is State.PROBATION or now >= self.retry_at or (panic and now >= self.failed_at + PANIC_S)
        return quiet and due and not self.budget.holds(self.trial)

    def observe(self, sign: Sign, now: float, cause: str) -> None:
        """Take in how one call went."""
        match sign:
            case Sign.GOOD:
                self.faults = self.misses = 0
                self.hung, self.heard_at = False, now
                self.backoff_s, self.refusal_s = BACKOFF_S[0], REFUSAL_S[0]
                self.refused_until = now
                self._move(Event.ANSWERED, now, cause)
            case Sign.REFUSED:
                self.failed_at = now
                self.refused_until = now + self.refusal_s
                self.refusal_s = min(self.refusal_s * 2, REFUSAL_S[1])
            case Sign.FAULT | Sign.GONE:
                self.failed_at = now
                self.faults += 1
                self.hung = sign is Sign.FAULT
                if self.faults >= FAULTS_TO_DOWN or self.state in (State.PROBATION, State.DOWN):
                    self._fail(now, cause)
            case Sign.NEITHER:
                pass

    def seen(self, facts: Facts, load: Load, now: float, *, held: int = 0) -> None:
        """Take in a probe that answered. `held` is how many sequences of ours ran when it set out.

        A node whose calls failed although it was reached stays down for its back-off: its front may live while its
        engine does not.
        """
        self.facts = facts
        self.load = load
        self.misses = 0
        self._size()
        self._meet(load, held)
        if not self.hung or now >= self.retry_at:
            self._move(Event.PROBED, now, "probe answered")

    def missed(self, now: float, cause: str, *, refused: bool) -> None:
        """Take in a probe that failed. A node that answers calls is busy, not dead, unless it refuses connections."""
        self.load, self.budget.foreign, self.stranger = Load(), Room(0, 0), Room(0, 0)
        if not refused and now - self.heard_at <= QUIET_S:
            return
        self.misses += 1
        if self.misses >= FAULTS_TO_DOWN:
            self.failed_at = now
            self._fail(now, cause)

    def heard(self, now: float) -> None:
        """Something came from it on a call."""
        self.heard_at = now

    def try_again(self, now: float, permit: Permit) -> None:
        """A call is about to be sent to a node that is not ready. Until it is over no other is sent."""
        self.trial = permit
        self._move(Event.TRIED, now, self.cause)

    def _fail(self, now: float, cause: str) -> None:
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(self.backoff_s * 2, BACKOFF_S[1])
        self._move(Event.FAILED, now, cause)

    def _size(self) -> None:
        said, told = self.spec, self.facts
        self.budget.tokens = said.tokens if said.tokens is not None else told.tokens
        self.budget.sequences = said.sequences if said.sequences is not None else told.sequences

    def _meet(self, load: Load, held_before: int) -> None:
        """Work out what others run there.

        Calls of ours that begin or end during a look make it differ from what we hold for a moment, so only what two
        looks agree on is foreign.
        """
        held = self.budget.held()
        busy = (load.running or 0) + (load.waiting or 0)
        sequences = max(0, busy - max(held.sequences, held_before))
        tokens = 0
        if sequences and load.used is not None and self.budget.tokens:
            tokens = max(0, int(load.used * self.budget.tokens) - held.tokens)
        before, self.stranger = self.stranger, Room(tokens, sequences)
        self.budget.foreign = Room(min(before.tokens, tokens), min(before.sequences, sequences))

    def _move(self, event: Event, now: float, cause: str) -> None:
        after = TRANSITIONS[self.state].get(event)
        if after is not None and after is not self.state:
            self.state, self.since, self.cause = after, now, cause
