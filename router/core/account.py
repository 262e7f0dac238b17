"""What a call came to once it has ended: worked out once, and told to all who count."""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import msgspec

from router.core.call import Call, Outcome, Usage, Workload

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5, 10, 30, 120)
DURATION_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 30, 120, 600, 3600)
"""Bounds of the buckets in which times are counted; a value on a bound is within it."""
MOST_KINDS = 256
"""Kinds added up apart before they have to be taken."""

Kind = tuple[str, Workload, str, Outcome, bool, bool]
"""Endpoint path, workload, place and outcome of a call; whether it was answered, and whether tokens were counted."""


class Account(msgspec.Struct, frozen=True, gc=False):
    """One ended call.

    `place` is the node, or `relay`, that was asked last, empty for none; `legs` how many attempts there were, and
    `answered` whether the last of them began to answer; `status` what the caller got, 0 if nobody was there to get it.
    `queued_s` is the wait for room; `first_token_s` and `duration_s` count from the call's arrival, None for what never
    came. `usage` is as the node counted; `written` the tokens of one sequence of an answer that was streamed to its
    end, 0 for any other.
    """

    call: Call
    outcome: Outcome
    place: str = ""
    legs: int = 0
    answered: bool = False
    status: int = 0
    queued_s: float = 0.0
    first_token_s: float | None = None
    duration_s: float = 0.0
    usage: Usage | None = None
    written: int = 0


class Sum:
    """Accounts of one kind added up: calls by bucket of a time, and sums. Only streamed calls have a first token."""

    __slots__ = ("duration", "duration_s", "first_token", "first_token_s", "output", "prompt", "queued", "queued_s")

    def __init__(self) -> None:
        self.queued = [0] * (len(QUEUE_S) + 1)
        self.duration = [0] * (len(DURATION_S) + 1)
        self.first_token = [0] * (len(FIRST_TOKEN_S) + 1)
        self.queued_s = self.duration_s = self.first_token_s = 0.0
        self.prompt = self.output = 0


class Accounts:
    """Accounts added up by kind until they are taken. `full` is called when there are too many kinds: it must take."""

    def __init__(self, full: Callable[[], None]) -> None:
        self._full = full
        self._sums: dict[Kind, Sum] = {}

    def add(self, account: Account) -> None:
        """One more."""
        call, usage = account.call, account.usage
        kind = (call.endpoint.path, call.workload, account.place, account.outcome, account.answered, usage is not None)
        whole = self._sums.get(kind)
        if whole is None:
            whole = self._begin(kind)
        seconds = account.queued_s
        whole.queued[bisect_left(QUEUE_S, seconds)] += 1
        whole.queued_s += seconds
        seconds = account.duration_s
        whole.duration[bisect_left(DURATION_S, seconds)] += 1
        whole.duration_s += seconds
        if call.stream and account.first_token_s is not None:
            seconds = account.first_token_s
            whole.first_token[bisect_left(FIRST_TOKEN_S, seconds)] += 1
            whole.first_token_s += seconds
        if usage is not None:
            if usage.prompt > 0:
                whole.prompt += usage.prompt
            if usage.completion > 0:
                whole.output += usage.completion

    def _begin(self, kind: Kind) -> Sum:
        if len(self._sums) >= MOST_KINDS:
            self._full()
        whole = self._sums[kind] = Sum()
        return whole

    def take(self) -> Iterable[tuple[Kind, Sum]]:
        """What was added since the last time."""
        sums, self._sums = self._sums, {}
        return sums.items()
