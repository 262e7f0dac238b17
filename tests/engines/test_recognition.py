import pytest

from router.fleet.engines import DIALECTS, SIGNS, Answers, recognise
from router.fleet.engines import ollama as ollama_engine
from router.fleet.engines.dialect import METRICS, MODELS
from router.fleet.engines.llamacpp import PROPS
from router.fleet.engines.sglang import INFO
from tests.engines.captures_of import answers, document, text

ANONYMOUS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "organization-owner"}]}


@pytest.mark.parametrize(
    ("engine", "got"),
    [
        ("vllm", answers({MODELS: document("vllm/models.json")})),
        ("vllm", answers({MODELS: ANONYMOUS, METRICS: text("vllm/metrics.txt")})),
        ("llamacpp", answers({MODELS: document("llamacpp/models.json")})),
        ("llamacpp", answers({MODELS: ANONYMOUS, PROPS: document("llamacpp/props.json")})),
        ("sglang", answers({MODELS: document("sglang/models.json"), ollama_engine.VERSION: {"version": "0.5.23"}})),
        ("sglang", answers({MODELS: ANONYMOUS, INFO: document("sglang/server_info.json")})),
        ("sglang", answers({MODELS: document("sglang/models.json"), METRICS: "gpustack:num_requests_running 1\n"})),
        ("ollama", answers({MODELS: document("ollama/models.json")})),
        ("ollama", answers({MODELS: {"data": None}, ollama_engine.VERSION: {"version": "0.33.0"}})),
        ("openai", answers({MODELS: ANONYMOUS})),
        ("openai", answers({MODELS: {"data": [None, {"owned_by": ["vllm"]}, {"owned_by": None}]}})),
        ("openai", answers({MODELS: {"data": "vllm"}, METRICS: "up 1\n", PROPS: [], INFO: 3})),
        ("openai", answers({})),
    ],
)
def test_an_engine_is_told_by_its_signs(engine: str, got: Answers) -> None:
    assert recognise(got).name == engine


def test_every_dialect_is_named_as_in_the_table() -> None:
    assert [dialect.name for dialect in DIALECTS.values()] == list(DIALECTS)
    assert len(SIGNS) == len(set(SIGNS))
