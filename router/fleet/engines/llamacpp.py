"""llama.cpp's server: /props and /v1/models for facts, /slots for load, /metrics only when every slot is busy.

From `tools/server/server-context.cpp`. /metrics is read as seldom as can be because each reading resets the averages
that the operator's own Prometheus shows; a request is deferred only when no slot is free, so /slots answers the rest.
The KV pool is either split (each slot owns `n_ctx`) or unified (all slots share one `n_ctx`), and the server does not
say which. Told apart by what is left to see: one slot: the same thing; slots that together have the context the model
was trained for: split; a slot that has it alone: unified; four slots: unified, since four with one pool is what the
server chooses by itself, and a shared pool taken for a split one fails every running call at once when it overflows;
any other number of slots was asked for, which by default splits. An operator who knows better says `kv_tokens`.
"""

from collections.abc import Mapping
from typing import Any

from router.core.node import Facts, Load
from router.core.signals import Counters
from router.fleet.engines.dialect import (
    HEALTH,
    METRICS,
    MODELS,
    Answers,
    Dialect,
    Read,
    cards,
    count,
    first_named,
    model_facts,
    owners,
    size,
    summed,
    total,
    word,
)

PROPS = Read("props")
SLOTS = Read("slots")
RUNNING = ("llamacpp:requests_processing",)
WAITING = ("llamacpp:requests_deferred",)
PROCESSED = ("llamacpp:prompt_tokens_total",)
"""Prompt tokens read, without those found in the cache."""
CACHED = ("llamacpp:prompt_tokens_cached_total",)
AUTOMATIC_SLOTS = 4
"""What `--parallel -1` becomes, with a unified pool (`common/arg.cpp`)."""


def _detect(answers: Answers) -> bool:
    return "llamacpp" in owners(answers) or "total_slots" in answers.object(PROPS)


def _facts(answers: Answers) -> Facts:
    props, listed = answers.object(PROPS), cards(answers)
    context = _slot_context(props)
    slots = size(props.get("total_slots"))
    trained = next((size(_meta(card).get("n_ctx_train")) for card in listed.values()), None)
    return Facts(
        engine="llamacpp",
        version=word(props.get("build_info")),
        models=model_facts(listed, lambda card: context or size(_meta(card).get("n_ctx"))),
        tokens=_pool(context, slots, trained),
        sequences=slots,
        streams_usage=True,
    )


def _meta(card: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = card.get("meta")
    return meta if isinstance(meta, dict) else {}


def _slot_context(props: Mapping[str, Any]) -> int | None:
    settings = props.get("default_generation_settings")
    return size(settings.get("n_ctx")) if isinstance(settings, dict) else None


def _pool(context: int | None, slots: int | None, trained: int | None) -> int | None:
    if context is None or slots is None:
        return None
    split = context * slots
    if split == trained:
        return split
    return context if context == trained or slots == AUTOMATIC_SLOTS else split


def _slots(answers: Answers) -> list[Mapping[str, Any]]:
    return [slot for slot in answers.array(SLOTS) if isinstance(slot, dict) and "is_processing" in slot]


def _busy(answers: Answers) -> list[Mapping[str, Any]]:
    return [slot for slot in _slots(answers) if slot["is_processing"] is True]


def _more(answers: Answers) -> tuple[Read, ...]:
    return (METRICS,) if len(_busy(answers)) == len(_slots(answers)) else ()


def _load(answers: Answers, facts: Facts) -> Load:
    slots, busy = _slots(answers), _busy(answers)
    found = answers.samples((*RUNNING, *WAITING))
    deferred = total(count(sample.value) for sample in first_named(found, WAITING))
    processing = total(count(sample.value) for sample in first_named(found, RUNNING))
    return Load(
        running=len(busy) if slots else processing,
        waiting=0 if deferred is None and len(busy) < len(slots) else deferred,
        used=_used(busy, facts.tokens) if slots else None,
    )


def _used(busy: list[Mapping[str, Any]], tokens: int | None) -> float | None:
    held = total(_slot_tokens(slot) for slot in busy) if busy else 0
    return None if held is None or tokens is None else min(1.0, held / tokens)


def _slot_tokens(slot: Mapping[str, Any]) -> int | None:
    following = slot.get("next_token")
    last = following[0] if isinstance(following, list) and following else following
    decoded = count(last.get("n_decoded")) if isinstance(last, dict) else None
    return total((count(slot.get("n_prompt_tokens")), decoded))


def _counters(answers: Answers) -> Counters:
    """Known only where every slot was busy: at other times /metrics is left alone."""
    found = answers.samples((*PROCESSED, *CACHED))
    processed, cached = summed(found, PROCESSED), summed(found, CACHED)
    queries = None if processed is None or cached is None else processed + cached
    return Counters(prefix_queries=queries, prefix_hits=cached)


LLAMACPP = Dialect(
    name="llamacpp",
    signs=(MODELS, PROPS),
    facts_from=(MODELS, PROPS),
    load_from=(HEALTH, SLOTS),
    detect=_detect,
    facts=_facts,
    load=_load,
    more=_more,
    counters=_counters,
)
