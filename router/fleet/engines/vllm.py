"""vLLM: /v1/models for names and context, /metrics for KV capacity and load, /health for a dead engine.

Names and meanings from vLLM 0.33 `v1/metrics/loggers.py` and `v1/core/block_pool.py`; the capture is of 0.32. Every
series carries `engine`, the data-parallel rank: capacities and counts are added over ranks, shares averaged. KV
capacity by order of trust: `kv_cache_size_tokens`; number of blocks times block size, unless the block of attention
differs from it (a hybrid model, for which that product is wrong); unknown. Labels are strings and may say "None".
`vllm:num_requests_running` of several models in one server (base and adapters) are distinct series and added.
"""

from collections.abc import Mapping
from itertools import chain

from router.core.node import Facts, Load
from router.core.signals import Counters
from router.fleet.engines.dialect import (
    GPUSTACK_GENERATED,
    GPUSTACK_HITS,
    GPUSTACK_PREEMPTIONS,
    GPUSTACK_PROMPT,
    GPUSTACK_QUERIES,
    GPUSTACK_RUNNING,
    GPUSTACK_USED,
    GPUSTACK_WAITING,
    HEALTH,
    METRICS,
    MODELS,
    VERSION,
    Answers,
    Dialect,
    cards,
    count,
    first_named,
    mean,
    model_facts,
    owners,
    share,
    size,
    summed,
    total,
    word,
)
from router.fleet.exposition import Sample

CONFIG = ("vllm:cache_config_info", "vllm:cache_config")
SIGNS = (*CONFIG, "vllm:num_requests_running")
RUNNING = ("vllm:num_requests_running", GPUSTACK_RUNNING)
WAITING = ("vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason", GPUSTACK_WAITING)
USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", GPUSTACK_USED)

PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions", GPUSTACK_PREEMPTIONS)
QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    GPUSTACK_QUERIES,
)
HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total", GPUSTACK_HITS)
MEMORY = ("process_resident_memory_bytes",)
"""Of the API server's process alone, and not there at all with several of them."""
STARTED = ("process_start_time_seconds",)
DONE = (("vllm:prompt_tokens_total", GPUSTACK_PROMPT), ("vllm:generation_tokens_total", GPUSTACK_GENERATED))


def _detect(answers: Answers) -> bool:
    return "vllm" in owners(answers) or bool(answers.samples(SIGNS))


def _facts(answers: Answers) -> Facts:
    found = answers.samples(CONFIG)
    ranks = {sample.labels.get("engine", ""): _rank_tokens(sample) for sample in first_named(found, CONFIG)}
    return Facts(
        engine="vllm",
        version=word(answers.object(VERSION).get("version")),
        models=model_facts(cards(answers), lambda card: size(card.get("max_model_len"))),
        tokens=total(ranks.values()),
        streams_usage=True,
    )


def _rank_tokens(sample: Sample) -> int | None:
    told = size(sample.labels.get("kv_cache_size_tokens"))
    if told is not None:
        return told
    blocks, block = size(sample.labels.get("num_gpu_blocks")), size(sample.labels.get("block_size"))
    attention = size(sample.labels.get("effective_attention_block_size"))
    if blocks is None or block is None or (attention is not None and attention != block):
        return None
    return blocks * block


def _load(answers: Answers, facts: Facts) -> Load:
    found = answers.samples((*RUNNING, *WAITING, *USED, *chain(*DONE)))
    return Load(
        running=total(count(sample.value) for sample in first_named(found, RUNNING)),
        waiting=total(count(sample.value) for sample in first_named(found, WAITING)),
        used=mean(share(sample.value) for sample in first_named(found, USED)),
        done=_done(found),
    )


def _counters(answers: Answers) -> Counters:
    found = answers.samples((*PREEMPTIONS, *QUERIES, *HITS, *MEMORY, *STARTED))
    return Counters(
        preemptions=summed(found, PREEMPTIONS),
        prefix_queries=summed(found, QUERIES),
        prefix_hits=summed(found, HITS),
        part_bytes=summed(found, MEMORY),
        started_at=summed(found, STARTED),
    )


def _done(found: Mapping[str, list[Sample]]) -> float | None:
    """Prompt and output tokens so far; both count on while a call runs."""
    counts = [total(count(sample.value) for sample in first_named(found, names)) for names in DONE]
    known = [number for number in counts if number is not None]
    return float(sum(known)) if len(known) == len(DONE) else None


VLLM = Dialect(
    name="vllm",
    signs=(MODELS, METRICS),
    facts_from=(MODELS, VERSION, METRICS),
    load_from=(HEALTH, METRICS),
    detect=_detect,
    facts=_facts,
    load=_load,
    counters=_counters,
)
