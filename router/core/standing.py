"""Whether a node may be used, from what is seen of it.

Kinds of evidence: an answer (GOOD), a failure of the node (FAULT, SILENT, GONE), saturation (REFUSED: the node is left
alone for a moment that doubles while it goes on refusing), and neither (a caller's own error, a client that left),
which moves nothing. A node that comes back gets one call, then few at once. Nothing here has a clock: `now` is seconds
of any steady clock, and what keeps nodes from coming back all at once is `jitter`, handed in from outside.
"""

import math
from collections.abc import Callable
from typing import Any

from router.core.budget import Budget, Permit
from router.core.call import Workload
from router.core.states import (
    BACKOFF_S,
    CALM_S,
    FAULTS_TO_DOWN,
    ON_TRIAL,
    OUT,
    PANIC_S,
    RAMP_CALLS,
    RAMP_S,
    REFUSAL_S,
    REFUSALS_TO_BUSY,
    SILENCE,
    STEADY_S,
    TERMS,
    TRANSITIONS,
    Access,
    Event,
    Sign,
    State,
)

GOOD, READY = Sign.GOOD, State.READY
"""What almost every call says and finds, under names of their own: an enum's attribute is a slow look-up in 3.11."""
LONG_AGO = -1e9
STRETCH = 64.0
"""A first token that did not come in time is waited for twice as long the next time, up to so many times."""


def _none() -> float:
    return 1.0


class Standing:
    """The state of a node and what led to it. `moved` is told, with the state before, when it changed.

    `jitter` gives the factor by which the next wait is made longer or shorter; `stretch` is how many times longer than
    expected a first token is waited for, because it was given up too early or the node hangs. `moves` counts what
    changed it, and `spent` is how many seconds it was in each state that it has left.
    """

    __slots__ = (
        "answers",
        "back_at",
        "backoff_s",
        "budget",
        "cause",
        "entered_at",
        "failed_at",
        "faults",
        "flaps",
        "heard_at",
        "hung",
        "jitter",
        "misses",
        "moved",
        "moves",
        "mute",
        "refusal_s",
        "refusals",
        "refused_until",
        "retry_at",
        "since",
        "spent",
        "state",
        "strained_at",
        "stretch",
        "trial",
        "unseen",
    )

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.state = State.STARTING
        self.cause = "not yet seen"
        self.since = self.failed_at = self.heard_at = self.retry_at = self.refused_until = LONG_AGO
        self.strained_at = self.back_at = LONG_AGO
        self.faults = self.misses = self.unseen = self.refusals = self.answers = self.flaps = 0
        self.hung = self.mute = False
        self.stretch = 1.0
        self.trial: Permit | None = None
        self.backoff_s = BACKOFF_S[0]
        self.refusal_s = REFUSAL_S[0]
        self.moved: Callable[[Any, State], None] | None = None
        self.moves: dict[tuple[State, Event, State], int] = {}
        self.entered_at: float | None = None
        self.spent: dict[State, float] = {}
        self.jitter: Callable[[], float] = _none

    def met(self, now: float) -> None:
        """It is there from now on: the time in its first state begins. A second word of it changes nothing."""
        if self.entered_at is None:
            self.entered_at = now

    def stays(self, now: float) -> dict[State, float]:
        """Seconds in each state so far, that of now included."""
        stay = 0.0 if self.entered_at is None else max(0.0, now - self.entered_at)
        return self.spent | {self.state: self.spent.get(self.state, 0.0) + stay}

    def usable(self, now: float, *, panic: bool = False) -> bool:
        """Whether a call may be sent now. In panic (no node is usable) waits are cut short."""
        if self.state in OUT:
            return False
        quiet = now >= self.refused_until or (panic and now >= self.failed_at + PANIC_S)
        if self.state in ON_TRIAL:
            due = now >= self.retry_at or (panic and now >= self.failed_at + PANIC_S) or self.state is not State.DOWN
            return quiet and due and not self.budget.holds(self.trial)
        return quiet and (now >= self.back_at + RAMP_S or self._fresh() < self.ramp(now))

    def access(self, workload: Workload) -> Access:
        """What its state says to new calls of that workload."""
        return TERMS[self.state].access(workload)

    def ramp(self, now: float) -> float:
        """How many calls at once it may have so soon after its return."""
        return (RAMP_CALLS + self.answers) * math.exp2(min(RAMP_S, now - self.back_at))

    def observe(self, sign: Sign, now: float, cause: str) -> None:
        """Take in how one call went."""
        if sign is not GOOD:
            self._against(sign, now, cause)
            return
        self.heard_at = self.refused_until = now
        self.answers += 1
        if self.faults or self.misses or self.hung or self.mute or self.stretch > 1.0 or self.refusal_s > REFUSAL_S[0]:
            self._forgive_faults()
        if self.state is not READY:  # there an answer leads nowhere, and the first back-off was set on the way
            self._came_back(now, cause)

    def _against(self, sign: Sign, now: float, cause: str) -> None:
        """One call did not go well."""
        match sign:
            case Sign.REFUSED:
                self.failed_at = now
                self.refused_until = now + self.refusal_s
                self.refusal_s = min(self.refusal_s * 2, REFUSAL_S[1])
                self.refusals += 1
                if self.refusals >= REFUSALS_TO_BUSY:
                    self._strained(now, cause)
            case Sign.FAULT | Sign.GONE | Sign.SILENT:
                self.failed_at = now
                silent = sign is Sign.SILENT
                self.stretch = min(self.stretch * (2.0 if silent else 1.0), STRETCH)
                self.faults += SILENCE if silent else 1
                self.hung, self.mute = sign is not Sign.GONE, silent
                gone_quiet = silent and self.unseen > 0
                if self.faults >= FAULTS_TO_DOWN or gone_quiet or self.state in ON_TRIAL:
                    self._fail(now, cause)
            case _:
                pass

    def _overlooked(self, now: float, cause: str, silence_s: float, *, refused: bool) -> None:
        """A look failed. Who said something on a call within `silence_s` is busy, unless it refuses connections."""
        self.unseen += 1
        if self.mute and self.heard_at < self.failed_at:
            self._fail(now, cause)  # neither calls nor looks get a word out of it
            return
        if not refused and now - self.heard_at <= silence_s:
            if self.unseen >= REFUSALS_TO_BUSY:
                self._strained(now, cause)
            return
        self.misses += 1
        if refused:
            self.hung = False  # whoever answers there next is another process
        if self.misses < FAULTS_TO_DOWN:
            return
        self.failed_at = now
        if self.state is State.DOWN:
            self.retry_at = max(self.retry_at, now + self.backoff_s)  # no try was made that could fail
        else:
            self._fail(now, cause)

    def _looked(self, now: float) -> None:
        """A look was answered.

        A node whose calls failed although it was reached stays down for its back-off: its front may live while its
        engine does not.
        """
        self.misses = self.unseen = 0
        if self.state is State.BUSY:
            if now >= max(self.strained_at, self.refused_until) + CALM_S:
                self.refusals = 0
                self._move(Event.CALMED, now, "calm again")
        elif not self.hung or now >= self.retry_at:
            self._move(Event.PROBED, now, "a look was answered")

    def _stalled(self, now: float, cause: str) -> None:
        """It is reached, runs calls, and gets nowhere."""
        self.failed_at, self.hung = now, True
        self._fail(now, cause)

    def heard(self, now: float) -> None:
        """Something came from it on a call."""
        self.heard_at = now

    def try_again(self, now: float, permit: Permit) -> None:
        """A call is about to be sent to a node that is not ready. Until it is over no other is sent."""
        if self.state in ON_TRIAL:
            self.trial = permit
            self._move(Event.TRIED, now, self.cause)

    # What somebody decided

    def diagnosed(self, now: float, cause: str, *, slower: bool) -> None:
        """A diagnosis says that the node alone became slower, or that it did not."""
        self._move(Event.DECAYED if slower else Event.MENDED, now, cause)

    def drain(self, now: float, cause: str) -> None:
        """It gets no new calls from now on."""
        self._move(Event.DRAIN, now, cause)

    def resume(self, now: float, cause: str) -> None:
        """A drained node may be used again, carefully."""
        self._forgive(now)
        self._move(Event.RESUME, now, cause)

    def recycle(self, now: float, cause: str) -> None:
        """Its hook begins."""
        self._move(Event.HOOK, now, cause)

    def returned(self, now: float, cause: str) -> None:
        """It answered after its hook: another process, of which nothing bad is known."""
        self._forgive(now)
        self._move(Event.RETURNED, now, cause)

    def lost(self, now: float, cause: str) -> None:
        """Its hook failed, or it did not come back in time. If it does later, looks and calls bring it in."""
        self.failed_at, self.hung = now, True
        self.retry_at = now + self.backoff_s * self.jitter()
        self._move(Event.LOST, now, cause)

    def _forgive_faults(self) -> None:
        """An answer says that what went wrong before is over; how long it may be waited for it tells slowly."""
        self.faults = self.misses = self.refusals = 0
        self.hung = self.mute = False
        self.refusal_s = REFUSAL_S[0]
        self.stretch = max(1.0, self.stretch * 0.95)

    def _came_back(self, now: float, cause: str) -> None:
        """A call was answered in another state than READY."""
        self.backoff_s = min(BACKOFF_S[0] * 2.0**self.flaps, BACKOFF_S[1])
        if self.state in ON_TRIAL:
            self.back_at, self.answers = now, 0
        self._move(Event.ANSWERED, now, cause)

    def _strained(self, now: float, cause: str) -> None:
        self.strained_at = now
        self._move(Event.STRAINED, now, cause)

    def _fail(self, now: float, cause: str) -> None:
        self.mute = False
        if self.state in OUT:
            return  # it is nobody's turn to try it, so no wait grows
        if self.state not in ON_TRIAL:
            self.flaps = min(self.flaps + 1, 6) if now - self.back_at < STEADY_S else 0
            self.backoff_s = min(BACKOFF_S[0] * 2.0**self.flaps, BACKOFF_S[1])
        self.retry_at = now + self.backoff_s * self.jitter()
        self.backoff_s = min(self.backoff_s * 2, BACKOFF_S[1])
        self._move(Event.FAILED, now, cause)

    def _forgive(self, now: float) -> None:
        self.faults = self.misses = self.unseen = self.refusals = self.flaps = 0
        self.hung, self.mute, self.trial = False, False, None
        self.backoff_s, self.refusal_s = BACKOFF_S[0], REFUSAL_S[0]
        self.refused_until = self.retry_at = now

    def _fresh(self) -> int:
        """Calls that began since its return."""
        return sum(permit.began_at >= self.back_at for permit in self.budget)

    def _move(self, event: Event, now: float, cause: str) -> None:
        before = self.state
        after = TRANSITIONS[before].get(event)
        if after is not None:
            self.spent, self.entered_at = self.stays(now), now
            self.moves[before, event, after] = self.moves.get((before, event, after), 0) + 1
            self.state, self.since, self.cause = after, now, cause
            if self.moved is not None:
                self.moved(self, before)
