"""What a dialect is: where an engine tells about itself, and pure readers of what it says.

Rules: a reader sees only `Answers` and does no I/O; a thing that is missing, renamed or of the wrong type is None,
never 0; a capacity of zero or less is None; a reader may raise on nonsense, and the probe turns that into a failed
look. A `Read` is one cheap GET, below the root of the server or (not `rooted`) below its API base. A `must` that gets
no answer, a server error, or (below the API base) no permission fails the look; any other read that fails leaves
things unknown.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from router.core.node import Facts, Load, ModelFacts
from router.core.signals import Counters
from router.errors import ProbeFailed
from router.fleet.exposition import Sample, read_samples

LONGEST_NAME = 512
"""A model whose name is longer (in characters) is not listed: no call could name it."""


class Read(NamedTuple):
    """One GET. `path` has no leading slash."""

    path: str
    rooted: bool = True
    text: bool = False
    must: bool = False


MODELS = Read("models", rooted=False, must=True)
HEALTH = Read("health", text=True, must=True)
METRICS = Read("metrics", text=True)
VERSION = Read("version")
GPUSTACK_RUNNING = "gpustack:num_requests_running"
GPUSTACK_WAITING = "gpustack:num_requests_waiting"
GPUSTACK_USED = "gpustack:kv_cache_usage_ratio"
GPUSTACK_PREEMPTIONS = "gpustack:request_preemptions_total"
GPUSTACK_QUERIES = "gpustack:prefix_cache_queries_total"
GPUSTACK_HITS = "gpustack:prefix_cache_hits_total"
GPUSTACK_PROMPT = "gpustack:prompt_tokens_total"
GPUSTACK_CACHED = "gpustack:prompt_tokens_cached_total"
GPUSTACK_GENERATED = "gpustack:generation_tokens_total"
"""What vLLM and SGLang tell, in the words of GPUStack's workers (`assets/metrics_config` of 2.3)."""


class Answers:
    """What one look got: a value or a failure for every read made."""

    __slots__ = ("failures", "values")

    def __init__(self, values: Mapping[Read, object] | None = None) -> None:
        self.values: dict[Read, Any] = dict(values or {})
        self.failures: dict[Read, ProbeFailed] = {}

    def __contains__(self, read: Read) -> bool:
        return read in self.values or read in self.failures

    def object(self, read: Read) -> Mapping[str, Any]:
        """The JSON object that came, or an empty one."""
        value = self.values.get(read)
        return value if isinstance(value, dict) else {}

    def array(self, read: Read) -> Sequence[Any]:
        """The JSON array that came, or an empty one."""
        value = self.values.get(read)
        return value if isinstance(value, list) else ()

    def samples(self, names: Iterable[str]) -> dict[str, list[Sample]]:
        """Metrics of those names. One that mixes several instances of GPUStack tells nothing of any."""
        value = self.values.get(METRICS)
        found = read_samples(value, frozenset(names)) if isinstance(value, str) else {}
        return {name: samples for name, samples in found.items() if len(_instances(samples)) == 1}


def nothing_more(answers: Answers) -> tuple[Read, ...]:
    """No further reads."""
    return ()


def no_counters(answers: Answers) -> Counters:
    """It counts nothing that is wanted."""
    return Counters()


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine tells about itself.

    `signs` are read to recognise it, `facts_from` rarely, `load_from` at each look; `more` names further reads the
    first answers ask for. `tells_load` is whether an unknown load is worth a warning. `counters` sees what a look that
    reads facts got, and asks for nothing itself.
    """

    name: str
    signs: tuple[Read, ...]
    facts_from: tuple[Read, ...]
    load_from: tuple[Read, ...]
    detect: Callable[[Answers], bool]
    facts: Callable[[Answers], Facts]
    load: Callable[[Answers, Facts], Load]
    more: Callable[[Answers], tuple[Read, ...]] = nothing_more
    tells_load: bool = True
    counters: Callable[[Answers], Counters] = no_counters


def cards(answers: Answers) -> dict[str, dict[str, Any]]:
    """The entries of /v1/models by id. Raises ValueError when that is no list of models."""
    if MODELS not in answers.values:
        return {}
    data = answers.object(MODELS).get("data")
    if not isinstance(data, list):
        raise ValueError("/v1/models is not a list of models")  # noqa: TRY004 - the look failed, not the caller
    named = [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
    return {card["id"]: card for card in named if 0 < len(card["id"]) <= LONGEST_NAME}


def owners(answers: Answers) -> set[object]:
    """The `owned_by` of the models listed; empty when the list is unreadable."""
    data = answers.object(MODELS).get("data")
    return {card["owned_by"] for card in data or () if isinstance(card, dict) and isinstance(card.get("owned_by"), str)}


def model_facts(
    listed: Mapping[str, dict[str, Any]], context: Callable[[dict[str, Any]], int | None]
) -> dict[str, ModelFacts]:
    """Facts of the models listed; an adapter (a card with a parent) without a context has its parent's."""
    told = {name: context(card) for name, card in listed.items()}
    bases = [told[name] for name, card in listed.items() if not card.get("parent")]

    def length(name: str, card: dict[str, Any]) -> int | None:
        parent = card.get("parent")
        if told[name] is not None or not parent:
            return told[name]
        return told[parent] if parent in told else bases[0] if len(bases) == 1 else None

    return {name: ModelFacts(context=length(name, card), card=card) for name, card in listed.items()}


def count(value: object) -> int | None:
    """A whole number of things, 0 or more, or None."""
    number = _finite(value)
    return None if number is None or number < 0 else int(number)


def size(value: object) -> int | None:
    """A capacity: a whole number above 0, or None. Also read from a label such as "1048576" or "None"."""
    number = count(value)
    return number or None


def share(value: object) -> float | None:
    """A share from 0 to 1, or None for anything else (rounding above 1 is forgiven)."""
    number = _finite(value)
    return None if number is None or not 0 <= number <= 1.01 else min(number, 1.0)


def word(value: object) -> str | None:
    """A non-empty string, or None."""
    return value if isinstance(value, str) and value else None


def total(values: Iterable[int | None]) -> int | None:
    """The sum, or None when there is nothing to add or one part is unknown."""
    parts = list(values)
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean, or None when there is nothing to average or one part is unknown."""
    parts = list(values)
    known = [part for part in parts if part is not None]
    return sum(known) / len(known) if parts and len(known) == len(parts) else None


def first_named(found: Mapping[str, list[Sample]], names: Iterable[str]) -> list[Sample]:
    """The samples of the first of several names of one metric that is there."""
    return next((found[name] for name in names if name in found), [])


def summed(found: Mapping[str, list[Sample]], names: Iterable[str]) -> float | None:
    """A total over all series of the first of several names that is there; None when one is unknown."""
    values = [sample.value for sample in first_named(found, names)]
    known = [value for value in values if value is not None and value >= 0]
    return sum(known) if values and len(known) == len(values) else None


def by_rank(samples: Iterable[Sample], label: str) -> list[float | None]:
    """One value for every data-parallel rank; of several (tensor-parallel) samples of a rank, the largest."""
    ranks: dict[str, float | None] = {}
    for sample in samples:
        rank = sample.labels.get(label, "")
        before = ranks.get(rank, -math.inf)
        ranks[rank] = None if before is None or sample.value is None else max(before, sample.value)
    return list(ranks.values())


def _instances(samples: Iterable[Sample]) -> set[str | None]:
    return {sample.labels.get("model_instance_id") for sample in samples}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < math.inf else None
