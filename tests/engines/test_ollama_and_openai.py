from router.core.node import Load
from router.fleet.engines.dialect import MODELS
from router.fleet.engines.ollama import LOADED, OLLAMA, VERSION
from router.fleet.engines.openai import OPENAI
from tests.engines.captures_of import answers, document


def test_ollama_knows_the_context_of_what_is_loaded() -> None:
    got = answers(
        {
            MODELS: document("ollama/models.json"),
            VERSION: document("ollama/version.json"),
            LOADED: document("ollama/ps.json"),
        }
    )
    facts = OLLAMA.facts(got)
    assert OLLAMA.detect(got)
    assert (facts.engine, facts.version, facts.tokens, facts.sequences) == ("ollama", "0.33.0", None, None)
    assert facts.streams_usage
    assert {name: model.context for name, model in facts.models.items()} == {"gemma3:latest": 4096, "llama3.2:1b": None}
    assert OLLAMA.load(got, facts) == Load()


def test_ollama_with_nothing_loaded() -> None:
    got = answers({MODELS: document("ollama/models.json"), LOADED: {"models": None}})
    assert {model.context for model in OLLAMA.facts(got).models.values()} == {None}


def test_any_server_with_a_list_of_models() -> None:
    data = [{"id": "a", "object": "model"}, {"id": "b", "context_length": 8192}, {"id": "c", "max_model_len": None}]
    got = answers({MODELS: {"object": "list", "data": data}})
    facts = OPENAI.facts(got)
    assert (facts.engine, facts.tokens, facts.sequences, facts.streams_usage) == ("openai", None, None, False)
    assert {name: model.context for name, model in facts.models.items()} == {"a": None, "b": 8192, "c": None}
    assert OPENAI.load(got, facts) == Load()


def test_a_server_without_a_list_has_no_models() -> None:
    assert OPENAI.facts(answers({}, absent=(MODELS,))).models == {}
