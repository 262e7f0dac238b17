"""One engine model on a virtual clock, asks at set times, and what was heard of them."""

import asyncio
from dataclasses import replace

from loadtests.colocation.virtual import clock
from loadtests.colocation.virtual.ask import CHAT, Ask, Seq
from loadtests.colocation.virtual.engine import Engine
from loadtests.colocation.virtual.profiles import Profile
from loadtests.colocation.virtual.variants import engine

PLAIN = Profile(
    name="plain", a=0.01, b=0.001, c=0.0, kv_tokens=16_000, seqs=4, chunk=100, ingest_s=0.0, token_s=0.0, context=16_000
)
"""A step of 10 ms, and 1 ms for each prompt token in it."""


class Stage:
    """`at(t, ...)` says what happens, `play()` lets it happen; `spoke` and `ended` tell when, by name."""

    def __init__(self, kind: type[Engine] | None = None, **changes) -> None:
        self.profile = replace(PLAIN, **changes)
        self.kind = kind
        self.plan = []
        self.spoke_at: dict[object, float] = {}
        self.ended_at: dict[object, float] = {}
        self.seqs: dict[object, Seq] = {}
        self.loads: list[tuple[int, int, float]] = []

    def ask(self, name, prompt, output=1, *, t=0.0, priority=0, shared=()):
        """Somebody asks at `t`. A name that asked before sends the same prompt again."""
        self.plan.append((t, lambda: self._send(name, prompt, output, priority, shared)))
        return self

    def abort(self, name, t):
        """The connection is closed at `t`."""
        self.plan.append((t, lambda: self.engine.abort(self.seqs[name])))
        return self

    def look(self, t):
        """A scrape at `t`."""
        self.plan.append((t, lambda: self.loads.append(self.engine.load())))
        return self

    def play(self, until=1000.0):
        """Let it happen."""
        clock.run(self._play(until))
        return self

    async def _play(self, until):
        loop = asyncio.get_running_loop()
        self.engine = self.kind(self.profile, loop) if self.kind else engine(self.profile, loop)
        for t, act in self.plan:
            loop.call_at(t, act)
        await asyncio.sleep(until)

    def _send(self, name, prompt, output, priority, shared):
        ask = Ask(name, CHAT, prompt, output, shared=shared)
        self.seqs[name] = self.engine.submit(ask, self, priority)

    def spoke(self, seq, now):
        """The first token."""
        self.spoke_at[seq.ask.name] = round(now, 9)

    def ended(self, seq, now):
        """The last token."""
        self.ended_at[seq.ask.name] = round(now, 9)
