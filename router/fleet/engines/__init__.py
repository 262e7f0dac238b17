"""The engines a node may run, each as a dialect. The order is the order of recognition: the surest sign first.

SGLang comes before Ollama because it speaks part of Ollama's API too; `openai` is what remains.
"""

from router.fleet.engines.dialect import Answers, Dialect, Read
from router.fleet.engines.llamacpp import LLAMACPP
from router.fleet.engines.ollama import OLLAMA
from router.fleet.engines.openai import OPENAI
from router.fleet.engines.sglang import SGLANG
from router.fleet.engines.vllm import VLLM

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (VLLM, SGLANG, LLAMACPP, OLLAMA, OPENAI)}

SIGNS: tuple[Read, ...] = tuple(dict.fromkeys(read for dialect in DIALECTS.values() for read in dialect.signs))
"""Everything read to recognise an engine, once each."""


def recognise(answers: Answers) -> Dialect:
    """The dialect of a server, from what it answered to `SIGNS`."""
    return next(dialect for dialect in DIALECTS.values() if dialect.detect(answers))


__all__ = ["DIALECTS", "SIGNS", "Answers", "Dialect", "Read", "recognise"]
