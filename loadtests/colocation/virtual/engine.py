"""A model of vLLM V1: what it schedules in each step, and how long the step takes.

Rules, from its scheduler:
- One token budget a step. Who runs is served first, in the order in which it began; then who waits, until the budget is
  spent, `seqs` run or the KV blocks do not hold the whole prompt.
- A half-computed prompt takes what is left of the budget, so whoever comes after it gets nothing; with a threshold it
  takes no more than that, unless it is alone.
- KV blocks that run short: the last of those that run (under priorities: the worst) is preempted, loses what it
  computed except what the prefix cache still holds, and waits first in line. In that step nobody is admitted.
- Priorities order the waiting, and nothing else.
- An abort is applied when the current step ends.
- Steps in which everybody only decodes are taken as one leap, until the first of them ends or something comes in.

The clock and the timers are an event loop's; nothing here waits.
"""

import math
from asyncio import AbstractEventLoop, TimerHandle
from bisect import insort
from collections import Counter

from loadtests.colocation.virtual.ask import Ask, Listener, Seq
from loadtests.colocation.virtual.blocks import BLOCK, Blocks
from loadtests.colocation.virtual.profiles import Profile


class Engine:
    """One node. `busy_s` is time spent in steps; `computed` prompt tokens by the kind of ask; `preempted` counts."""

    def __init__(self, profile: Profile, loop: AbstractEventLoop) -> None:
        self.profile = profile
        self.loop = loop
        self.blocks = Blocks(profile.kv_tokens // BLOCK)
        self.running: list[Seq] = []
        self.waiting: list[Seq] = []
        self.computed: Counter[str] = Counter()
        self.preempted = 0
        self.busy_s = 0.0
        self._gone: list[Seq] = []
        self._timer: TimerHandle | None = None
        self._began = 0.0
        self._steps = 0
        self._pace = (0.0, 0.0)
        self._disturbed = False
        self._told = (0, 0, 0.0)
        self._prefills: list[tuple[Seq, int]] = []
        self._decodes: list[Seq] = []

    # What a client can do, and what a scrape sees

    def submit(self, ask: Ask, listener: Listener, priority: int = 0) -> Seq:
        """Send an ask; it reaches the scheduler after the server has read it."""
        ask.tries += 1
        seq = Seq(ask, listener, priority)
        profile = self.profile
        self.loop.call_later(profile.ingest_s + profile.ingest_token_s * ask.prompt, self._arrive, seq)
        return seq

    def abort(self, seq: Seq) -> None:
        """Close its connection. Nothing more of it is heard; its room is free when the current step ends."""
        if seq.gone:
            return
        seq.gone = True
        if seq.queued:
            self._gone.append(seq)
            self._interrupt()

    def load(self) -> tuple[int, int, float]:
        """Sequences running and waiting, and the share of KV blocks in use, as told when the last step ended."""
        return self._told

    # Steps

    def _arrive(self, seq: Seq) -> None:
        if seq.gone:
            return
        seq.arrival = self.loop.time()
        seq.queued = True
        self._enqueue(seq)
        self._interrupt()

    def _enqueue(self, seq: Seq) -> None:
        if self.profile.priority:
            insort(self.waiting, seq, key=lambda one: one.rank)
        else:
            self.waiting.append(seq)

    def _interrupt(self) -> None:
        """Something came in: a leap ends with the step that is under way, an idle engine begins."""
        if self._timer is None:
            self._begin()
        elif self._steps > 1:
            first, more = self._pace
            since = self.loop.time() - self._began
            done = _steps_within(since, first, more)
            if done + 1 < self._steps:
                self._steps = done + 1
                self._timer.cancel()
                self._timer = self.loop.call_at(self._began + self._lasts(self._steps), self._step_over)

    def _lasts(self, steps: int) -> float:
        first, more = self._pace
        return steps * first + more * steps * (steps - 1) / 2

    def _begin(self) -> None:
        self._apply_aborts()
        if not self.running and not self.waiting:
            return
        self._prefills, self._decodes = [], []
        self._schedule()
        while self._disturbed and self.running and not self._prefills and not self._decodes:
            self._schedule()
        if not self._prefills and not self._decodes:
            return
        profile = self.profile
        took = profile.a + profile.c * len(self._decodes)
        for seq, count in self._prefills:
            took += profile.b * count + profile.e * count * (seq.computed + count / 2)
        if self._decodes:
            took += profile.d * sum([seq.computed for seq in self._decodes])
        self._pace = (took, profile.d * len(self._decodes))
        self._steps = 1 if self._prefills or self._disturbed else self._leap()
        self._began = self.loop.time()
        self._timer = self.loop.call_at(self._began + self._lasts(self._steps), self._step_over)

    def _leap(self) -> int:
        """How many steps of decoding certainly go by before anything else can happen."""
        steps = min([seq.ask.output - seq.emitted for seq in self._decodes])
        return max(1, min(steps, self._spare()))

    def _step_over(self) -> None:
        self._timer = None
        now, steps = self.loop.time(), self._steps
        self.busy_s += self._lasts(steps)
        heard_at = now + self.profile.token_s * len(self._decodes)
        spoke = [seq for seq, count in self._prefills if self._prefilled(seq, count, heard_at)]
        ended = [seq for seq, _ in self._prefills if seq.emitted >= seq.ask.output]
        if self._decodes:
            ended += self._decoded(steps, heard_at)
        for seq in ended:
            self._leave(seq)
        self._told = (len(self.running), len(self.waiting), self._used())
        if spoke or ended:
            self.loop.call_at(heard_at, _tell, spoke, ended, heard_at)
        self._begin()

    def _prefilled(self, seq: Seq, count: int, at: float) -> bool:
        """Count a step's part of a prompt; whether the first token came of it."""
        ask = seq.ask
        seq.computed += count
        ask.spent += count
        self.computed[ask.kind] += count
        self._filled(seq)
        if seq.computed < seq.need:
            return False
        first = not seq.emitted
        if not first:
            ask.stall = max(ask.stall, at - seq.seen_at)
        elif not seq.gone:
            ask.first_at = at
        seq.emitted += 1
        seq.need += 1
        seq.seen_at = at
        return first and not seq.gone

    def _decoded(self, steps: int, at: float) -> list[Seq]:
        """Count the tokens that came out of everybody who decoded; who is done."""
        ended = []
        last = self._lasts(steps) - self._lasts(steps - 1)
        first_at = self._began + self._lasts(1)
        for seq in self._decodes:
            ask = seq.ask
            gap = first_at - seq.seen_at
            if gap < last:
                gap = last
            if gap > ask.stall:
                ask.stall = gap
            seq.seen_at = at
            ask.spent += steps
            seq.computed += steps
            seq.need += steps
            seq.emitted += steps
            if seq.computed > BLOCK * seq.blocks:
                self._grow(seq, seq.computed)
            if seq.emitted >= ask.output:
                ended.append(seq)
        return ended

    def _leave(self, seq: Seq) -> None:
        seq.queued = False
        self.running.remove(seq)
        self._release(seq)

    def _apply_aborts(self) -> None:
        for seq in self._gone:
            if seq in self.running:
                self._leave(seq)
            elif seq in self.waiting:
                self.waiting.remove(seq)
            seq.queued = False
        self._gone.clear()

    # What is scheduled

    def _schedule(self) -> None:
        budget, preempted = self.profile.chunk, self.preempted
        index = 0
        decodes = self._decodes
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            if seq.need - seq.computed == 1 and seq.emitted and seq.computed < BLOCK * seq.blocks:
                decodes.append(seq)
                budget -= 1
                index += 1
                continue
            count = min(self._wanted(seq), budget)
            got_back = self._make_room(seq, seq.computed + count)
            if got_back is None:
                break
            budget += got_back - count
            self._plan(seq, count)
            index = self.running.index(seq, 0, index + 1) + 1 if got_back else index + 1
        self._disturbed = self.preempted > preempted
        if not self._disturbed:
            self._admit(budget)

    def _wanted(self, seq: Seq) -> int:
        count = seq.need - seq.computed
        threshold = self.profile.threshold
        if 0 < threshold < count and len(self.running) + len(self.waiting) > 1:
            return threshold
        return count

    def _plan(self, seq: Seq, count: int) -> None:
        if seq.emitted and seq.need - seq.computed == 1:
            self._decodes.append(seq)
        else:
            self._prefills.append((seq, count))

    def _admit(self, budget: int) -> None:
        blocks = self.blocks
        while self.waiting and budget > 0 and len(self.running) < self.profile.seqs:
            seq = self.waiting[0]
            chain = seq.ask.chain
            if blocks.cost(chain, _blocks(seq.need)) > blocks.free:
                break
            self.waiting.pop(0)
            seq.computed = blocks.hit(chain, seq.need - 1)
            self.running.append(seq)
            count = min(self._wanted(seq), budget)
            self._grow(seq, seq.computed + count)
            budget -= count
            self._prefills.append((seq, count))

    def _make_room(self, seq: Seq, tokens: int) -> int | None:
        """Hold blocks for so many tokens, preempting others.

        Gives the budget that those had been given; None if `seq` itself was preempted.
        """
        wanted = _blocks(tokens)
        if wanted <= seq.blocks:
            return 0
        got_back = 0
        while self.blocks.cost(seq.ask.chain, wanted) > self.blocks.free:
            victim = max(self.running, key=lambda one: one.rank) if self.profile.priority else self.running[-1]
            got_back += self._preempt(victim)
            if victim is seq:
                return None
        self._grow(seq, tokens)
        return got_back

    def _preempt(self, victim: Seq) -> int:
        self.preempted += 1
        self.running.remove(victim)
        self._release(victim)
        victim.computed = 0
        if self.profile.priority:
            self._enqueue(victim)
        else:
            self.waiting.insert(0, victim)
        planned = sum(count for seq, count in self._prefills if seq is victim)
        self._prefills = [(seq, count) for seq, count in self._prefills if seq is not victim]
        if victim in self._decodes:
            self._decodes.remove(victim)
            planned += 1
        return planned

    # Where the KV of a sequence is

    def _used(self) -> float:
        return self.blocks.held / self.blocks.total

    def _spare(self) -> int:
        """Steps of decoding for which there surely are blocks."""
        return BLOCK * (self.blocks.free // len(self._decodes)) - BLOCK + 1

    def _filled(self, seq: Seq) -> None:
        self.blocks.filled(seq.ask.chain, seq.computed)

    def _release(self, seq: Seq) -> None:
        self.blocks.drop(seq, seq.ask.chain, seq.computed)
        seq.blocks = 0

    def _grow(self, seq: Seq, tokens: int) -> None:
        wanted = _blocks(tokens)
        if wanted > seq.blocks:
            seq.blocks = wanted
            self.blocks.hold(seq, seq.ask.chain, wanted)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _steps_within(since: float, first: float, more: float) -> int:
    """How many steps are over after `since` seconds, when the n-th takes `first + (n - 1) more`."""
    if more <= 0:
        return int(since / first)
    half = first - more / 2
    steps = int((math.sqrt(half * half + 2 * more * since) - half) / more)
    while steps and steps * first + more * steps * (steps - 1) / 2 > since:
        steps -= 1
    while (steps + 1) * first + more * (steps + 1) * steps / 2 <= since:
        steps += 1
    return steps


def _tell(spoke: list[Seq], ended: list[Seq], now: float) -> None:
    for seq in spoke:
        if not seq.gone:
            seq.listener.spoke(seq, now)
    for seq in ended:
        if not seq.gone:
            seq.gone = True
            seq.ask.ended_at = now
            seq.listener.ended(seq, now)
