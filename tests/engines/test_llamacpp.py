from typing import Any

import pytest

from router.core.node import Facts, Load
from router.core.signals import Counters
from router.fleet.engines import Answers
from router.fleet.engines.dialect import METRICS, MODELS
from router.fleet.engines.llamacpp import LLAMACPP, PROPS, SLOTS
from tests.engines.captures_of import answers, document, text

BUSY = {"id": 0, "n_ctx": 2048, "is_processing": True, "n_prompt_tokens": 500, "next_token": [{"n_decoded": 12}]}
IDLE = {"id": 1, "n_ctx": 2048, "is_processing": False}
FACTS = Facts(engine="llamacpp", tokens=8192, sequences=4)
METRICS_LINES = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 7\n"


def recorded() -> Answers:
    return answers(
        {
            MODELS: document("llamacpp/models.json"),
            PROPS: document("llamacpp/props.json"),
            SLOTS: document("llamacpp/slots.json"),
            METRICS: text("llamacpp/metrics.txt"),
        }
    )


def test_reads_what_a_real_server_says() -> None:
    facts = LLAMACPP.facts(recorded())
    assert LLAMACPP.detect(recorded())
    assert (facts.engine, facts.version, facts.sequences, facts.tokens) == ("llamacpp", "b0-unknown", 4, 8192)
    assert facts.streams_usage
    assert facts.models["smollm2-135m"].context == 2048
    assert LLAMACPP.load(recorded(), facts) == Load(running=0, waiting=0, used=0.0)


def server(slots: Any, context: Any, trained: Any) -> Answers:
    card = {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx": context, "n_ctx_train": trained}}
    props = {"total_slots": slots, "default_generation_settings": {"n_ctx": context}}
    return answers({MODELS: {"data": [card]}, PROPS: props})


@pytest.mark.parametrize(
    ("slots", "context", "trained", "tokens"),
    [
        (1, 4096, 8192, 4096),
        (2, 4096, 131072, 8192),
        (4, 2048, 8192, 8192),
        (4, 32768, 131072, 131072),
        (4, 16384, 131072, 16384),
        (4, 8192, 8192, 8192),
        (8, 8192, 8192, 8192),
        (8, 8192, 131072, 65536),
        (4, 2048, None, 2048),
        (None, 2048, 8192, None),
        (0, 2048, 8192, None),
        (2, None, 8192, None),
        ("two", 2048, 8192, None),
    ],
)
def test_a_pool_is_split_or_shared(slots: Any, context: Any, trained: Any, tokens: int | None) -> None:
    assert LLAMACPP.facts(server(slots, context, trained)).tokens == tokens


def test_context_without_props_is_that_of_the_card() -> None:
    got = answers({MODELS: document("llamacpp/models.json")}, absent=(PROPS,))
    facts = LLAMACPP.facts(got)
    assert (facts.models["smollm2-135m"].context, facts.tokens, facts.sequences) == (2048, None, None)
    assert LLAMACPP.detect(got)


@pytest.mark.parametrize(
    ("known", "more", "load"),
    [
        ({SLOTS: [BUSY, IDLE]}, (), Load(running=1, waiting=0, used=0.0625)),
        ({SLOTS: [BUSY, BUSY], METRICS: METRICS_LINES}, (METRICS,), Load(running=2, waiting=7, used=0.125)),
        ({SLOTS: [BUSY, BUSY]}, (METRICS,), Load(running=2, used=0.125)),
        ({METRICS: METRICS_LINES}, (METRICS,), Load(running=2, waiting=7)),
        ({}, (METRICS,), Load()),
        ({SLOTS: {"error": {"code": 501}}}, (METRICS,), Load()),
        ({SLOTS: [{**BUSY, "n_prompt_tokens": None}, IDLE]}, (), Load(running=1, waiting=0)),
        ({SLOTS: [{**BUSY, "next_token": {"n_decoded": 12}}, IDLE]}, (), Load(running=1, waiting=0, used=0.0625)),
        ({SLOTS: [{"id": 0, "is_processing": True}, IDLE]}, (), Load(running=1, waiting=0)),
    ],
)
def test_load_from_slots_and_from_metrics_only_when_all_are_busy(
    known: dict[Any, Any], more: tuple[Any, ...], load: Load
) -> None:
    assert LLAMACPP.more(answers(known)) == more
    found = LLAMACPP.load(answers(known), FACTS)
    assert (found.running, found.waiting, found.used) == (load.running, load.waiting, load.used)


def test_gauges_that_a_reading_resets_are_not_read() -> None:
    lines = (
        "llamacpp:prompt_tokens_seconds 170\nllamacpp:predicted_tokens_seconds 90\nllamacpp:n_busy_slots_per_decode 3\n"
    )
    assert LLAMACPP.load(answers({METRICS: lines}), FACTS) == Load()


def test_counters_are_known_where_metrics_were_read() -> None:
    text = "llamacpp:prompt_tokens_total 30\nllamacpp:prompt_tokens_cached_total 10\n"
    assert LLAMACPP.counters(answers({METRICS: text})) == Counters(prefix_queries=40, prefix_hits=10)
    assert LLAMACPP.counters(answers({METRICS: "llamacpp:prompt_tokens_total 30\n"})) == Counters()
    assert LLAMACPP.counters(answers({})) == Counters()
