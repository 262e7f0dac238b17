"""A router's night, staged: the true dashboard over true nodes, queues and histories whose numbers are made up.

It is what pictures are taken of and what crowds are made with; nothing here answers a call.
"""

import asyncio
import math
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from router.api import errors
from router.api.auth import Caller, Keyring
from router.api.board import Canary, Sources, Trend
from router.api.dashboard import Dashboard
from router.core.account import Account
from router.core.budget import Permit, Room
from router.core.call import ENDPOINTS, Call, Outcome, Reason, Usage, Workload
from router.core.drift import MEANING, Verdict
from router.core.events import Events, Topic
from router.core.node import Facts, Load, ModelFacts, Node, Spec
from router.core.spend import Price, Spend
from router.core.yielding import Policy, WaitReason
from router.dispatch.history import SLOT_S, SLOTS, History
from router.dispatch.trip import RELAY
from router.errors import Answer
from router.jobs.store import Lines, Overview, Progress
from router.jobs.store.overview import LineShown

CHAT, BATCH = Workload.INTERACTIVE, Workload.BATCH
MODEL = "llama-3.3-70b"
MB = 2**20
ENGINES = [
    ("vllm", "0.33.0", 32768),
    ("llamacpp", "b6821", 8192),
    ("vllm", "0.33.0", 32768),
    ("sglang", "0.9.2", 32768),
]


def call(workload: Workload, prompt: int = 300, caller: str = "chat-ui", model: str = MODEL) -> Call:
    return Call(
        id=f"req_{random.random()}",
        endpoint=ENDPOINTS["chat/completions"],
        model=model,
        body=b"{}",
        prompt_tokens=prompt,
        output_tokens=200,
        workload=workload,
        reason=Reason.KEY,
        caller=caller,
    )


class Lookout:
    """Stands where the batch room's own lookout does."""

    def __init__(self) -> None:
        self.overview = Overview()
        self.taken: Counter[str] = Counter()
        self.watched: Callable[[], bool] = bool
        self.trouble: str | None = None
        self.cancelled: list[str] = []

    def wake(self) -> None:
        """Nothing to ask."""

    async def lines(self, batch_id: str) -> Lines | None:
        return Lines(
            states={"done": 812, "failed": 3, "running": 4, "queued": 181},
            returns=11,
            attempts=822,
            running=[LineShown(line=813, node="a", attempts=0, returns=2)],
            failures=[("status 400", 2), ("timeout", 1)],
        )

    async def cancel(self, batch_id: str) -> bool:
        self.cancelled.append(batch_id)
        return batch_id.startswith("batch_")


class Operator:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def drain(self, name: str) -> None:
        self.asked.append(("drain", name))

    async def resume(self, name: str) -> None:
        self.asked.append(("resume", name))

    async def recycle(self, name: str) -> None:
        self.asked.append(("recycle", name))


class Stage:
    """One night. `port` is where its dashboard is once it is `open`."""

    def __init__(self, *, nodes: int = 4, batches: int = 4, keys: bool = False, seed: int = 7) -> None:
        self.random = random.Random(seed)
        self.now: float | None = None
        self.policy = Policy(ttft_p95_s=0.4)
        self.events, self.history = Events(self.wall), History(self.wall)
        self.nodes = [self._node(number) for number in range(nodes)]
        self.lookout, self.operator = Lookout(), Operator()
        self.waiting: list[Any] = []
        self.trends: dict[str, Trend] = {}
        self.permits: list[Permit] = []
        self._batches(batches)
        self._hour()
        spend = Spend({MODEL: Price(input=1.0, output=3.0)}, 50.0)
        spend.know({(int(time.time()) // 600, False): 3.1})
        names = {node.name: node for node in self.nodes}
        fleet = SimpleNamespace(nodes=self.nodes, by_name=names, trouble={}, blind=set())
        self.fleet = fleet
        sources = Sources(
            fleet=fleet,  # type: ignore[arg-type]
            admission=SimpleNamespace(policy=self.policy, waiters=lambda: self.waiting),  # type: ignore[arg-type]
            history=self.history,
            events=self.events,
            clock=time.monotonic,
            wall=self.wall,
            draining=bool,
            spend=lambda: spend,
            relay_models=lambda: (MODEL,),
            callers=lambda: ("chat-ui", "nightly", "ops") if keys else (),
            lookout=self.lookout,  # type: ignore[arg-type]
            trend=self.trends.get,
            canary=lambda: Canary(ttft_s=0.21, spread_s=0.035),
        )
        callers = [Caller(name="ops", admin=True), Caller(name="nightly")] if keys else []
        ring = Keyring((digest(caller.name), caller) for caller in callers)
        self.dashboard = Dashboard(sources, ring, self.operator)

    def wall(self) -> float:
        return time.time() if self.now is None else self.now

    def _node(self, number: int) -> Node:
        engine, version, context = ENGINES[number % len(ENGINES)]
        name = chr(ord("a") + number) if number < 26 else f"n{number}"
        spec = Spec(name=name, url=f"http://{name}.example", pools=frozenset(Workload))
        node = Node(spec, reserve=0.25)
        card = ModelFacts(context=context)
        facts = Facts(
            engine=engine, version=version, models={MODEL: card, "qwen3-32b": card}, tokens=262_144, sequences=64
        )
        node.moved = lambda one, before: self.events.add(
            Topic.NODE, f"{before} → {one.state}: {one.cause}", node=one.name
        )
        node.seen(facts, Load(running=7, waiting=0, used=0.61), time.monotonic() - 7300)
        for _ in range(8):
            node.pace.read_quietly(300, 0.03, chat=True)
        return node

    def hold(self, node: Node, workload: Workload, tokens: int, *, spoke: bool, prompt: int = 300) -> None:
        now = time.monotonic()
        permit = node.budget.hold(Room(tokens, 1), workload, prompt_tokens=prompt, now=now - self.random.uniform(1, 40))
        permit.call = call(workload, prompt, "chat-ui" if workload is CHAT else "nightly")
        if spoke:
            permit.spoke(now)
        self.permits.append(permit)

    def busy(self) -> None:
        """Calls run, others wait, one node grows, one is down, and some were taken back."""
        for node in self.nodes:
            for index in range(3):
                self.hold(node, CHAT, 9_000, spoke=index > 0)
            for _ in range(2):
                self.hold(node, BATCH, 32_000, spoke=True, prompt=30_000)
            self.hold(node, BATCH, 30_000, spoke=False, prompt=29_804)
            node.budget.foreign = Room(12_000, 1)
        now = time.monotonic()
        self.trends["a"] = Trend(
            ttft_drift=0.03, rss_bytes_an_hour=0.2 * MB, rss_bytes=[(index, 40e9 + index * 2e5) for index in range(30)]
        )
        grows = f"memory growth with drift: {MEANING[Verdict.MEMORY_GROWTH_WITH_DRIFT]}"
        self.trends["b"] = Trend(
            ttft_drift=0.18,
            rss_bytes_an_hour=410 * MB,
            rss_bytes=[(index, 38e9 + index * 8.6e7) for index in range(30)],
            verdict=grows,
            limit_s=6 * 3600,
            evidence=["rss_bytes_slope 410 MiB/h against 0 (flat, over 6 h)"],
        )
        self.nodes[1].diagnosed(now - 1800, "diagnosis: memory_growth_with_drift", slower=True)
        for _ in range(3):
            self.nodes[-1].missed(now - 460, "connection refused", refused=True)
        for permit in list(self.nodes[-1].budget):
            permit.take()
        reasons = [
            *[WaitReason.CHAT_PREFILL] * 6,
            *[WaitReason.NO_ROOM] * 2,
            WaitReason.PACKING,
            WaitReason.BATCH_PREFILL,
        ]
        self.waiting = [
            SimpleNamespace(call=call(BATCH, 29_000, "nightly"), reason=reason, asked_at=now - 41) for reason in reasons
        ]
        took = (
            "took back line {} of batch_9f2c61d0a4b7e35812c4d6f0 in prefill for chat, {:,} of 29,804 prompt tokens kept"
        )
        for line in (809, 811, 813):
            self.events.add(
                Topic.TAKE_BACK, took.format(line, line * 32 % 29_000), node="a", model=MODEL, caller="nightly"
            )

    def _batches(self, count: int) -> None:
        now, rows = int(time.time()), []
        rates = [0.812, 0.34, 0.05, 0.0]
        for number in range(count):
            total = (1000, 2400, 640, 5000)[number % 4]
            done = int(total * rates[number % 4])
            failed = 3 if number % 4 == 0 else 0
            row = Progress(
                id="batch_9f2c61d0a4b7e35812c4d6f0" if not number else f"batch_{self.random.getrandbits(96):024x}",
                caller="nightly" if number % 3 != 1 else "research",
                endpoint="/v1/chat/completions",
                model=MODEL if number % 2 == 0 else None,
                state="in_progress",
                priority=0,
                waiting="Lines of other batches go first." if number % 4 == 3 else None,
                created_at=now - 8047,
                expires_at=now + 21360 + 3600 * (number % 9),
                in_progress_at=now - 8000,
                total=total,
                completed=done - failed if done else 0,
                failed=failed,
                stopped=0,
                left=total - done,
                running=(4, 2, 1, 0)[number % 4],
                ends_at=now + 4800 + 1500 * (number % 40),
            )
            rows.append(row)
            self.lookout.taken[row.id] = (11, 4, 0, 0)[number % 4]
        self.lookout.overview = Overview(batches=rows, done_a_minute=31)

    def _hour(self) -> None:
        """The last hour in the history: chat comes in waves, batch fills what it leaves."""
        start = int(time.time()) // SLOT_S * SLOT_S - (SLOTS - 1) * SLOT_S
        shown = self.lookout.overview.batches[:8]
        names = [node.name for node in self.nodes[:4]]
        if not names:
            return
        for step in range(SLOTS):
            self.now = start + step * SLOT_S + 5
            tide = 0.5 + 0.5 * math.sin(step / 38) + self.random.uniform(-0.1, 0.1)
            for _ in range(max(1, int(6 * tide))):
                first = self.random.lognormvariate(-3.45 + 0.5 * tide, 0.45)
                self.ended(CHAT, self.random.choice(names), first, 180)
            for _ in range(max(0, int(4 * (1.1 - tide)))):
                self.ended(BATCH, self.random.choice(names), 2.5, 350)
            if step % 90 == 11:
                self.ended(CHAT, RELAY, 0.25, 120)
            waits = [
                SimpleNamespace(call=call(BATCH, caller="nightly"), reason=reason) for reason in self._reasons(tide)
            ]
            self.history.look(waits)
            self.history.left({row.id: int(row.left + (SLOTS - step) * row.total / 2600) for row in shown if row.left})
        self.now = None

    def _reasons(self, tide: float) -> list[WaitReason]:
        known = [WaitReason.CHAT_PREFILL, WaitReason.NO_ROOM, WaitReason.PACKING, WaitReason.BATCH_PREFILL]
        return self.random.choices(known, (61, 22, 12, 5), k=max(0, round(9 * tide)))

    def ended(
        self, workload: Workload, place: str, first_s: float, written: int, outcome: Outcome = Outcome.COMPLETED
    ) -> None:
        account = Account(
            call(workload, caller="chat-ui" if workload is CHAT else "nightly"),
            outcome,
            place=place,
            first_token_s=first_s,
            usage=Usage(300, written),
        )
        self.history.ended(account)

    @asynccontextmanager
    async def open(self, port: int = 0) -> AsyncIterator[str]:
        """The page's address, for the length of the block."""
        listener = socket.create_server(("127.0.0.1", port))
        app = Starlette(routes=self.dashboard.routes(), exception_handlers={Answer: _refuse})  # type: ignore[dict-item]
        config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, ws="none")
        server = uvicorn.Server(config)
        self.dashboard.feeds.closed = False
        tasks = [
            asyncio.create_task(server._serve([listener]), name="fake-stage"),
            asyncio.create_task(self.dashboard.run(), name="fake-dashboard"),
        ]
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard"
        finally:
            self.dashboard.close()
            tasks[1].cancel()
            server.should_exit = server.force_exit = True
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()


def digest(key: str) -> bytes:
    from hashlib import sha256

    return sha256(f"key-of-{key}".encode()).digest()


async def _refuse(_: Request, answer: Answer) -> Response:
    body = errors.body(answer, anthropic=False)
    return Response(body, answer.status, media_type="application/json")
