"""A node: what the operator said, what it told us, what we measured, and whether it may be used.

The states are tables in `states`; what moves them is in `standing`.
"""

import sys
from collections.abc import Mapping

import msgspec

from router.core.budget import Budget, Permit, Room
from router.core.call import BATCH, INTERACTIVE, Call, Workload
from router.core.pace import GAP, OBJECTIVE, Pace, Past
from router.core.packing import Bearing
from router.core.standing import LONG_AGO, Standing
from router.core.states import (
    BACKOFF_S,
    FAULTS_TO_DOWN,
    PANIC_S,
    QUIET_S,
    REFUSAL_S,
    STALLED_S,
    TRANSITIONS,
    UP,
    Event,
    Sign,
    State,
)

__all__ = [
    "BACKOFF_S",
    "FAULTS_TO_DOWN",
    "PANIC_S",
    "QUIET_S",
    "REFUSAL_S",
    "TRANSITIONS",
    "UP",
    "Event",
    "Facts",
    "Load",
    "ModelFacts",
    "Node",
    "Sign",
    "Spec",
    "State",
]

EXPECTED = 5.0
"""A first token is waited for this many times as long as the slowest ones of its length took."""

UNTOLD = sys.maxsize
"""The context of a model nobody tells one of: any prompt is shorter."""

FEW = 4
"""An answer beside fewer chats than this shows the usual time between two tokens."""


CACHING = frozenset(("vllm", "sglang", "llamacpp"))
"""Engines that keep what they have read of a prompt, unless somebody turned that off."""


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
    """One measurement: sequences running and waiting, `used` the share of KV tokens held (0 to 1). None is unknown.

    `done` counts tokens read and written since the engine began.
    """

    running: int | None = None
    waiting: int | None = None
    used: float | None = None
    done: float | None = None


class Node(Standing):
    """One server that can answer. Changed only by what is observed; `now` is seconds of any steady clock.

    `contexts` are the public models it serves, each with the longest prompt and answer together in tokens, UNTOLD where
    that is unknown: what `spec` and the `facts` of the last look come to. `chat_contexts` are the same where its pools
    are shaped for chat, none where they are not. `outruns_relay` is whether canaries show that it answers sooner than
    the relay; False while that is not known.
    """

    __slots__ = (
        "bearing",
        "chat_contexts",
        "contexts",
        "facts",
        "load",
        "outruns_relay",
        "pace",
        "progress_at",
        "spec",
        "stranger",
        "takes_priority",
        "trickle_at",
        "trickle_s",
    )

    def __init__(self, spec: Spec, *, reserve: float = 0.0) -> None:
        super().__init__(Budget(spec.tokens, spec.sequences, reserve))
        self.spec = spec
        self.facts = Facts()
        self.load = Load()
        self.progress_at: float | None = None
        self.stranger = Room(0, 0)
        self.pace = Pace()
        self.bearing = Bearing()
        self.trickle_s, self.trickle_at = 0.0, LONG_AGO
        self.takes_priority = True
        self.outruns_relay = False
        self.contexts: Mapping[str, int] = {}
        self.chat_contexts: Mapping[str, int] = {}
        self._know()

    @property
    def name(self) -> str:
        """The operator's name for it."""
        return self.spec.name

    def save(self, share: float, since: float, now: float, *, most: float) -> None:
        """Batch waited here for chat since then: a share of it is its own later, counted once for all who wait."""
        waited = now - max(since, self.trickle_at)
        if waited > 0.0:
            self.trickle_s, self.trickle_at = min(most, self.trickle_s + share * waited), now

    def serves(self, model: str) -> bool:
        """Whether it answers for that public model name."""
        return model in self.contexts

    def own_name(self, model: str) -> str:
        """The name the node itself knows a public model by."""
        return self.spec.models.get(model, model)

    def models(self) -> list[str]:
        """Public names of what it serves."""
        return list(self.contexts)

    def context(self, model: str) -> int | None:
        """Longest prompt and answer together, in tokens, of a model it serves, or None if unknown."""
        context = self.contexts.get(model, UNTOLD)
        return None if context == UNTOLD else context

    def room_for(self, call: Call) -> Room:
        """Prompt and expected output of every sequence, the output capped by what the context leaves."""
        output = call.output_tokens
        left = self.contexts.get(call.model, UNTOLD) - (call.context_tokens or call.prompt_tokens)
        if output > left:
            output = max(0, left)
        return Room(call.prompt_tokens + output * call.sequences, call.sequences)

    def left_s(self, call: Call, past: Past | None) -> float | None:
        """How long reading its prompt here would take; what another node read of it is of no use."""
        return self.pace.left_s(call.prompt_tokens, past if past is None or past.node == self.name else None)

    def hold(self, call: Call, now: float, past: Past | None = None) -> Permit:
        """Take room for a call, for the `with` block of the permit."""
        budget, workload = self.budget, call.workload
        permit = budget.hold(self.room_for(call), workload, prompt_tokens=call.prompt_tokens, now=now)
        permit.past, permit.call = past, call
        if workload is INTERACTIVE:
            self.pace.chat_came(now)
        elif budget.chats:
            permit.reads_s = self.left_s(call, past) or 0.0
            for chat in budget.chatting():
                chat.stalled_s += permit.reads_s
        if past is not None:
            past.moves(self.name, self.pace.known_s(call.prompt_tokens))
        return permit

    def spoke(self, permit: Permit, now: float, *, streamed: bool) -> None:
        """The first token of a call is here; of one that is not streamed the whole answer, which tells no pace."""
        if permit.spoke_at is not None or permit.taken:
            return
        permit.spoke(now)
        if not streamed:
            return
        seconds = now - permit.began_at
        if permit.workload is BATCH and not permit.firm:
            self._got_on(seconds)
        if permit.past is not None and permit.past.spent_s:
            self.pace.resumed(permit.prompt_tokens, seconds, permit.past, keeps=self.facts.engine in CACHING)
        elif permit.took:
            self.pace.took(permit.prompt_tokens, seconds)
        elif permit.quiet:
            chat = permit.workload is INTERACTIVE
            self.pace.read_quietly(permit.prompt_tokens, seconds, chat=chat)

    def take_back(self, permit: Permit, now: float) -> float:
        """Take the room of a batch call back. Returns how many prompt tokens were read for nothing."""
        past = permit.past
        wasted = 0.0
        if past is not None:
            until = now if permit.spoke_at is None else permit.spoke_at
            keeps = self.facts.engine in CACHING
            wasted = self.pace.lost(permit.prompt_tokens, until - permit.began_at, past, keeps=keeps)
            past.taken_at = now
        if permit.spoke_at is None:
            kept = self.pace.kept
            self._got_on((now - permit.began_at) * (self.facts.engine in CACHING if kept is None else kept))
            self._spare(permit, now)
        permit.take()
        return wasted

    def _got_on(self, seconds: float) -> None:
        """Batch was read for so long without the trickle's help, and has that much less of it to come."""
        self.trickle_s = max(0.0, self.trickle_s - seconds)

    def _spare(self, permit: Permit, now: float) -> None:
        """Answers that a prompt was read beside are spared what is left of it."""
        rest_s = permit.began_at + permit.reads_s - now
        if rest_s > 0.0:
            for chat in self.budget.chatting():
                if chat.began_at <= permit.began_at:
                    chat.stalled_s = max(0.0, chat.stalled_s - rest_s)

    def chatted(self, permit: Permit, tokens: int, now: float, stated_s: float | None) -> None:
        """An interactive call ended well, `tokens` long. `stated_s` is the objective for its first token, if stated."""
        if permit.spoke_at is None:
            return
        pace, seconds = self.pace, now - permit.spoke_at
        gap_s, objective = pace.gap_s, pace.objective_s(stated_s)
        pace.answered(tokens)
        slow = tokens > 1 and gap_s is not None and seconds / (tokens - 1) > GAP * gap_s
        own_s = pace.prefill_s(permit.prompt_tokens) or 0.0
        late = objective is not None and permit.spoke_at - permit.began_at > (
            objective if own_s < objective else OBJECTIVE * own_s
        )
        self.bearing.judge(permit.chats, kept=not (slow or late))
        if gap_s is None or permit.chats < FEW:
            pace.wrote(tokens - 1, seconds)

    def respec(self, spec: Spec, *, reserve: float) -> None:
        """Take in what the operator says now. What was learnt stays, and so does who holds room."""
        self.spec = spec
        self.budget.reserve = reserve
        self._know()

    def silence_s(self) -> float | None:
        """How long its first tokens may take at most with all that is read there now; None where that is not known.

        Where others queue in the engine, or it does not tell how much it takes, nobody can know.
        """
        budget, seconds = self.budget, 0.0
        if not (budget.told and budget.prefilling) or self.load.waiting or budget.foreign.sequences:
            return None
        for length, tokens in budget.lengths.items():
            worst = self.pace.worst(length)
            if worst is None:
                return None
            seconds += worst * tokens
        return EXPECTED * self.stretch * seconds

    def seen(self, facts: Facts, load: Load, now: float, *, held: int = 0) -> None:
        """Take in a look that answered. `held` is how many sequences of ours ran when it set out."""
        before = self.load
        self.facts = facts
        self.load = load
        self._know()
        self._meet(load, held)
        if self._stuck(before, load, now):
            self._stalled(now, f"no token for {STALLED_S:g} s while calls run")
        else:
            self._looked(now)

    def missed(self, now: float, cause: str, *, refused: bool) -> None:
        """Take in a look that failed. While a prompt is read that takes long, silence is no sign of death."""
        self.load, self.budget.foreign, self.stranger = Load(), Room(0, 0), Room(0, 0)
        self.progress_at = None
        self._overlooked(now, cause, max(QUIET_S, self.silence_s() or 0.0), refused=refused)

    def _know(self) -> None:
        """What was said and what was told come to: room, and what is served with which context."""
        said, told = self.spec, self.facts
        self.budget.tokens = said.tokens if said.tokens is not None else told.tokens
        self.budget.sequences = said.sequences if said.sequences is not None else told.sequences
        most = UNTOLD if said.context is None else said.context
        contexts = {}
        for model in said.models or told.models:
            known = told.models.get(said.models.get(model, model))
            contexts[model] = most if known is None or known.context is None else min(most, known.context)
        self.contexts, self.chat_contexts = contexts, contexts if INTERACTIVE in said.pools else {}

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

    def _stuck(self, before: Load, load: Load, now: float) -> bool:
        """Whether calls of ours alone run there and it has counted no token for too long."""
        idle = not load.running or load.done is None or load.running > self.budget.held().sequences
        if idle or load.done != before.done or self.progress_at is None:
            self.progress_at = None if idle else now
            return False
        reading_s = self.silence_s() if self.budget.prefilling else 0.0
        return reading_s is not None and now - self.progress_at > max(STALLED_S, reading_s)
