"""Chat and long batch work on one OpenAI-compatible endpoint, as two kinds of users send them.

Chat is open loop: arrivals are drawn before the run and each first token is timed from when the call was *due*, so a
system that falls behind cannot slow its own clients down. Prompts are random token ids, so that no prefix cache helps
by accident. Batch is either a closed loop of calls, as without a batch API, or one OpenAI batch.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import msgspec

from router.errors import NodeFailed
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target

FORM = "ebbtide-colocation-form"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Calls a second, and tokens in and out, of both kinds of work. `burst` adds that many chats at once, half-way."""

    rate: float = 4.0
    chat_prompt: int = 200
    chat_output: int = 32
    batch_prompt: int = 20_000
    batch_output: int = 64
    burst: int = 0
    seconds: float = 40.0
    model: str = "tiny"


@dataclass
class Result:
    """What chat felt, in seconds, and what batch got done. Times are seconds after the start.

    `spans` are when each chat was under way. `chats` has, of each that was answered, when it was due and how long its
    first token took. `batch_until` is when the last line ended that counts: the line that is cut off by the end of the
    run has no part in `batch_tokens`, so its time has none in their pace.
    """

    first: list[float] = field(default_factory=list)
    chats: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0
    batch_tokens: float = 0.0
    batch_until: float = 0.0
    seconds: float = 0.0

    @property
    def batch_pace(self) -> float:
        """Tokens of batch a second, up to the end of the last line."""
        return self.batch_tokens / self.batch_until if self.batch_until else 0.0

    @property
    def busy(self) -> float:
        """Share of the time in which at least one chat was under way."""
        total, upto = 0.0, 0.0
        for began, after in sorted(self.spans):
            ended = min(after, self.seconds)
            total += max(0.0, ended - max(began, upto))
            upto = max(upto, ended)
        return total / self.seconds


class Endpoint:
    """One server, spoken to over kept connections."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.key = key
        bounds = Bounds(first_byte_s=3600, idle_s=3600, keepalive_s=2)
        self.pool = Pool(Target.parse(f"http://{parts.netloc}"), bounds)

    def head(self, method: str, path: str, length: int, kind: str = "application/json") -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"host: {self.host}",
            f"content-type: {kind}",
            f"content-length: {length}",
        ]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> dict[str, object]:
        """One JSON answer."""
        async with self.pool.exchange(self.head(method, path, len(body), kind), body) as answer:
            raw = await answer.all(2**26)
            if answer.status != 200:
                raise RuntimeError(f"{method} {path}: {answer.status} {raw[:300]!r}")
            return dict(json.loads(raw))

    async def stream(self, body: bytes, due: float) -> tuple[float, list[float]] | None:
        """A streamed completion: seconds from `due` to its first token, and between tokens; None if it failed."""
        first, last, gaps, failed = None, 0.0, [], False
        try:
            async with self.pool.exchange(self.head("POST", "/v1/completions", len(body)), body) as answer:
                while data := await answer.read():
                    failed = failed or answer.status != 200 or b'data: {"error"' in data
                    now = perf_counter()
                    for _ in range(data.count(b"data: {")):
                        if first is None:
                            first = now - due
                        else:
                            gaps.append(now - last)
                        last = now
        except NodeFailed:
            return None
        return None if failed or first is None else (first, gaps)


def prompts(seed: int, model: str) -> "Prompts":
    """A source of prompts that never repeat."""
    return Prompts(random.Random(seed), model)


class Prompts:
    """Bodies of completions with random prompts."""

    def __init__(self, words: random.Random, model: str) -> None:
        self._words = words
        self._model = model

    def body(self, prompt: int, output: int, **more: object) -> dict[str, object]:
        ids = [self._words.randrange(10, 2000) for _ in range(prompt)]
        return {"model": self._model, "prompt": ids, "max_tokens": output, "ignore_eos": True, **more}


def arrivals(shape: Shape, seed: int) -> Iterator[float]:
    """Seconds after the start at which chats are due: Poisson, and the burst."""
    draws, at = random.Random(seed), 0.0
    due = []
    while shape.rate > 0 and (at := at + draws.expovariate(shape.rate)) < shape.seconds:
        due.append(at)
    yield from sorted([*due, *[shape.seconds / 2] * shape.burst])


async def run(endpoint: Endpoint, shape: Shape, batch: str, seed: int) -> Result:
    """One run. `batch` is `none`, `calls` (one at a time), `calls4`, or `batches` (the Batches API)."""
    result, words = Result(seconds=shape.seconds), prompts(seed + 1, shape.model)
    chats = [(due, msgspec.json.encode(words.body(shape.chat_prompt, shape.chat_output, stream=True)))
             for due in arrivals(shape, seed)]  # fmt: skip
    work = _work(endpoint, shape, batch, words)
    async with asyncio.TaskGroup() as group:
        began = perf_counter()
        ends = began + shape.seconds
        batching = group.create_task(work.run(ends))
        talking = [group.create_task(_chat(endpoint, body, began, due, result)) for due, body in chats]
        await asyncio.sleep(max(0.0, ends - perf_counter()))
        result.batch_tokens = work.tokens
        result.batch_until = max(0.0, work.last_at - began)
        await asyncio.wait(talking) if talking else None
        batching.cancel()
    await work.close()
    return result


async def _chat(endpoint: Endpoint, body: bytes, began: float, after: float, result: Result) -> None:
    due = began + after
    await asyncio.sleep(max(0.0, due - perf_counter()))
    told = await endpoint.stream(body, due)
    result.spans.append((after, perf_counter() - began))
    if told is None:
        result.failed += 1
        return
    first, gaps = told
    result.first.append(first)
    result.chats.append((after, first))
    result.gaps.extend(gaps)


class Idle:
    """No batch at all. `tokens` are those of prompts and answers of lines that ended, the last of them at `last_at`."""

    tokens = 0
    last_at = 0.0

    async def run(self, ends: float) -> None: ...

    async def close(self) -> None: ...


class Calls(Idle):
    """Long calls in a closed loop, so many at a time."""

    def __init__(self, endpoint: Endpoint, shape: Shape, words: Prompts, at_once: int) -> None:
        self._endpoint = endpoint
        self._shape = shape
        self._words = words
        self._at_once = at_once

    async def run(self, ends: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self._caller(ends))

    async def _caller(self, ends: float) -> None:
        shape = self._shape
        while perf_counter() < ends:
            body = msgspec.json.encode(self._words.body(shape.batch_prompt, shape.batch_output, stream=True))
            if await self._endpoint.stream(body, perf_counter()) is not None:
                self.tokens += shape.batch_prompt + shape.batch_output
                self.last_at = perf_counter()
            else:
                await asyncio.sleep(0.5)


class Batches(Idle):
    """One OpenAI batch that outlasts the run; cancelled at its end."""

    def __init__(self, endpoint: Endpoint, shape: Shape, words: Prompts) -> None:
        self._endpoint = endpoint
        self._shape = shape
        self._id: str | None = None
        # made before the run: it takes a second, in which this process would send no chat
        self._lines = b"".join(
            msgspec.json.encode(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": words.body(shape.batch_prompt, shape.batch_output),
                }
            )
            + b"\n"
            for number in range(int(shape.seconds) + 20)
        )

    async def run(self, ends: float) -> None:
        form = (
            f'--{FORM}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{FORM}\r\n'
            'content-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        ).encode() + self._lines + f"\r\n--{FORM}--\r\n".encode()  # fmt: skip
        file = await self._endpoint.ask("POST", "/v1/files", form, f"multipart/form-data; boundary={FORM}")
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await self._endpoint.ask("POST", "/v1/batches", msgspec.json.encode(asked))
        self._id = str(batch["id"])
        while True:
            await asyncio.sleep(0.25)
            await self._look()

    async def _look(self) -> None:
        batch = await self._endpoint.ask("GET", f"/v1/batches/{self._id}")
        counts = batch["request_counts"]
        assert isinstance(counts, dict)
        tokens = int(counts["completed"]) * (self._shape.batch_prompt + self._shape.batch_output)
        if tokens > self.tokens:
            self.tokens, self.last_at = tokens, perf_counter()

    async def close(self) -> None:
        await self._endpoint.ask("POST", f"/v1/batches/{self._id}/cancel")


def _work(endpoint: Endpoint, shape: Shape, batch: str, words: Prompts) -> Idle:
    match batch:
        case "none":
            return Idle()
        case "batches":
            return Batches(endpoint, shape, words)
        case _:
            return Calls(endpoint, shape, words, int(batch.removeprefix("calls") or 1))
