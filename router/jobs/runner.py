"""Runs the lines of batches: claims them, sends each down the corridor as a call, and writes down how it ended.

Rules:
- Lines are claimed only as fast as nodes take them: one or two calls of a model wait for room, the rest wait as rows. A
  few more are held ready, as many as end in half a second.
- A line is ours while its lease lasts. Leases are renewed far more often than they end; nothing is sent under a lease
  that may have ended; a lease that is lost ends its call at once.
- A result that is known is kept until it is written. While the store cannot be reached, or is full, nothing new begins;
  what runs goes on. Leases are renewed before anything is claimed again, so that no line of ours is taken for free.
- A line ends by an answer, by its own fault, or by its last attempt. All else puts it back (`verdicts`).
- Whoever stops puts back what runs, uncharged.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from router.core.call import Call, Outcome, Workload
from router.core.job import retry_delay_s
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.trip import RELAY
from router.errors import Answer, BadRequest, NodeFailed, StoreError, StoreFull, StoreLost, TakenBack
from router.fleet.fleet import Fleet
from router.jobs.ahead import Ahead
from router.jobs.answers import read
from router.jobs.assemble import Assembly
from router.jobs.calls import Calls
from router.jobs.store import JobRow, NewResult, Store, Topic
from router.jobs.terms import Terms, never
from router.jobs.turns import Held, Pace, Recent, Soon, Turns
from router.jobs.upkeep import always
from router.jobs.verdicts import Back, End, Plain, Verdict, answered, broken

__all__ = ["Runner", "Terms"]

WAITING = 1
"""With more lines of a model waiting for room, no further one begins. Calls of people who wait hold back none."""
PREPARING = 8
"""Lines of one model that are read and counted at once, on their way to the corridor."""
AT_ONCE = 1
"""Lines of one model that begin in one turn of the loop, so that chats and polls have theirs in between."""
DEPTH = (4, 256)
"""Fewest and most lines of one model held ready."""
TICK_S = 0.05
"""How often lines begin when nothing tells that there is room, as when a chat ends."""
RENEW_S = 1.5
"""Longest time between two renewals, and so until a batch cancelled at another router stops here."""
BACK_S = 3.0
"""Longest wait of a line that was put back through no fault, and so longest idleness after nodes come back."""
STOP_S = 5.0
"""How long putting back may take at the end."""
SETBACKS = 1024
"""Batches whose last setback is remembered."""
LOST_S = 0.5
"""How often a store that cannot be reached is asked again."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class Runner:
    """`run` it until cancelled.

    `relays` says whether a line may go to the relay at once; `also` names models to hold lines of beside those of
    nodes; `delay` says how long one waits before its n-th next try. `ended` counts how tries ended: done, failed,
    charged, returned, lost. `held` are the lines under our lease, `taken` how many ever were; `setbacks` tells by
    batch why a line was put back last.
    """

    store: Store
    dispatcher: Dispatcher
    fleet: Fleet
    calls: Calls
    terms: Terms = field(default_factory=Terms)
    relays: Callable[[JobRow, Call], bool] = never
    also: Callable[[], Iterable[str]] = tuple
    delay: Callable[[int, float], float] = retry_delay_s
    clock: Callable[[], float] = time.monotonic
    ended: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.held: dict[tuple[str, int], Held] = {}
        self.setbacks = Recent(SETBACKS)
        self.taken = 0
        self.feed_soon = Soon(self.feed)
        self._group: asyncio.TaskGroup | None = None
        self._turns: dict[str, Turns] = {}
        self._ahead = Ahead(self.store, self._waits)
        self._bytes = 0
        self._served: tuple[float, list[str]] = (-1.0, [])
        self._pace = Pace()
        self._stuck = 0
        self._full = self._lost = False
        self._losses = 0
        self._low = asyncio.Event()
        self._renewed = asyncio.Event()

    @property
    def trouble(self) -> str | None:
        """Why nothing begins, if nothing does."""
        if self._lost:
            return "The store cannot be reached."
        return "The store has no space left." if self._stuck or self._full else None

    async def run(self) -> None:
        """Run lines until cancelled; then end what runs and put it back."""
        async with asyncio.TaskGroup() as lines:
            self._group = lines
            try:
                async with asyncio.TaskGroup() as loops:
                    for loop in (self._claim, self._tick, self._renew):
                        loops.create_task(always(loop), name=f"jobs {loop.__name__}")
            finally:
                await self._stop()

    # Lines in

    async def _claim(self) -> None:
        """Hold a few lines ready for every model that could use them."""
        while True:
            hungry = self._hungry()
            if not hungry or self._lost or self._stuck:
                self._low.clear()
                await self._low.wait()
                continue
            seen = self.store.wakes.count(Topic.JOBS)
            began = self.clock()
            limit = min(self.terms.lines - len(self.held), sum(hungry.values()))
            try:
                jobs = await self.store.claim(models=hungry, limit=limit, lease_s=self.terms.lease_s)
            except (StoreLost, StoreFull) as error:
                self._full = isinstance(error, StoreFull)
                self._lose(error)
                await asyncio.sleep(LOST_S)
                continue
            self._full = False
            if jobs:
                self._hold(jobs, began + self.terms.lease_s)
                await self._ahead.read(jobs)
            else:
                await self.store.wakes.wait(Topic.JOBS, seen, timeout_s=1.0)

    def _hungry(self) -> dict[str, int]:
        """Models for which fewer lines are held ready than half of what should be, with how many more should be."""
        if len(self.held) >= self.terms.lines:
            return {}
        depth = max(DEPTH[0], min(DEPTH[1], self._pace.of(self.clock()) // 2))
        ready = {model: self._turns[model].ready if model in self._turns else 0 for model in self._models()}
        return {model: depth - count for model, count in ready.items() if count <= depth // 2}

    def _models(self) -> list[str]:
        now = self.clock()
        if now >= self._served[0]:
            served = dict.fromkeys(model for node in self.fleet.nodes for model in node.models())
            self._served = (now + 0.25, list(served | dict.fromkeys(self.also())))
        return self._served[1]

    def _waits(self, job: JobRow) -> bool:
        """Whether a line of ours has not begun."""
        held = self.held.get(job.key)
        return held is not None and held.task is None

    def _hold(self, jobs: Iterable[JobRow], safe_until: float) -> None:
        for job in jobs:
            before = self.held.get(job.key)
            if before is not None:
                self._abandon(before)
            self.taken += 1
            held = self.held[job.key] = Held(job, safe_until)
            self._turns.setdefault(job.model, Turns(self.terms.retries)).add(held)
        self.feed()

    # Lines out

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.held or not self._low.is_set():  # else there is nothing to begin, and more is being claimed
                self.feed()

    def feed(self) -> None:
        """Begin as many lines as there is room for. Cheap; call it whenever something changed."""
        if self._lost or self._stuck or self._group is None:
            return
        waiting = self._waiting()
        for model, turns in self._turns.items():
            calls = waiting[model]
            room = PREPARING - calls - turns.preparing if calls <= WAITING else 0
            begun = 0
            while begun < min(room, AT_ONCE) and self._bytes < self.terms.bytes and (held := turns.take()):
                self._start(self._group, held, turns)
                begun += 1
            if AT_ONCE == begun < room:
                self.feed_soon()
        if self._hungry():
            self._low.set()

    def _waiting(self) -> Counter[str]:
        """Lines of ours, by model, that wait for room and never had any. Not counted while too few to matter."""
        admission = self.dispatcher.admission
        if admission.waiting(Workload.BATCH) <= WAITING:
            return Counter()
        ours = {held.call_id for held in self.held.values()}
        return Counter(
            waiter.call.model for waiter in admission.waiters() if waiter.call.id in ours and not waiter.returned
        )

    def _start(self, group: asyncio.TaskGroup, held: Held, turns: Turns) -> None:
        turns.preparing += 1
        self._bytes += held.job.length
        held.task = group.create_task(self._work(held, turns), name=f"job {held.job.request_id}")

    async def _work(self, held: Held, turns: Turns) -> None:
        """The whole life of one try."""
        try:
            await self._settle(held, await self._try(held, turns))
        except asyncio.CancelledError:
            if not held.lost:
                await self._give_back(held)
        except Exception:
            log.error("a line failed through a fault of ours", batch=held.job.batch_id, exc_info=True)
            await self._give_back(held, fault=True)
        finally:
            turns.done(held)
            self._bytes -= held.job.length
            self._forget(held)
            self.feed_soon()

    async def _try(self, held: Held, turns: Turns) -> Verdict:
        try:
            call = await self._call(held, streamed=True)
        except BadRequest as error:
            return broken(error, request_id=None)
        finally:
            turns.preparing -= 1
            # Not before this task is in the corridor, where it can be counted.
            self.feed_soon()
        verdict = await self._ask(held, call)
        if isinstance(verdict, Plain):
            verdict = await self._ask(held, await self._call(held, streamed=False))
        return verdict

    async def _call(self, held: Held, *, streamed: bool) -> Call:
        job = held.job
        line = self._ahead.take(job) or await self._insist(lambda: self.store.line(job))
        call = await self.calls.of(job, line, streamed=streamed)
        await self._sure(held)
        held.call_id = call.id
        return msgspec.structs.replace(call, fallback=True) if self.relays(job, call) else call

    async def _sure(self, held: Held) -> None:
        """Wait until the line is surely ours."""
        while self.trouble is not None or self.clock() >= held.safe_until:
            await self._renewed.wait()

    async def _ask(self, held: Held, call: Call) -> Verdict:
        while True:
            try:
                async with self.dispatcher.open(call, held.past) as reply:
                    held.node = reply.node
                    said = await read(reply, call)
                body = said.body() if isinstance(said, Assembly) else said
                relayed = reply.node == RELAY
                return answered(reply.status, body, request_id=call.id, streamed=call.stream, relayed=relayed)
            except TakenBack:
                await self._sure(held)
            except (Answer, NodeFailed) as error:
                return broken(error, request_id=call.id)

    # Ends

    async def _settle(self, held: Held, verdict: Verdict) -> None:
        job = held.job
        if isinstance(verdict, End):
            await self._end(held, verdict.result)
        elif isinstance(verdict, Back):
            if verdict.charged and verdict.last is not None and job.attempts + 1 >= self.terms.retries:
                await self._end(held, verdict.last)
            else:
                self.setbacks.note(job.batch_id, verdict.reason)
                self.ended["charged" if verdict.charged else "returned"] += 1
                await self._insist(lambda: self._put_back(held, verdict))

    async def _end(self, held: Held, result: NewResult) -> None:
        """Write a line's end down, however long that takes."""
        held.result = result
        ours = await self._insist(lambda: self.store.finish(held.job, result))
        self.ended[("done" if result.done else "failed") if ours else "lost"] += 1
        self._pace.count(self.clock())
        self.setbacks.pop(held.job.batch_id, None)

    async def _put_back(self, held: Held, verdict: Back) -> bool:
        job = held.job
        wait_s = self.delay((job.attempts if verdict.charged else job.returns) + 1, random.random())
        if not verdict.charged:
            wait_s = min(BACK_S, wait_s if verdict.after_s is None else verdict.after_s)
        not_before = await self.store.now() + wait_s
        return await self.store.put_back(job, not_before=not_before, charged=verdict.charged, node=held.node)

    async def _give_back(self, held: Held, *, fault: bool = False) -> None:
        """Let go of a line whose try was broken off: by the end of this router, or by a fault of ours."""
        result = held.result
        if fault and held.job.attempts + 1 >= self.terms.retries:
            result = NewResult(error_code="internal_error", error_message="The router failed to run this line.")
        try:
            async with asyncio.timeout(STOP_S):
                if result is not None:
                    await self.store.finish(held.job, result)
                else:
                    await self.store.put_back(held.job, charged=fault, node=held.node)
        except (StoreError, TimeoutError) as error:
            log.warning("a line is left to its lease", batch=held.job.batch_id, reason=str(error))

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the store until it answers."""
        wait_s, stuck = LOST_S / 8, False
        try:
            while True:
                try:
                    return await ask()
                except StoreFull:
                    self._stuck += not stuck
                    stuck = True
                except StoreLost as error:
                    self._lose(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LOST_S)
        finally:
            self._stuck -= stuck

    # Leases

    async def _renew(self) -> None:
        """Renew leases; end the calls of those that are lost. A batch that stops rings at once."""
        seen = self.store.wakes.count(Topic.STOPPED)
        while True:
            every_s = LOST_S if self._lost else min(self.terms.lease_s / 3, RENEW_S)
            seen = await self.store.wakes.wait(Topic.STOPPED, seen, timeout_s=every_s)
            try:
                await self._extend()
            except (StoreLost, StoreFull) as error:
                self._lose(error)

    async def _extend(self) -> None:
        held = list(self.held.values())
        safe_until, losses = self.clock() + self.terms.lease_s, self._losses
        if self._lost:
            await self.store.ping()
        lost = await self.store.extend([one.job for one in held], self.terms.lease_s)
        for one in held:
            if one.job.key in lost:
                self._abandon(one)
            else:
                one.safe_until = safe_until
        self._lost = self._lost and self._losses != losses
        self._renewed.set()
        self._renewed.clear()

    def _lose(self, error: StoreError) -> None:
        """The store could not be reached, if that is what the error says."""
        if isinstance(error, StoreLost):
            self._lost = True
            self._losses += 1

    def _abandon(self, held: Held) -> None:
        """The line is no longer ours: its batch stopped, or another router has it."""
        if self.held.get(held.job.key) is not held:
            return
        held.lost = True
        self.ended["lost"] += 1
        self._forget(held)
        if held.task is not None:
            held.task.cancel()
        else:
            self._turns[held.job.model].drop(held)

    def _forget(self, held: Held) -> None:
        if self.held.get(held.job.key) is held:
            del self.held[held.job.key]
            self._ahead.take(held.job)

    async def _stop(self) -> None:
        """End what runs and give every line back, so that nobody waits for our leases to end."""
        self._group = None
        held = list(self.held.values())
        tasks = [one.task for one in held if one.task is not None]
        for task in tasks:
            task.cancel(Outcome.SHUTDOWN)
        await asyncio.gather(
            *tasks, *(self._give_back(one) for one in held if one.task is None), return_exceptions=True
        )
