"""The recorded answers, as a probe would hold them."""

import json
from pathlib import Path
from typing import Any

from router.errors import ProbeFailed
from router.fleet.engines import Answers, Read

HERE = Path(__file__).parent / "captures"


def text(name: str) -> str:
    return (HERE / name).read_text()


def document(name: str) -> Any:
    return json.loads(text(name))


def answers(known: dict[Read, Any], absent: tuple[Read, ...] = ()) -> Answers:
    """Answers that came, and reads that met 404."""
    got = Answers(known)
    got.failures = {read: ProbeFailed(f"{read.path}: 404", 404) for read in absent}
    return got
