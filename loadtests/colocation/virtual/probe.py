"""A client for one real engine: streamed completions over plain sockets, and what the engine says of itself.

Rules: prompts are random token ids, so that no prefix cache helps by accident; a connection serves one request; closing
it is the abort.
"""

import asyncio
import json
import random
import re
from urllib.parse import urlsplit


class Stream:
    """One request. `first_at` and `last_at` are loop times of its first and last token, `gaps` the gaps between
    tokens in seconds."""

    def __init__(self) -> None:
        self.sent_at = self.last_at = 0.0
        self.first_at: float | None = None
        self.gaps: list[float] = []
        self.tokens = 0
        self.whole = False

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.first_at - self.sent_at


class RealEngine:
    """An OpenAI-compatible engine at `url`."""

    def __init__(self, url: str, seed: int = 1) -> None:
        parts = urlsplit(url)
        self._at = (parts.hostname, parts.port or 80)
        self._words = random.Random(seed)
        self.model = ""

    def behind(self, url: str) -> "RealEngine":
        """The same engine through a router at `url`; prompts go on where they are."""
        other = RealEngine(url)
        other._words, other.model = self._words, self.model
        return other

    def prompt(self, tokens: int) -> list[int]:
        """Token ids nobody has sent before."""
        return [self._words.randrange(10, 2000) for _ in range(tokens)]

    async def facts(self) -> tuple[int, int]:
        """Context and KV capacity in tokens; the model's name is kept."""
        card = json.loads(await self._get("/v1/models"))["data"][0]
        self.model = card["id"]
        metrics = (await self._get("/metrics")).decode()
        told = re.search(r'kv_cache_size_tokens="(\d+)"', metrics)
        blocks, size = (re.search(rf'{name}="(\d+)"', metrics) for name in ("num_gpu_blocks", "block_size"))
        return card["max_model_len"], int(told[1]) if told else int(blocks[1]) * int(size[1])

    async def complete(self, prompt: list[int], output: int, stream: Stream | None = None) -> Stream:
        """Ask for exactly `output` tokens. Cancel it to abort; what came until then is in `stream`."""
        stream = stream or Stream()
        told = {"model": self.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
        body = json.dumps(told).encode()
        loop = asyncio.get_running_loop()
        stream.sent_at = loop.time()
        reader, writer = await asyncio.open_connection(*self._at, limit=2**22)
        try:
            writer.write(self._head("POST", "/v1/completions", len(body)) + body)
            status = await reader.readline()
            if b" 200 " not in status:
                answer = (await reader.read()).partition(b"\r\n\r\n")[2]
                raise RuntimeError(f"the engine answered {status.decode().strip()}: {answer[:300]!r}")
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    stream.whole = True
                    break
                if line.startswith(b"data: {"):
                    _heard(stream, loop.time())
        finally:
            writer.close()
        return stream

    async def _get(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(*self._at, limit=2**22)
        writer.write(self._head("GET", path, 0))
        answer = await reader.read()
        writer.close()
        return answer.partition(b"\r\n\r\n")[2]

    def _head(self, method: str, path: str, length: int) -> bytes:
        host = f"{self._at[0]}:{self._at[1]}"
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def _heard(stream: Stream, now: float) -> None:
    stream.tokens += 1
    if stream.first_at is None:
        stream.first_at = now
    else:
        stream.gaps.append(now - stream.last_at)
    stream.last_at = now
