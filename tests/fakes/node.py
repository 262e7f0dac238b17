"""A fake OpenAI-compatible node on a real socket: healthy by default, and wrong exactly as told.

    async with FakeNode(models=["tiny"], dialect="vllm", slots=2) as node:
        node.script = Script(ttft=0.1, n=5)          # for every request
        node.upcoming = [Script(status=503)]         # for the next ones, first come first served
        node.scripts["tiny"] = Script(cut=3)         # for a model
        node.on_request = lambda seen: ...           # a Script, or None to go on

Rules: `accepted` counts calls whose body is complete, probes are kept apart in `probes`; a peer that leaves is noticed
at once and the call counts as aborted; more calls than `slots` wait inside, as in an engine; prefill is serial when
`prefill_rate` is given. `down`/`up` keep the port, `frozen` keeps the sockets and answers nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Self

from tests.fakes import desk
from tests.fakes.dialects import Page, refusal, surface
from tests.fakes.plain import error_body
from tests.fakes.play import Finished, Play
from tests.fakes.script import Script, split_suffix
from tests.fakes.seen import ABORTED, COMPLETED, CUT, Seen
from tests.fakes.wire import Gone, Wire


def quarter_of_bytes(text: str) -> int:
    """Tokens of a prompt, as a fake counts them: one for four bytes."""
    return max(1, len(text.encode()) // 4)


class FakeNode:
    """One server. Everything in `__init__` may be changed while it runs."""

    def __init__(
        self,
        *,
        name: str = "node",
        models: list[str] | None = None,
        dialect: str = "vllm",
        context: int = 32768,
        kv_tokens: int = 262144,
        slots: int | None = None,
        prefill_rate: float | None = None,
        requires_key: str | None = None,
        script: Script | None = None,
    ) -> None:
        self.name = name
        self.models = models if models is not None else ["tiny"]
        self.dialect = dialect
        self.context = context
        self.kv_tokens = kv_tokens
        self.slots = slots
        self.prefill_rate = prefill_rate
        self.requires_key = requires_key
        self.api_base = "/v1"
        self.script = script or Script()
        self.scripts: dict[str, Script] = {}
        self.upcoming: list[Script] = []
        self.on_request: Callable[[Seen], Script | None] | None = None
        self.count: Callable[[str], int] = quarter_of_bytes

        self.health = 200
        self.probe_delay = 0.0  # seconds before any probe is answered
        self.metrics: str | int | Callable[[], str] | None = None  # None: the dialect's own; int: an HTTP status
        self.metric_names: dict[str, str | None] = {}  # rename a metric, or drop it with None
        self.kv_usage = 0.0
        self.rss = 700_000_000
        self.version = "0.33.0"
        self.idleclose: float | None = None
        self.race_closes = 0  # so many requests on a reused connection meet a RST instead of an answer
        self.echo_request_id = False

        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.faults: list[str] = []  # wrong framing by the peer
        self.connections = 0  # ever accepted
        self.running = 0
        self.waiting = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.responses: dict[str, dict[str, Any]] = {}

        self.port = 0
        self._wires: set[Wire] = set()
        self._server: asyncio.Server | None = None
        self._freed = asyncio.Event()
        self._prefill = asyncio.Lock()
        self._thaw = asyncio.Event()
        self._thaw.set()

    # life

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    async def up(self) -> None:
        """Listens, on the port it had before if any."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Refuses connections and resets those it has."""
        if self._server is not None:
            self._server.close()
        wires = list(self._wires)
        for wire in wires:
            wire.reset()
        tasks = [wire.task for wire in wires if wire.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        self._server = None

    def _connect(self) -> Wire:
        self.connections += 1
        wire = Wire(self._serve, self.connections, self.faults)
        self._wires.add(wire)
        return wire

    @property
    def frozen(self) -> bool:
        """Accepts and reads, answers nothing: neither calls nor probes."""
        return not self._thaw.is_set()

    @frozen.setter
    def frozen(self, value: bool) -> None:
        if value:
            self._thaw.clear()
        else:
            self._thaw.set()

    # counters

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def accepted(self) -> int:
        return len(self.seen)

    def _ended(self, outcome: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.outcome == outcome]

    @property
    def completed(self) -> int:
        return len(self._ended(COMPLETED))

    @property
    def aborted(self) -> list[Seen]:
        """Calls whose peer left before the end; `ended` says when."""
        return self._ended(ABORTED)

    @property
    def cut(self) -> list[Seen]:
        return self._ended(CUT)

    @property
    def inflight(self) -> int:
        return sum(seen.ended is None for seen in self.seen)

    @property
    def bodies(self) -> list[bytes]:
        return [seen.body for seen in self.seen]

    @property
    def open_connections(self) -> int:
        return sum(wire.open for wire in self._wires)

    def counters(self) -> dict[str, Any]:
        aborted = [seen.ended for seen in self.aborted]
        counts = {"accepted": self.accepted, "completed": self.completed, "inflight": self.inflight}
        return {**counts, "aborted": aborted, "conns": self.connections, "open": self.open_connections}

    def forget(self) -> None:
        """Empties the records, not the counters of connections."""
        self.seen.clear()
        self.probes.clear()

    # serving

    async def _serve(self, wire: Wire) -> None:
        try:
            served = 0
            while True:
                seen = await self._next(wire)
                if served and self.race_closes and seen.method == "POST":
                    self.race_closes -= 1
                    return wire.reset()
                await self._answer(wire, seen)
                served += 1
        except (Finished, TimeoutError):
            wire.hang_up()
        finally:
            self._wires.discard(wire)

    async def _next(self, wire: Wire) -> Seen:
        if self.idleclose is None:
            return await wire.request()
        async with asyncio.timeout(self.idleclose):
            return await wire.request()

    async def _answer(self, wire: Wire, seen: Seen) -> None:
        call = desk.find(seen, self.api_base)
        if call is None:
            self.probes.append(seen)
            return await self._probe(wire, seen)
        self.seen.append(seen)
        try:
            await self._thaw.wait()
            await self._call(wire, seen, call)
            seen.end(COMPLETED)
        except (asyncio.CancelledError, Gone):
            seen.end(ABORTED)
            raise
        finally:
            seen.end(COMPLETED)
        return None

    async def _probe(self, wire: Wire, seen: Seen) -> None:
        await self._thaw.wait()
        if self.probe_delay:
            await asyncio.sleep(self.probe_delay)
        page = None
        if seen.path == "/_ctl":
            page = Page(self.counters())
        elif self._let_in(seen):
            page = surface(self, seen.path) if seen.method in ("GET", "HEAD") else None
        else:
            page = self._unauthorized()
        await self._send(wire, seen, page or Page({"detail": "Not Found"}, status=404))

    async def _send(self, wire: Wire, seen: Seen, page: Page) -> None:
        play = Play(wire, seen, Script(), self.dialect)
        await play.page(page.status, page.content_type, page.body, page.headers)

    def _let_in(self, seen: Seen) -> bool:
        guarded = seen.path.startswith("/v1") or self.dialect == "openai"
        return not guarded or self.requires_key is None or self._key_of(seen) == self.requires_key

    def _key_of(self, seen: Seen) -> str | None:
        return (seen.header("authorization") or "").removeprefix("Bearer ") or None

    def _unauthorized(self) -> Page:
        if self.dialect == "vllm":
            return Page({"error": "Unauthorized"}, status=401)
        return Page(error_body("openai", 401, "Incorrect API key provided")[1], status=401)

    async def _call(self, wire: Wire, seen: Seen, call: desk.Desk) -> None:
        if not self._let_in(seen):
            return await self._send(wire, seen, self._unauthorized())
        request, wrong = desk.read(seen, call)
        if request is None:
            return await self._send(wire, seen, refusal(self, 400, wrong or "bad request"))
        model, script = split_suffix(request.model, self._script_for(seen, request.model))
        request.model = model
        play = Play(wire, seen, script, self.dialect)
        if script.nohead:
            await asyncio.sleep(script.nohead)
        if script.raw is not None:
            await play.raw()
            raise Finished
        if script.status is not None and script.errframe is None:
            await asyncio.sleep(script.ttft)
            await play.refuse()
        elif (page := desk.objection(self, request)) is not None:
            await self._send(wire, seen, page)
        else:
            await call.perform(self, play, request)
        if script.close:
            raise Finished
        return None

    def _script_for(self, seen: Seen, model: str) -> Script:
        chosen = self.on_request(seen) if self.on_request is not None else None
        if chosen is not None:
            return chosen
        if self.upcoming:
            return self.upcoming.pop(0)
        return self.scripts.get(model.partition(";")[0], self.script)

    @asynccontextmanager
    async def slot(self, seen: Seen, prompt: int) -> AsyncIterator[None]:
        """A place among the running calls, entered once the prompt is processed."""
        self.waiting += 1
        try:
            while self.slots is not None and self.running >= self.slots:
                await self._freed.wait()
            self.running += 1
        finally:
            self.waiting -= 1
        seen.running_since = monotonic()
        try:
            await self._process_prompt(prompt)
            yield
        finally:
            self.running -= 1
            self.generation_tokens_total += seen.tokens
            self._freed.set()
            self._freed.clear()

    async def _process_prompt(self, tokens: int) -> None:
        if self.prefill_rate:
            async with self._prefill:
                await asyncio.sleep(tokens / self.prefill_rate)
        self.prompt_tokens_total += tokens
