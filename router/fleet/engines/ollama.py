"""Ollama: /v1/models for names, /api/ps for the context of what is loaded.

From Ollama 0.33 `server/` and `docs/api`. It tells neither its parallelism nor its queue, so load and capacity are
unknown. The context of a model that is not loaded is decided when it is, and unknown until then. A prompt that is too
long is cut silently, so a known context matters more here than elsewhere.
"""

from router.core.node import Facts, Load
from router.fleet.engines.dialect import MODELS, Answers, Dialect, Read, cards, model_facts, owners, size, word

VERSION = Read("api/version")
LOADED = Read("api/ps", must=True)


def _detect(answers: Answers) -> bool:
    return "library" in owners(answers) or "version" in answers.object(VERSION)


def _facts(answers: Answers) -> Facts:
    loaded = answers.object(LOADED).get("models")
    contexts = {
        model.get("name"): size(model.get("context_length"))
        for model in (loaded if isinstance(loaded, list) else ())
        if isinstance(model, dict)
    }
    return Facts(
        engine="ollama",
        version=word(answers.object(VERSION).get("version")),
        models=model_facts(cards(answers), lambda card: contexts.get(card["id"])),
        streams_usage=True,
    )


def _load(answers: Answers, facts: Facts) -> Load:
    return Load()


OLLAMA = Dialect(
    name="ollama",
    signs=(MODELS, VERSION),
    facts_from=(MODELS, VERSION, LOADED),
    load_from=(LOADED,),
    detect=_detect,
    facts=_facts,
    load=_load,
    tells_load=False,
)
