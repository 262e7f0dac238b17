"""Real engines. llama.cpp is started here, on the CPU; EBBTIDE_VLLM_URL names a vLLM (see scripts/test-engines)."""

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from router.errors import EbbtideError
from router.tools.child import Child
from router.tools.weights import provide
from tests.engines.live import Llama, Vllm
from tests.rig.routers import free_port

START_S = 60.0


@pytest.fixture(scope="session")
def weights() -> Path:
    """The demo's model, from the user's cache or fetched into it."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide"
    try:
        return provide(home, lambda _: None)
    except EbbtideError as error:
        pytest.skip(f"no model: {error}")


class Llamas(NamedTuple):
    """Two shapes of one model: `chat` has 2 slots of 256 tokens, `long` one of 1,024."""

    chat: Llama
    long: Llama


@pytest.fixture(scope="session")
def llamas(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llamas]:
    """Both nodes, for the whole session. Steps of 128 tokens and one thread each."""
    home = tmp_path_factory.mktemp("llamas")
    chat = Llama("chat", free_port(), slots=2, context=256)
    long = Llama("long", free_port(), slots=1, context=1024)
    with Child("chat", home / "chat.log") as first, Child("long", home / "long.log") as second:
        for child, llama in ((first, chat), (second, long)):
            child.start("router.tools.llama", llama.arguments(weights))
        for child, llama in ((first, chat), (second, long)):
            child.wait_ready(f"{llama.url}/health", START_S)
        yield Llamas(chat, long)


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    """The vLLM that runs already, idle before the test and idle after it."""
    url = os.environ.get("EBBTIDE_VLLM_URL")
    if not url:
        pytest.skip("EBBTIDE_VLLM_URL does not name a vLLM")
    engine = await Vllm.at(url)
    await engine.until_idle()
    yield engine
    await engine.until_idle()
