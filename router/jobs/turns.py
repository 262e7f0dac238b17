"""The lines this router holds, and whose turn it is among those that do not run yet.

Rules:
- Lines of one model run in the order they were claimed. A model whose calls wait for room holds back no other.
- A line that nodes failed under is in doubt: one of its kind may kill nodes. Others run beside it, but of those in
  doubt only a few at once, and one alone when it is near its last attempt. So what kills nodes fails alone: whoever is
  beside it once or twice has attempts left.
"""

from asyncio import Task, get_running_loop
from collections import Counter, deque
from collections.abc import Callable

from router.core.pace import Past
from router.jobs.store import JobRow, NewResult

FEW = 8
"""Lines in doubt that run at once for one model."""
FIRST_DOUBT = 2
"""Attempts a line has lost when it comes in doubt: one is what a node's end costs all that run there."""
LAST_ATTEMPTS = 2
"""With so many left, a line in doubt runs without another."""


class Held:
    """A line under our lease. `safe_until` is when the lease ends, in seconds of the runner's clock.

    `past` is what take-backs cost it; the line stays ours, and in the store, through all of them.
    """

    __slots__ = ("call_id", "job", "lost", "node", "past", "result", "safe_until", "task")

    def __init__(self, job: JobRow, safe_until: float) -> None:
        self.job = job
        self.safe_until = safe_until
        self.task: Task[None] | None = None
        self.call_id: str | None = None
        self.node: str | None = None
        self.past = Past(job.node)
        self.result: NewResult | None = None
        self.lost = False


class Pace:
    """Lines that ended lately."""

    def __init__(self) -> None:
        self._ended: Counter[int] = Counter()

    def count(self, now: float) -> None:
        """One more ended. `now` in seconds."""
        second = int(now)
        if second not in self._ended:
            self._ended = Counter({second - 1: self._ended[second - 1]})
        self._ended[second] += 1

    def of(self, now: float) -> int:
        """Lines a second, over this second or the last."""
        second = int(now)
        return max(self._ended[second - 1], self._ended[second])


class Recent(dict[str, str]):
    """What was noted last, of the `most` noted latest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def note(self, name: str, told: str) -> None:
        """Keep this, and forget the oldest if there are too many."""
        self.pop(name, None)
        self[name] = told
        if len(self) > self._most:
            del self[next(iter(self))]


class Soon:
    """Call it to have `act` called in the next turn of the loop, once however often this is called."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._due = False

    def __call__(self) -> None:
        if not self._due:
            self._due = True
            get_running_loop().call_soon(self._do)

    def _do(self) -> None:
        self._due = False
        self._act()


class Turns:
    """Lines of one model. `retries` is how many attempts a line has."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._sure: deque[Held] = deque()
        self._doubted: deque[Held] = deque()
        self._running: set[Held] = set()
        self.preparing = 0

    def __len__(self) -> int:
        return len(self._sure) + len(self._doubted)

    @property
    def ready(self) -> int:
        """Lines that could run whatever else runs."""
        return len(self._sure)

    def add(self, held: Held) -> None:
        """One more line waits for its turn."""
        (self._doubted if self._in_doubt(held) else self._sure).append(held)

    def take(self) -> Held | None:
        """The line whose turn it is; it runs until `done`."""
        if self._doubted and self._may_run(self._doubted[0]):
            held = self._doubted.popleft()
            self._running.add(held)
            return held
        return self._sure.popleft() if self._sure else None

    def done(self, held: Held) -> None:
        """A line that was taken runs no more."""
        self._running.discard(held)

    def drop(self, held: Held) -> None:
        """A line waits for its turn no more."""
        for waiting in (self._sure, self._doubted):
            if held in waiting:
                waiting.remove(held)

    def _in_doubt(self, held: Held) -> bool:
        attempts = held.job.attempts
        return attempts >= FIRST_DOUBT or (attempts > 0 and self._alone(held))

    def _alone(self, held: Held) -> bool:
        return self._retries - held.job.attempts <= LAST_ATTEMPTS

    def _may_run(self, held: Held) -> bool:
        if self._alone(held):
            return not self._running
        return len(self._running) < FEW and not any(self._alone(other) for other in self._running)
