"""Ebbtide's own policy, unmodified, before the engine models.

What runs here is the product's: `Admission`, `place`, `Node`, `Budget`, `Estimates`, with their defaults. What is
played is what stands around them in a running router: the dispatcher's block, the runner that claims lines, the probes.
The router is told what it would be told: prompt lengths, the client's limit on the answer, the first and the last token
when they come, usage at the end, and metrics as a probe reads them. Chat is chat by its key.
"""

import asyncio
from collections import Counter
from itertools import count

from loadtests.colocation.virtual.ask import BATCH, CHAT, Ask, Seq
from loadtests.colocation.virtual.engine import Engine
from loadtests.colocation.virtual.world import World
from router.core.budget import Permit
from router.core.call import ENDPOINTS, Call, Reason, Usage
from router.core.call import Workload as Class
from router.core.estimate import Estimates
from router.core.node import Facts, Load, ModelFacts, Node, Sign, Spec
from router.core.pace import Past
from router.core.placement import Situation
from router.core.yielding import Mode, Policy
from router.dispatch.admission import Admission, Limits
from router.dispatch.grant import Grant
from router.errors import Answer
from router.jobs.runner import TICK_S, WAITING
from router.settings.sections import Pools

MODEL = "m"
PROBE_S = 2.0
"""Seconds between two looks at a node, the product's default."""
SCRAPE_S = 0.02
"""How long a look takes: what it tells is that old when it is known."""
LINE_LIMIT = 1024
"""`max_tokens` of a line. Chats name none."""


class Product:
    """The router. `ttft_p95_ms` is `pools.interactive.ttft_p95_ms`; None is `auto`, the default."""

    def __init__(self, ttft_p95_ms: float | None = None, mode: Mode = Mode.ENFORCE) -> None:
        self._pools = Pools()
        self._policy = Policy(ttft_p95_s=None if ttft_p95_ms is None else ttft_p95_ms / 1e3, mode=mode)
        self._estimates = Estimates()
        self._tries: dict[Seq, tuple[asyncio.Future[bool], Node, Permit]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self.taken = Counter[str]()

    def begin(self, world: World) -> None:
        """The router starts: it has looked at every node once."""
        self.world = world
        self._loop = world.loop
        both = frozenset(Class)
        self.nodes = [
            Node(Spec(name=str(number), url="http://127.0.0.1:1", pools=both), reserve=self._pools.batch.reserve)
            for number in range(len(world.engines))
        ]
        pools = {Class.INTERACTIVE: self._pools.interactive, Class.BATCH: self._pools.batch}
        limits = {
            workload: Limits(patience_s=pool.patience_s, queue_calls=pool.queue_calls, queue_bytes=pool.queue_bytes)
            for workload, pool in pools.items()
        }
        self.admission = Admission(self.nodes, limits, self._loop.time, lambda *_: None, self._policy, self._took)
        for node, engine in zip(self.nodes, world.engines, strict=True):
            node.seen(_facts(engine), Load(running=0, waiting=0, used=0.0), 0.0)
            self._spawn(self._look(node, engine))
        self._spawn(self._tick())

    def chat(self, ask: Ask) -> None:
        """A chat came in."""
        self._spawn(self._chat(ask))

    def spoke(self, seq: Seq, now: float) -> None:
        """The first token of a try is here."""
        _, node, permit = self._tries[seq]
        node.spoke(permit, now, streamed=True)
        node.observe(Sign.GOOD, now, "answered")
        self.admission.changed()

    def ended(self, seq: Seq, now: float) -> None:
        """The last token of a try is here, and usage with it."""
        future, node, _ = self._tries[seq]
        ask = seq.ask
        node.heard(now)
        asked = LINE_LIMIT if ask.kind == BATCH else None
        self._estimates.of(MODEL).learn(ask.prompt, Usage(ask.prompt, ask.output), asked)
        if not future.done():
            future.set_result(True)

    async def stop(self) -> None:
        """The play is over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The dispatcher's block

    async def _chat(self, ask: Ask) -> None:
        call = self._call(ask)
        try:
            grant = await self.admission.grant(call, Situation(), ask.due)
        except Answer:
            ask.refused = True
            return
        await self._leg(grant, ask)
        self.admission.ended(call, grant.node, grant.permit, ask.output)

    async def _line(self, ask: Ask) -> None:
        """A line until it is done, however often its room is taken back."""
        call, past = self._call(ask), Past()
        while True:
            try:
                grant = await self.admission.grant(call, Situation(past=past), self._loop.time())
            except Answer:
                await asyncio.sleep(1.0)
                continue
            if await self._leg(grant, ask):
                break
        self._feed()

    async def _leg(self, grant: Grant, ask: Ask) -> bool:
        """One try under its permit; False if the room was taken back."""
        future: asyncio.Future[bool] = self._loop.create_future()
        engine = self.world.engines[int(grant.node.name)]
        try:
            with grant.permit as permit:
                seq = engine.submit(ask, self, 0 if ask.kind == CHAT else 10)
                self._tries[seq] = (future, grant.node, permit)
                if ask.kind == BATCH:
                    permit.left = lambda: (engine.abort(seq), future.done() or future.set_result(False))
                try:
                    return await future
                finally:
                    del self._tries[seq]
                    engine.abort(seq)
        finally:
            self.admission.changed()

    def _took(self, node: Node, permit: Permit, wasted: float) -> None:
        self.taken[str(permit.phase)] += 1

    def _call(self, ask: Ask) -> Call:
        workload = Class.INTERACTIVE if ask.kind == CHAT else Class.BATCH
        estimate = self._estimates.of(MODEL)
        asked = LINE_LIMIT if ask.kind == BATCH else None
        return Call(
            id=f"req_{next(self._numbers)}",
            endpoint=ENDPOINTS["chat/completions"],
            model=MODEL,
            body=b"",
            prompt_tokens=ask.prompt,
            output_tokens=estimate.output(asked),
            workload=workload,
            reason=Reason.KEY if ask.kind == CHAT else Reason.JOB,
            stream=True,
            counted=ask.prompt,
            least_tokens=ask.prompt,
            context_tokens=ask.prompt,
            asked=asked,
        )

    # The runner and the probes

    async def _tick(self) -> None:
        while True:
            self._feed()
            await asyncio.sleep(TICK_S)

    def _feed(self) -> None:
        """Begin lines while no more than a few wait for room that never had any."""
        if self._waiting() <= WAITING:
            self._loop.call_soon(self._begin_line)

    def _waiting(self) -> int:
        return sum(one.call.workload is Class.BATCH and not one.returned for one in self.admission.waiters())

    def _begin_line(self) -> None:
        if self._waiting() <= WAITING:
            self._spawn(self._line(self.world.line()))
            self._feed()

    async def _look(self, node: Node, engine: Engine) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            held = node.budget.held().sequences
            running, waiting, used = engine.load()
            await asyncio.sleep(SCRAPE_S)
            node.seen(node.facts, Load(running=running, waiting=waiting, used=used), self._loop.time(), held=held)
            self.admission.changed()

    def _spawn(self, work: object) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_soon(_raise, task.exception())


def _facts(engine: Engine) -> Facts:
    """What a node of that engine tells of itself."""
    profile = engine.profile
    if profile.engine == "llamacpp":
        models = {MODEL: ModelFacts(context=profile.holds)}
        return Facts(engine="llamacpp", models=models, tokens=profile.kv_tokens, sequences=profile.seqs)
    return Facts(
        engine=profile.engine,
        models={MODEL: ModelFacts(context=profile.holds)},
        tokens=profile.kv_tokens,
        streams_usage=True,
    )


def _raise(error: BaseException) -> None:
    raise error
