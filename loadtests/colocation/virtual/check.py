"""The engine model against a real vLLM: the same load in both, and how far they are apart.

    python -m loadtests.colocation.virtual.check --url http://127.0.0.1:8000 --chunk 512 --seqs 8

First a handful of single requests, from which the model's constants are fitted. Then chat (Poisson, 200 tokens in, 32
out) beside long batch (20,000 in, 64 out, a closed loop), uncontrolled, with take-back by the caller, and through
Ebbtide, which has the engine in both pools: first on the engine, then in the model, with the same arrivals. When the
time is up batch is aborted in both, and chats that wait may end. Nothing else may run on that engine or its cores.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loadtests.colocation.real import ebbtide
from loadtests.colocation.virtual import fit
from loadtests.colocation.virtual.ask import BATCH, CHAT, Ask, Seq
from loadtests.colocation.virtual.baselines import Direct
from loadtests.colocation.virtual.probe import RealEngine, Stream
from loadtests.colocation.virtual.product import Product
from loadtests.colocation.virtual.profiles import Profile, Slo
from loadtests.colocation.virtual.score import quantile
from loadtests.colocation.virtual.world import Window, World, play

CHAT_SIZE, LINE_SIZE = (200, 32), (20000, 64)


@dataclass(frozen=True)
class Run:
    """One load: chats a second, lines at once, and who takes lines in prefill back when a chat comes: the caller, or
    Ebbtide before the engine."""

    name: str
    rate: float
    many: int
    takes_back: bool = False
    ebbtide: bool = False


@dataclass(frozen=True)
class Seen:
    """Seconds, and batch tokens a second: a prompt counts at its first token, an answer at its end."""

    ttft_p50: float
    ttft_p95: float
    batch: float


def runs(rate: float) -> list[Run]:
    """Chat alone, beside batch, and beside batch that makes way."""
    return [
        Run("chat alone", rate, 0),
        Run("1 line, no control", rate, 1),
        Run("4 lines, no control", rate, 4),
        Run("take-back by the caller", rate, 1, takes_back=True),
        Run("Ebbtide", rate, 4, ebbtide=True),
    ]


def due(run: Run, seconds: float, seed: int) -> list[float]:
    """When chats are sent, in seconds from the start."""
    dice, t, times = random.Random(seed), 1.0, []
    while run.rate > 0:
        t += dice.expovariate(run.rate)
        if t > seconds:
            break
        times.append(t)
    return times


# In the model


class _Load(Direct):
    """Lines in a closed loop; with `takes_back` those in prefill make way while any chat is in flight."""

    def __init__(self, run: Run, until: float) -> None:
        super().__init__(run.many)
        self.until = until
        self.lines: set[Seq] = set()
        self.takes_back = run.takes_back
        self.reading: set[Seq] = set()
        self.parked: list[Ask] = []
        self.chats = 0
        self.tokens: list[tuple[float, int]] = []

    def begin(self, world: World) -> None:
        super().begin(world)
        world.loop.call_at(self.until, self.stop_lines)

    def stop_lines(self) -> None:
        """The time is up."""
        for seq in self.lines:
            self.world.engines[0].abort(seq)

    def chat(self, ask: Ask) -> None:
        self.chats += 1
        for seq in list(self.reading) if self.takes_back else ():
            self.world.engines[0].abort(seq)
            self.reading.discard(seq)
            self.lines.discard(seq)
            self.parked.append(seq.ask)
        super().chat(ask)

    def line_ended(self) -> None:
        if self.world.loop.time() >= self.until:
            return
        ask = self.parked.pop() if self.parked else self.world.line()
        if self.takes_back and self.chats:
            self.parked.append(ask)
        else:
            seq = self.send(ask, 0)
            self.reading.add(seq)
            self.lines.add(seq)

    def spoke(self, seq: Seq, now: float) -> None:
        if seq.ask.kind == BATCH:
            self.reading.discard(seq)
            self.tokens.append((now, seq.ask.prompt))

    def ended(self, seq: Seq, now: float) -> None:
        if seq.ask.kind == BATCH:
            self.tokens.append((now, seq.ask.output))
            self.lines.discard(seq)
        else:
            self.chats -= 1
        super().ended(seq, now)
        if not self.chats:
            for _ in range(len(self.parked)):
                self.line_ended()


class _Ebbtide(Product):
    """The product, with its tokens counted as on the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[float, int]] = []

    def spoke(self, seq: Seq, now: float) -> None:
        super().spoke(seq, now)
        if seq.ask.kind == BATCH:
            self.tokens.append((now, seq.ask.prompt))

    def ended(self, seq: Seq, now: float) -> None:
        super().ended(seq, now)
        if seq.ask.kind == BATCH:
            self.tokens.append((now, seq.ask.output))


def modelled(profile: Profile, run: Run, seconds: float, seed: int) -> Seen:
    """The load in the model."""
    chats = [Ask(number, CHAT, *CHAT_SIZE, due=t) for number, t in enumerate(due(run, seconds, seed))]
    lines = (Ask(number, BATCH, *LINE_SIZE) for number in range(10**9))
    policy = _Ebbtide() if run.ebbtide else _Load(run, seconds)
    play(policy, [profile], (chats, lines), Window(0.0, seconds, 600.0), Slo(ttft=1.0, tpot=1.0))
    tokens = sum(count for at, count in policy.tokens if at <= seconds)
    return _seen([ask.ttft for ask in chats], tokens / seconds)


# On the engine


async def measured(engine: RealEngine, run: Run, seconds: float, seed: int) -> Seen:
    """The load on the engine."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    quiet = asyncio.Event()
    quiet.set()
    lines = [_Lines(engine, quiet, run.takes_back) for _ in range(run.many)]
    callers = [asyncio.create_task(line.run()) for line in lines]
    chats: list[asyncio.Task[float]] = []
    flying: set[int] = set()

    async def chat(number: int, at: float) -> float:
        flying.add(number)
        quiet.clear()
        for line in lines if run.takes_back else ():
            line.make_way()
        stream = await engine.complete(engine.prompt(CHAT_SIZE[0]), CHAT_SIZE[1])
        flying.discard(number)
        if not flying:
            quiet.set()
        return stream.first_at - start - at

    for number, t in enumerate(due(run, seconds, seed)):
        await asyncio.sleep(max(0.0, start + t - loop.time()))
        chats.append(asyncio.create_task(chat(number, t)))
    await asyncio.sleep(max(0.0, start + seconds - loop.time()))
    tokens = sum(line.tokens for line in lines)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return _seen(list(await asyncio.gather(*chats)), tokens / seconds)


class _Lines:
    """One line after the other, each sent again until it is whole."""

    def __init__(self, engine: RealEngine, quiet: asyncio.Event, takes_back: bool) -> None:
        self._engine = engine
        self._quiet = quiet
        self._takes_back = takes_back
        self._task: asyncio.Task[Stream] | None = None
        self._stream = Stream()
        self._told = 0

    @property
    def tokens(self) -> int:
        """Prompt tokens of lines that spoke and answers of those that ended, until now."""
        return self._told + (LINE_SIZE[0] if self._stream.first_at is not None else 0)

    def make_way(self) -> None:
        """Leave, if the prompt is still being read."""
        if self._task is not None and self._stream.first_at is None:
            self._task.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            prompt = self._engine.prompt(LINE_SIZE[0])
            while not await self._try(prompt):
                pass
            self._told += sum(LINE_SIZE)
            self._stream = Stream()

    async def _try(self, prompt: list[int]) -> bool:
        if self._takes_back:
            await self._quiet.wait()
        self._stream = Stream()
        self._task = asyncio.create_task(self._engine.complete(prompt, LINE_SIZE[1], self._stream))
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()
        return not self._task.cancelled() and self._task.exception() is None and self._stream.whole


def _seen(ttft: Sequence[float], batch: float) -> Seen:
    return Seen(quantile(ttft, 0.5), quantile(ttft, 0.95), batch)


def table(found: Sequence[tuple[Run, Seen, Seen]]) -> str:
    """Markdown: the engine, the model, and how far the model is off."""
    rows = ["| load | | TTFT p50 ms | TTFT p95 ms | batch tok/s |", "|---|---|---|---|---|"]
    for run, real, model in found:
        pairs = [(real.ttft_p50 * 1e3, model.ttft_p50 * 1e3), (real.ttft_p95 * 1e3, model.ttft_p95 * 1e3)]
        pairs.append((real.batch, model.batch))
        for name, which in (("vLLM", 0), ("model", 1)):
            rows.append(f"| {run.name} | {name} | " + " | ".join(f"{pair[which]:,.0f}" for pair in pairs) + " |")
        off = [f"{100 * (ours - theirs) / theirs:+.0f} %" if theirs else "" for theirs, ours in pairs]
        rows.append(f"| {run.name} | error | " + " | ".join(off) + " |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--chunk", type=int, required=True, help="its --max-num-batched-tokens")
    parser.add_argument("--seqs", type=int, required=True, help="its --max-num-seqs")
    parser.add_argument("--rate", type=float, default=4.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--repeats", type=int, default=3, help="of each single request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="constants of an earlier run instead of fitting")
    parser.add_argument("--out", type=Path, default=Path("var/colocation/check.json"))
    told = parser.parse_args(argv)
    engine = RealEngine(told.url, told.seed)
    profile, seen = asyncio.run(_real(engine, told))
    print(json.dumps({name: value for name, value in asdict(profile).items() if name != "name"}, indent=1))
    found = [(run, real, modelled(profile, run, told.seconds, told.seed)) for run, real in seen]
    print(table(found))
    told.out.parent.mkdir(parents=True, exist_ok=True)
    loads = [{"load": run.name, "vllm": asdict(real), "model": asdict(model)} for run, real, model in found]
    told.out.write_text(json.dumps({"profile": asdict(profile), "loads": loads}, indent=1))


async def _real(engine: RealEngine, told: argparse.Namespace) -> tuple[Profile, list[tuple[Run, Seen]]]:
    if told.profile is None:
        profile = await fit.measure(engine, told.chunk, told.seqs, told.repeats)
    else:
        await engine.facts()
        profile = Profile(**json.loads(told.profile.read_text())["profile"])
    profile = replace(profile, chunk=told.chunk, seqs=told.seqs)
    return profile, [(run, await _loaded(engine, run, told)) for run in runs(told.rate)]


async def _loaded(engine: RealEngine, run: Run, told: argparse.Namespace) -> Seen:
    if not run.ebbtide:
        return await measured(engine, run, told.seconds, told.seed)
    with ebbtide(told.url) as url:
        return await measured(engine.behind(url), run, told.seconds, told.seed)


if __name__ == "__main__":
    main()
