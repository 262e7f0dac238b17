"""SGLang: /v1/loads for load and capacity of every data-parallel rank, /server_info for the rest, /metrics where on.

Names from SGLang 0.5.23 `entrypoints/v1_loads.py`, `managers/io_struct.py`, `observability/metrics_collector.py`; older
servers have /get_server_info and no /v1/loads. `/health` and `/health_generate` generate a token and are never read.
Capacities of /v1/loads are those of a rank and are added; /server_info tells those of one rank.
"""

from collections.abc import Mapping
from typing import Any

from router.core.node import Facts, Load
from router.core.signals import Counters
from router.fleet.engines.dialect import (
    GPUSTACK_CACHED,
    GPUSTACK_PREEMPTIONS,
    GPUSTACK_PROMPT,
    GPUSTACK_RUNNING,
    GPUSTACK_USED,
    GPUSTACK_WAITING,
    METRICS,
    MODELS,
    Answers,
    Dialect,
    Read,
    by_rank,
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

INFO = Read("server_info")
OLD_INFO = Read("get_server_info")
LOADS = Read("v1/loads")
RUNNING = ("sglang:num_running_reqs", GPUSTACK_RUNNING)
WAITING = ("sglang:num_queue_reqs", GPUSTACK_WAITING)
USED = ("sglang:token_usage", "sglang:full_token_usage", GPUSTACK_USED)
CAPACITY = ("sglang:max_total_num_tokens",)
RANK = "dp_rank"
PREEMPTIONS = ("sglang:num_retracted_requests_total", GPUSTACK_PREEMPTIONS)
QUERIES = ("sglang:prompt_tokens_total", GPUSTACK_PROMPT)
HITS = ("sglang:cached_tokens_total", GPUSTACK_CACHED)


def _detect(answers: Answers) -> bool:
    return "sglang" in owners(answers) or "max_total_num_tokens" in answers.object(INFO)


def _more(answers: Answers) -> tuple[Read, ...]:
    old_info = (OLD_INFO,) if INFO in answers.failures else ()
    return old_info if _ranks(answers) else (*old_info, METRICS)


def _ranks(answers: Answers) -> list[Mapping[str, Any]]:
    loads = answers.object(LOADS).get("loads")
    return [rank for rank in loads if isinstance(rank, dict)] if isinstance(loads, list) else []


def _facts(answers: Answers) -> Facts:
    info = answers.object(INFO) or answers.object(OLD_INFO)
    context = size(info.get("context_length"))
    return Facts(
        engine="sglang",
        version=word(info.get("version")) or word(answers.object(LOADS).get("version")),
        models=model_facts(cards(answers), lambda card: size(card.get("max_model_len")) or context),
        tokens=_tokens(answers, info),
        sequences=_sequences(answers, info),
        streams_usage=True,
    )


def _tokens(answers: Answers, info: Mapping[str, Any]) -> int | None:
    told = total(size(rank.get("max_total_num_tokens")) for rank in _ranks(answers))
    if told is not None:
        return told
    one_rank = size(info.get("max_total_num_tokens"))
    if one_rank is not None:
        return one_rank * (size(info.get("dp_size")) or 1)
    samples = first_named(answers.samples(CAPACITY), CAPACITY)
    return total(size(value) for value in by_rank(samples, RANK))


def _sequences(answers: Answers, info: Mapping[str, Any]) -> int | None:
    told = total(size(rank.get("max_running_requests")) for rank in _ranks(answers))
    if told is not None:
        return told
    states = info.get("internal_states")
    ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    limits = [size(state.get("effective_max_running_requests_per_dp")) for state in ranks]
    return total(limits) or size(info.get("max_running_requests"))


def _load(answers: Answers, facts: Facts) -> Load:
    ranks = _ranks(answers)
    if ranks:
        return Load(
            running=total(count(rank.get("num_running_reqs")) for rank in ranks),
            waiting=total(count(rank.get("num_waiting_reqs")) for rank in ranks),
            used=mean(_used(rank) for rank in ranks),
        )
    found = answers.samples((*RUNNING, *WAITING, *USED))
    return Load(
        running=total(count(value) for value in by_rank(first_named(found, RUNNING), RANK)),
        waiting=total(count(value) for value in by_rank(first_named(found, WAITING), RANK)),
        used=mean(share(value) for value in by_rank(first_named(found, USED), RANK)),
    )


def _used(rank: Mapping[str, Any]) -> float | None:
    told = share(rank.get("token_usage"))
    held, most = count(rank.get("num_used_tokens")), size(rank.get("max_total_num_tokens"))
    return told if told is not None or held is None or most is None else share(held / most)


def _counters(answers: Answers) -> Counters:
    """Known only where /metrics was read, which a server that answers /v1/loads is not asked for."""
    found = answers.samples((*PREEMPTIONS, *QUERIES, *HITS))
    return Counters(
        preemptions=summed(found, PREEMPTIONS), prefix_queries=summed(found, QUERIES), prefix_hits=summed(found, HITS)
    )


SGLANG = Dialect(
    name="sglang",
    signs=(MODELS, INFO),
    facts_from=(MODELS, INFO, LOADS),
    load_from=(LOADS,),
    detect=_detect,
    facts=_facts,
    load=_load,
    more=_more,
    counters=_counters,
)
