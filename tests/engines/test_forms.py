"""The body a batch puts together from a stream is what the node answers unstreamed, on real engines.

What differs is in docs/batches.md, and only that: each test compares its findings with the table there.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.tools.child import Child
from tests.engines.cases import CHAT, COMPLETIONS, EMBEDDINGS, LLAMACPP, RESPONSES, VLLM, Cases, of
from tests.engines.forms import Differences, Forms, listed
from tests.engines.live import LLAMA_MODEL, Llama
from tests.rig.routers import free_port

OWN = ("--template", str(Path(__file__).with_name("tools.jinja")), "--embeddings")
PATHS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)
SETTINGS = {
    "server": {"heartbeat_s": 300},
    "probe": {"every_s": 2, "timeout_s": 5},
    "upstream": {"connect_s": 2, "first_byte_s": 60, "idle_s": 30},
    "pools": {"interactive": {"patience_s": 20}, "batch": {"patience_s": 60}},
}


@pytest.fixture(scope="module")
def scholar(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """A llama.cpp that knows tools, reasons when it is made to, and embeds."""
    llama = Llama("scholar", free_port(), slots=2, context=512)
    with Child("scholar", tmp_path_factory.mktemp("scholar") / "scholar.log") as child:
        child.start("router.tools.llama", [*llama.arguments(weights), *OWN])
        child.wait_ready(f"{llama.url}/health", 30)
        yield llama


async def differences(forms: Forms, engine: Cases, path: str, **fields: object) -> dict[str, Differences]:
    return {name: await forms.compare(path, {**body, **fields}) for name, body in of(engine, path).items()}


def told(found: dict[str, Differences], kind: str) -> dict[str, list[str]]:
    """By path, the cases in which it was found."""
    by_path: dict[str, list[str]] = {}
    for name, one in found.items():
        for path in getattr(one, kind):
            by_path.setdefault(path, []).append(name)
    return by_path


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", PATHS)
async def test_llamacpp_says_the_same_in_both_forms(rig, scholar, path):
    app = await rig.router(scholar.entry(), **SETTINGS)
    forms = Forms(app, LLAMA_MODEL)
    found = await differences(forms, LLAMACPP, path, cache_prompt=False)
    missing, other, extra = (told(found, kind) for kind in ("missing", "other", "extra"))
    lacks, differs = listed("llama.cpp", path)
    assert (missing.keys(), other.keys(), extra) == (lacks, differs, {}), (missing, other)
    assert forms.streamed >= (len(found) - 2 if path != EMBEDDINGS else 0)


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", PATHS)
async def test_vllm_says_the_same_in_both_forms(rig, vllm, path):
    """Another version, or another set of flags, may say less than is listed."""
    app = await rig.router(vllm.entry(), **SETTINGS)
    found = await differences(Forms(app, vllm.model), VLLM, path)
    missing, other, extra = (told(found, kind) for kind in ("missing", "other", "extra"))
    lacks, differs = listed("vLLM", path)
    assert missing.keys() <= lacks, missing
    assert other.keys() | extra.keys() <= differs, (other, extra)
