import pytest

from router.core.node import Load
from router.core.signals import Counters
from router.fleet.engines import Answers
from router.fleet.engines.dialect import METRICS, MODELS
from router.fleet.engines.sglang import INFO, LOADS, OLD_INFO, SGLANG
from tests.engines.captures_of import answers, document, text

NAME = "qwen/qwen2.5-0.5b-instruct"


def told() -> Answers:
    return answers(
        {
            MODELS: document("sglang/models.json"),
            INFO: document("sglang/server_info.json"),
            LOADS: document("sglang/loads.json"),
        }
    )


def test_reads_what_the_source_says() -> None:
    facts = SGLANG.facts(told())
    assert SGLANG.detect(told())
    assert (facts.engine, facts.version, facts.tokens, facts.sequences) == ("sglang", "0.5.23", 40960, 256)
    assert facts.streams_usage
    assert {name: model.context for name, model in facts.models.items()} == {NAME: 32768, "poems": 32768}
    load = SGLANG.load(told(), facts)
    assert (load.running, load.waiting, load.used) == (5, 1, pytest.approx(0.3))
    assert SGLANG.more(told()) == ()


def test_an_older_server_is_read_from_what_it_has() -> None:
    got = answers({MODELS: document("sglang/models.json")}, absent=(INFO, LOADS))
    assert SGLANG.more(got) == (OLD_INFO, METRICS)
    got.values[OLD_INFO] = document("sglang/server_info.json")
    got.values[METRICS] = text("sglang/metrics.txt")
    facts = SGLANG.facts(got)
    assert (facts.tokens, facts.sequences, facts.version) == (40960, 256, "0.5.23")
    load = SGLANG.load(got, facts)
    assert (load.running, load.waiting, load.used) == (5, 1, pytest.approx(0.3))


def test_capacity_from_metrics_alone() -> None:
    got = answers({METRICS: text("sglang/metrics.txt")}, absent=(INFO, LOADS, OLD_INFO))
    assert SGLANG.facts(got).tokens == 40960


def test_load_under_the_names_of_gpustack() -> None:
    names = {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_ratio": 0.25}
    told = "".join(f'gpustack:{name}{{model_instance_id="1"}} {value}\n' for name, value in names.items())
    got = answers({METRICS: told}, absent=(INFO, LOADS, OLD_INFO))
    assert SGLANG.load(got, SGLANG.facts(got)) == Load(running=2, waiting=1, used=0.25)


def test_without_loads_and_metrics_nothing_is_known() -> None:
    got = answers({MODELS: document("sglang/models.json")}, absent=(INFO, LOADS, OLD_INFO, METRICS))
    facts = SGLANG.facts(got)
    assert (facts.tokens, facts.sequences) == (None, None)
    assert SGLANG.load(got, facts) == Load()


@pytest.mark.parametrize("loads", [None, {}, [], "x", [None, 3], [{}]])
def test_loads_of_another_shape_are_unknown(loads: object) -> None:
    got = answers({LOADS: {"loads": loads}})
    assert SGLANG.load(got, SGLANG.facts(got)) == Load()


def test_usage_from_tokens_where_the_share_is_missing() -> None:
    rank = {"num_running_reqs": 1, "num_used_tokens": 512, "max_total_num_tokens": 2048}
    load = SGLANG.load(answers({LOADS: {"loads": [rank]}}), SGLANG.facts(told()))
    assert (load.running, load.waiting, load.used) == (1, None, 0.25)


def test_the_endpoints_that_generate_are_never_read() -> None:
    reads = (*SGLANG.signs, *SGLANG.facts_from, *SGLANG.load_from, *SGLANG.more(answers({}, (INFO, LOADS))))
    assert not [read.path for read in reads if read.path.startswith("health")]


def test_counters_are_known_where_metrics_were_read() -> None:
    text = "sglang:num_retracted_requests_total 2\nsglang:prompt_tokens_total 9\nsglang:cached_tokens_total 3\n"
    assert SGLANG.counters(answers({METRICS: text})) == Counters(preemptions=2, prefix_queries=9, prefix_hits=3)
    assert SGLANG.counters(answers({})) == Counters()


def test_counters_under_the_names_of_gpustack() -> None:
    names = {"request_preemptions_total": 2, "prompt_tokens_total": 9, "prompt_tokens_cached_total": 3}
    text = "".join(f'gpustack:{name}{{model_instance_id="1"}} {value}\n' for name, value in names.items())
    assert SGLANG.counters(answers({METRICS: text})) == Counters(preemptions=2, prefix_queries=9, prefix_hits=3)
