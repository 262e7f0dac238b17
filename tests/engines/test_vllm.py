import pytest

from router.core.node import Load
from router.core.signals import Counters
from router.fleet.engines import Answers
from router.fleet.engines.dialect import METRICS, MODELS, VERSION
from router.fleet.engines.vllm import VLLM
from tests.engines.captures_of import answers, document, text

CARD = {"id": "tiny", "object": "model", "owned_by": "vllm", "parent": None, "max_model_len": 32768}


def metrics(*lines: str) -> Answers:
    return answers({METRICS: "\n".join(lines) + "\n"})


def config(engine: str = "0", **labels: object) -> str:
    said = ",".join(f'{name}="{value}"' for name, value in {"engine": engine, **labels}.items())
    return f"vllm:cache_config_info{{{said}}} 1.0"


def recorded() -> Answers:
    return answers(
        {MODELS: document("vllm/models.json"), METRICS: text("vllm/metrics.txt"), VERSION: {"version": "0.32.0"}}
    )


def test_reads_what_a_real_server_says() -> None:
    facts = VLLM.facts(recorded())
    assert VLLM.detect(recorded())
    assert (facts.engine, facts.version, facts.tokens, facts.sequences) == ("vllm", "0.32.0", 1_048_576, None)
    assert facts.streams_usage
    assert facts.models["tiny"].context == 32768
    assert facts.models["tiny"].card["owned_by"] == "vllm"
    assert VLLM.load(recorded(), facts) == Load(running=0, waiting=0, used=0.0, done=20.0)


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ([config(kv_cache_size_tokens=4096, num_gpu_blocks=1, block_size=16)], 4096),
        ([config(kv_cache_size_tokens="None", num_gpu_blocks=100, block_size=16)], 1600),
        ([config(num_gpu_blocks=100, block_size=16)], 1600),
        ([config(num_gpu_blocks=100, block_size=16, effective_attention_block_size=16)], 1600),
        ([config(num_gpu_blocks=100, block_size=16, effective_attention_block_size=528)], None),
        ([config(num_gpu_blocks="None", block_size=16)], None),
        ([config(kv_cache_size_tokens="0", num_gpu_blocks="0", block_size=16)], None),
        ([config("0", kv_cache_size_tokens=4096), config("1", kv_cache_size_tokens=4000)], 8096),
        ([config("0", kv_cache_size_tokens=4096), config("0", kv_cache_size_tokens=4096)], 4096),
        ([config("0", kv_cache_size_tokens=4096), config("1", kv_cache_size_tokens="None")], None),
        ([], None),
    ],
)
def test_kv_capacity_by_order_of_trust(lines: list[str], tokens: int | None) -> None:
    assert VLLM.facts(metrics(*lines)).tokens == tokens


@pytest.mark.parametrize(
    ("lines", "load"),
    [
        (['vllm:kv_cache_usage_perc{engine="0"} 0.25'], Load(used=0.25)),
        (['vllm:gpu_cache_usage_perc{engine="0"} 0.25'], Load(used=0.25)),
        (["vllm:gpu_cache_usage_perc 0.5", "vllm:kv_cache_usage_perc 0.25"], Load(used=0.25)),
        (['vllm:kv_cache_usage_perc{engine="0"} 0.2', 'vllm:kv_cache_usage_perc{engine="1"} 0.6'], Load(used=0.4)),
        (["vllm:kv_cache_usage_perc NaN"], Load()),
        (["vllm:kv_cache_usage_perc 37"], Load()),
        (["vllm:kv_cache_usage_perc -0.1"], Load()),
        (['vllm:num_requests_running{engine="0"} 2.0', 'vllm:num_requests_running{engine="1"} 3.0'], Load(running=5)),
        (['vllm:num_requests_running{engine="0"} 2.0', 'vllm:num_requests_running{engine="1"} what'], Load()),
        (["vllm:num_requests_running 2.0 1395066363000"], Load(running=2)),
        (["vllm:num_requests_waiting 4", 'vllm:num_requests_waiting_by_reason{reason="capacity"} 9'], Load(waiting=4)),
        (
            [f'vllm:num_requests_waiting_by_reason{{reason="{reason}"}} 2' for reason in ("capacity", "deferred")],
            Load(waiting=4),
        ),
        (["gpustack:num_requests_running 2", "gpustack:num_requests_waiting 1"], Load(running=2, waiting=1)),
        (["gpustack:num_requests_running 2", "vllm:num_requests_running 3"], Load(running=3)),
        ([f'gpustack:kv_cache_usage_ratio{{model_instance_id="{one}"}} 0.5' for one in (1, 1)], Load(used=0.5)),
        ([f'gpustack:num_requests_running{{model_instance_id="{one}"}} 2' for one in (1, 2)], Load()),
        ([f'vllm:num_requests_running{{model_instance_id="{one}"}} 2' for one in (1, 2)], Load()),
        (["vllm:num_requests_running_total 2.0", "# vllm:num_requests_running 3"], Load()),
        ([], Load()),
    ],
)
def test_load_under_every_name_and_unknown_rather_than_zero(lines: list[str], load: Load) -> None:
    found = VLLM.load(metrics(*lines), VLLM.facts(metrics()))
    assert (found.running, found.waiting) == (load.running, load.waiting)
    assert found.used == (None if load.used is None else pytest.approx(load.used))


def test_without_metrics_nothing_is_known() -> None:
    got = answers({MODELS: {"object": "list", "data": [CARD]}}, absent=(METRICS, VERSION))
    facts = VLLM.facts(got)
    assert (facts.tokens, facts.version, facts.models["tiny"].context) == (None, None, 32768)
    assert VLLM.load(got, facts) == Load()
    assert VLLM.detect(got)


def test_an_adapter_has_the_context_of_its_parent() -> None:
    adapters = [
        {"id": "poems", "owned_by": "vllm", "parent": "tiny"},
        {"id": "lost", "owned_by": "vllm", "parent": "/models/tiny"},
        {"id": "own", "owned_by": "vllm", "parent": "tiny", "max_model_len": 16},
    ]
    facts = VLLM.facts(answers({MODELS: {"data": [*adapters, CARD]}}))
    assert {name: model.context for name, model in facts.models.items()} == {
        "tiny": 32768,
        "poems": 32768,
        "lost": 32768,
        "own": 16,
    }
    two = [*adapters, CARD, {**CARD, "id": "other", "max_model_len": 8}]
    assert VLLM.facts(answers({MODELS: {"data": two}})).models["lost"].context is None


@pytest.mark.parametrize("body", [None, [], "x", 3, {"data": None}, {"data": {}}, {}])
def test_a_list_that_is_none_fails_the_look(body: object) -> None:
    with pytest.raises(ValueError, match="not a list of models"):
        VLLM.facts(answers({MODELS: body}))


def test_odd_cards_are_passed_over() -> None:
    odd = [None, 3, {}, {"id": 3}, {"id": ""}, {"id": "x" * 513}, {"id": "ok", "max_model_len": "many"}]
    assert {name: model.context for name, model in VLLM.facts(answers({MODELS: {"data": odd}})).models.items()} == {
        "ok": None
    }


def test_counters_by_their_names_through_the_versions() -> None:
    real = VLLM.counters(recorded())
    assert (real.preemptions, real.prefix_queries, real.prefix_hits) == (0, 12, 0)
    assert real.part_bytes == 703766528
    assert real.started_at == pytest.approx(1.79596433515e9)
    old = metrics('vllm:num_preemptions_total{engine="0"} 3', "vllm:gpu_prefix_cache_hits_total 4")
    assert VLLM.counters(old) == Counters(preemptions=3, prefix_hits=4)
    two = metrics('vllm:num_preemptions_total{engine="0"} 3', 'vllm:num_preemptions_total{engine="1"} 4')
    assert VLLM.counters(two).preemptions == 7
    assert VLLM.counters(metrics("vllm:num_preemptions_total NaN")) == Counters(), "unknown is not zero"
    assert VLLM.counters(answers({})) == Counters()


def test_what_a_worker_of_gpustack_tells_is_what_the_engine_told() -> None:
    """GPUStack's own renaming of the recorded metrics, read again. It leaves out the KV capacity and the process."""
    worker = answers({MODELS: document("vllm/models.json"), METRICS: text("gpustack/worker-vllm.txt")})
    facts, told, own = VLLM.facts(worker), VLLM.counters(worker), VLLM.counters(recorded())
    assert VLLM.detect(worker)
    assert (facts.tokens, facts.models["tiny"].context) == (None, 32768)
    assert VLLM.load(worker, facts) == VLLM.load(recorded(), VLLM.facts(recorded()))
    assert told == Counters(preemptions=own.preemptions, prefix_queries=own.prefix_queries, prefix_hits=own.prefix_hits)
    assert (told.preemptions, told.prefix_queries, told.prefix_hits) == (0, 12, 0)


def test_a_worker_with_several_instances_counts_for_none() -> None:
    both = text("gpustack/worker-vllm.txt") + text("gpustack/worker-vllm.txt").replace(
        'model_instance_id="1"', 'model_instance_id="2"'
    )
    got = answers({MODELS: document("vllm/models.json"), METRICS: both})
    assert VLLM.counters(got) == Counters()
    assert VLLM.load(got, VLLM.facts(got)) == Load()
