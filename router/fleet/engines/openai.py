"""Any server with OpenAI's API: /v1/models is all there is to read, and its answer is the sign of life.

Some servers add the context to a model's card; the names below are those of vLLM and its kin, OpenRouter, and LM
Studio.
"""

from collections.abc import Mapping
from typing import Any

from router.core.node import Facts, Load
from router.fleet.engines.dialect import MODELS, Answers, Dialect, cards, model_facts, size

CONTEXT = ("max_model_len", "context_length", "context_window", "max_context_length")


def _detect(answers: Answers) -> bool:
    return True


def _context(card: Mapping[str, Any]) -> int | None:
    return next((told for name in CONTEXT if (told := size(card.get(name))) is not None), None)


def _facts(answers: Answers) -> Facts:
    return Facts(engine="openai", models=model_facts(cards(answers), _context))


def _load(answers: Answers, facts: Facts) -> Load:
    return Load()


OPENAI = Dialect(
    name="openai",
    signs=(MODELS,),
    facts_from=(MODELS,),
    load_from=(MODELS,),
    detect=_detect,
    facts=_facts,
    load=_load,
    tells_load=False,
)
