"""The states of a node as tables: what moves them, who may be sent there, and how long each lasts.

`TRANSITIONS` says what follows on what; a pair that is not there changes nothing. `TERMS` says what a state means for
calls. `docs/nodes.md` is drawn from both.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from router.core.call import INTERACTIVE, Workload

__all__ = ["STEADY_S", "TERMS", "TRANSITIONS", "Access", "Event", "Sign", "State", "Terms"]

FAULTS_TO_DOWN = 3
"""Failures in a row that take a node out. One is chance, two may be one event seen twice."""
SILENCE = 2
"""A call that got no head in time weighs so many failures: it waited for long, and two of them settle it."""
BACKOFF_S = (1.0, 60.0)
"""First and longest wait before a node that is down is tried again; it doubles with every failed try."""
STEADY_S = 60.0
"""A node that fails again within this long of its return is flapping: its first wait doubles each time."""
REFUSAL_S = (0.5, 8.0)
"""First and longest wait after a refusal."""
REFUSALS_TO_BUSY = 3
"""Refusals in a row, or looks missed in a row while calls are answered, that make a node busy."""
CALM_S = 5.0
"""A busy node is ready again once it has refused nothing and missed no look for so long."""
QUIET_S = 10.0
"""A node that said anything on a call within this long is alive, whatever its looks do."""
PANIC_S = 1.0
"""With every node out, each is tried again this long after its last failure."""
RAMP_CALLS = 2
"""Calls at once that a node gets when it is back; one more with each that is answered, twice as many each second."""
RAMP_S = 8.0
"""After so long it gets what it has room for."""
STALLED_S = 30.0
"""An engine that runs calls and writes no token for this long, and for longer than its prompts take, is stuck."""


class State(StrEnum):
    """Whether a node may be used."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    DEGRADED = "degraded"
    DRAINING = "draining"
    RECYCLING = "recycling"
    PROBATION = "probation"
    DOWN = "down"


class Sign(StrEnum):
    """What one call says of the node. GONE and SILENT are faults: nobody listens there, or no head came in time."""

    GOOD = "good"
    FAULT = "fault"
    SILENT = "silent"
    GONE = "gone"
    REFUSED = "refused"
    NEITHER = "neither"


class Event(StrEnum):
    """What moves the state."""

    ANSWERED = "answered"
    PROBED = "look answered"
    STRAINED = "refuses, or misses looks while it answers calls"
    CALMED = "calm again"
    FAILED = "failed too often"
    TRIED = "tried again"
    DECAYED = "diagnosed as slower"
    MENDED = "diagnosed as well"
    DRAIN = "drain"
    RESUME = "resume"
    HOOK = "hook begins"
    RETURNED = "answered after its hook"
    LOST = "hook failed, or no answer after it"


_OUT = {Event.DRAIN: State.DRAINING}

TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STARTING: {Event.ANSWERED: State.READY, Event.PROBED: State.READY, Event.FAILED: State.DOWN, **_OUT},
    State.READY: {Event.STRAINED: State.BUSY, Event.DECAYED: State.DEGRADED, Event.FAILED: State.DOWN, **_OUT},
    State.BUSY: {Event.CALMED: State.READY, Event.DECAYED: State.DEGRADED, Event.FAILED: State.DOWN, **_OUT},
    State.DEGRADED: {Event.MENDED: State.READY, Event.FAILED: State.DOWN, **_OUT},
    State.DRAINING: {Event.RESUME: State.PROBATION, Event.HOOK: State.RECYCLING},
    State.RECYCLING: {Event.RETURNED: State.PROBATION, Event.LOST: State.DOWN},
    State.PROBATION: {Event.ANSWERED: State.READY, Event.FAILED: State.DOWN, **_OUT},
    State.DOWN: {Event.ANSWERED: State.READY, Event.PROBED: State.PROBATION, Event.TRIED: State.PROBATION, **_OUT},
}
"""State and event to next state."""


class Access(StrEnum):
    """Whether new calls of a workload may be sent there."""

    YES = "yes"
    LAST = "when no other node has room"
    CHOSEN = "as `care.degraded_chat` says"
    ONE = "one at a time"
    NO = "no"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a state means: in words, for new calls of each workload, and how long it lasts."""

    meaning: str
    interactive: Access
    batch: Access
    lasts: str

    def access(self, workload: Workload) -> Access:
        """What new calls of that workload may do."""
        return self.interactive if workload is INTERACTIVE else self.batch


TERMS: Mapping[State, Terms] = {
    State.STARTING: Terms(
        meaning="not seen yet",
        interactive=Access.YES,
        batch=Access.YES,
        lasts="until the first look or call",
    ),
    State.READY: Terms(
        meaning="answers",
        interactive=Access.YES,
        batch=Access.YES,
        lasts=f"as long as it does; few calls at once in its first {RAMP_S:g} s after a return",
    ),
    State.BUSY: Terms(
        meaning="answers calls, but misses looks or says 429 or 503",
        interactive=Access.LAST,
        batch=Access.LAST,
        lasts=f"until it has done neither for {CALM_S:g} s",
    ),
    State.DEGRADED: Terms(
        meaning="answers, and a diagnosis says that it alone has become slower",
        interactive=Access.CHOSEN,
        batch=Access.LAST,
        lasts="until a diagnosis says otherwise, or it is recycled",
    ),
    State.DRAINING: Terms(
        meaning="taken out by the operator, or for recycling: batch is taken back, chat ends as it would have",
        interactive=Access.NO,
        batch=Access.NO,
        lasts="until `resume`, or the hook: when no call runs there any more, at the latest after `care.drain_s`",
    ),
    State.RECYCLING: Terms(
        meaning="its hook restarts it",
        interactive=Access.NO,
        batch=Access.NO,
        lasts="until it answers one token, at most `care.recycle.ready_s`",
    ),
    State.PROBATION: Terms(
        meaning="answers again, or is tried again",
        interactive=Access.ONE,
        batch=Access.ONE,
        lasts="until one call succeeds or fails",
    ),
    State.DOWN: Terms(
        meaning="failed too often",
        interactive=Access.NO,
        batch=Access.NO,
        lasts=f"until a look or a call succeeds; tried with one call after {BACKOFF_S[0]:g} s,"
        f" doubling to {BACKOFF_S[1]:g} s",
    ),
}
"""What each state means."""

UP = frozenset((State.READY, State.BUSY, State.DEGRADED, State.PROBATION))
"""States in which a node is there and answers."""
ON_TRIAL = frozenset((State.DOWN, State.PROBATION))
"""States in which one call at a time shows whether it works again."""
OUT = frozenset((State.DRAINING, State.RECYCLING))
"""States in which somebody took it out: nothing that is seen of it brings it back."""
