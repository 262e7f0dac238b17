"""Looking at a real engine from behind the router's back: slots, gauges, what it answers when it is asked directly."""

import asyncio
from pathlib import Path
from time import monotonic
from typing import Any, Self
from urllib.parse import urlsplit

from tests.rig import ask
from tests.rig.routers import samples

LLAMA_MODEL = "smollm2-135m"
LOOK_S = 0.02
SELDOM_S = 1.3
"""A llama.cpp that has nothing to send its client looks whether it is there once it has been left alone for a second:
whatever it answers to anybody in between, its slots included, begins that second anew."""


class Llama:
    """A llama.cpp server on this machine."""

    def __init__(self, name: str, port: int, *, slots: int, context: int) -> None:
        self.name, self.port, self.slots, self.context = name, port, slots, context

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arguments(self, model: Path) -> list[str]:
        """What `router.tools.llama` is told."""
        told = {"model": model, "name": LLAMA_MODEL, "port": self.port, "slots": self.slots, "context": self.context}
        return [word for key, value in told.items() for word in (f"--{key}", str(value))]

    def entry(self, **extra: Any) -> dict[str, Any]:
        """What an operator writes for it."""
        return {"name": self.name, "url": self.url, "engine": "auto", **extra}

    async def busy(self) -> int:
        """Slots that work, as the server says."""
        slots = (await ask(self.port, path="/slots", method="GET")).json
        return sum(slot["is_processing"] for slot in slots)

    async def prompts(self) -> float:
        """Prompt tokens of all calls whose prompt was worked through."""
        text = (await ask(self.port, path="/metrics", method="GET")).body.decode()
        return samples(text)["llamacpp:prompt_tokens_total"]

    async def until_busy(self, slots: int, within: float, *, every: float = LOOK_S) -> None:
        """Wait until exactly so many slots work, looking each `every` seconds."""
        await _until(self.busy, slots, within, every)


class Vllm:
    """A vLLM that runs already. `model` is the one it serves, `context` what it says of it."""

    def __init__(self, port: int, model: str, context: int) -> None:
        self.port, self.model, self.context = port, model, context

    @classmethod
    async def at(cls, url: str) -> Self:
        port = urlsplit(url).port
        assert port is not None, "EBBTIDE_VLLM_URL needs a port"
        card = (await ask(port, path="/v1/models", method="GET")).json["data"][0]
        return cls(port, card["id"], card["max_model_len"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, **extra: Any) -> dict[str, Any]:
        """What an operator writes for it."""
        return {"name": "vllm", "url": self.url, "engine": "auto", **extra}

    async def gauge(self, name: str) -> int:
        """A metric, added over its labels."""
        found = samples((await ask(self.port, path="/metrics", method="GET")).body.decode())
        return int(sum(value for key, value in found.items() if key.partition("{")[0] == f"vllm:{name}"))

    async def running(self) -> int:
        """Requests that run or wait in the engine."""
        return await self.gauge("num_requests_running") + await self.gauge("num_requests_waiting")

    async def until_running(self, requests: int, within: float) -> None:
        """Wait until the engine has exactly so many requests."""
        await _until(self.running, requests, within, LOOK_S)

    async def until_idle(self) -> None:
        await self.until_running(0, 30)


async def _until(look: Any, wanted: int, within: float, every: float) -> None:
    deadline = monotonic() + within
    while (seen := await look()) != wanted:
        if monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {look.__qualname__} is {seen}, not {wanted}")
        await asyncio.sleep(every)
