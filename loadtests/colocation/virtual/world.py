"""A fleet, what is asked of it, and somebody who decides where it runs: played in virtual time.

Rules:
- A chat arrives when it is due, whatever became of those before it.
- Whoever decides sees what a router could: when an ask came, how long its prompt is, when its first and last token
  came back, and engine metrics one scrape late. How long an answer will be and what is in a prefix cache stays unseen.
- What counts is the window from `warm_s` to `until_s`. Chats due in it may end until `grace_s` after it; then they are
  misses. Batch goes on all the while; its tokens count inside the window alone.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from loadtests.colocation.virtual import clock
from loadtests.colocation.virtual.ask import BATCH, Ask, Seq
from loadtests.colocation.virtual.engine import Engine
from loadtests.colocation.virtual.profiles import Profile, Slo
from loadtests.colocation.virtual.score import Score, score
from loadtests.colocation.virtual.variants import engine


class Policy(Protocol):
    """Whoever decides. It listens to the tries that it sends."""

    def begin(self, world: "World") -> None:
        """The play begins; the clock stands at 0."""

    def chat(self, ask: Ask) -> None:
        """A chat arrived."""

    def spoke(self, seq: Seq, now: float) -> None:
        """The first token of a try is here."""

    def ended(self, seq: Seq, now: float) -> None:
        """The last token of a try is here."""


class Window:
    """What is measured: seconds of virtual time."""

    def __init__(self, warm_s: float, until_s: float, grace_s: float) -> None:
        self.warm_s = warm_s
        self.until_s = until_s
        self.grace_s = grace_s


class World:
    """What a policy may touch: the `engines`, the `loop` for timers, `line()` for the next line of the backlog."""

    def __init__(self, profiles: Sequence[Profile], lines: Iterator[Ask], window: Window) -> None:
        self.loop = asyncio.get_running_loop()
        self.engines: list[Engine] = [engine(profile, self.loop) for profile in profiles]
        self.window = window
        self.lines: list[Ask] = []
        self._backlog = lines

    def line(self) -> Ask:
        """The next line of the batch."""
        ask = next(self._backlog)
        ask.due = self.loop.time()
        self.lines.append(ask)
        return ask

    def progress(self) -> int:
        """Tokens of batch that are of use: of ended lines all, of lines on a node what is computed now."""
        done = sum(ask.prompt + ask.output for ask in self.lines if ask.ended_at is not None)
        return done + sum(
            seq.computed for one in self.engines for seq in one.running if seq.ask.kind == BATCH and not seq.gone
        )

    def computed(self) -> int:
        """Tokens of batch that were computed, whatever for."""
        return sum(ask.spent for ask in self.lines)


def play(
    policy: Policy,
    profiles: Sequence[Profile],
    asked: tuple[Sequence[Ask], Iterator[Ask]],
    window: Window,
    slo: Slo,
) -> Score:
    """Play it once and say what came of it. `asked` are the chats and the backlog of lines."""
    chats, lines = asked

    async def main() -> Score:
        world = World(profiles, lines, window)
        policy.begin(world)
        arrivals = asyncio.ensure_future(_arrive(world, policy, chats))
        await asyncio.sleep(window.warm_s)
        before = _tally(world)
        await asyncio.sleep(window.until_s - window.warm_s)
        after = _tally(world)
        await arrivals
        await _settle(world, chats)
        stop = getattr(policy, "stop", None)
        if stop is not None:
            await stop()
        return score(world, chats, slo, before, after)

    return clock.run(main())


async def _arrive(world: World, policy: Policy, chats: Sequence[Ask]) -> None:
    loop = world.loop
    for ask in chats:
        if ask.due > loop.time():
            await asyncio.sleep(ask.due - loop.time())
        policy.chat(ask)


async def _settle(world: World, chats: Sequence[Ask]) -> None:
    """Let chats end that are due inside the window, for a while."""
    end = world.window.until_s + world.window.grace_s
    for ask in chats:
        while ask.ended_at is None and not ask.refused and world.loop.time() < end:  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(1.0)


def _tally(world: World) -> dict[str, float]:
    return {
        "good": world.progress(),
        "computed": world.computed(),
        "busy_s": sum(one.busy_s for one in world.engines),
        "preempted": sum(one.preempted for one in world.engines),
        "tries": sum(ask.tries for ask in world.lines),
        "lines": sum(ask.ended_at is not None for ask in world.lines),
    }
