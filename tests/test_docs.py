"""What the code can say is in the documents: errors, outcomes, reasons, states. Every page is linked."""

import ast
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

from router import errors
from router.core.call import Outcome, Reason
from router.core.node import Event, Sign, State
from router.core.placement import RelayCause, WaitReason
from router.dispatch import normalise
from router.errors import Answer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ERRORS = (DOCS / "errors.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in ERRORS.splitlines() if line.startswith("| ")
]
ANSWERS = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Answer) and kind is not Answer
    ),
    key=lambda kind: kind.__name__,
)
TOLD = {"_bad", "refuse", "add", "_reject"}
"""Functions that take an error's code among their arguments."""
CODE = re.compile(r"[a-z]+(?:_[a-z]+)+")


def named(code: str) -> bool:
    return f"`{code}`" in ERRORS


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
def test_every_answer_is_in_the_table_of_errors(kind):
    status = "the node's" if kind is errors.UpstreamError else str(int(kind.status))
    code = f"`{kind.code}`" if kind.code else "null"
    assert any(row[0] == status and code in row[1] and row[2] == f"`{kind.type}`" for row in ROWS if len(row) == 7)


def codes() -> Iterator[tuple[str, str]]:
    """Every code written in the code, with the file it stands in."""
    for path in sorted((ROOT / "router").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                words = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if getattr(node.func, "attr", getattr(node.func, "id", "")) in TOLD:
                    words += node.args[:3]
                for word in words:
                    if isinstance(word, ast.Constant) and isinstance(word.value, str) and CODE.fullmatch(word.value):
                        yield word.value, str(path.relative_to(ROOT))


def test_every_code_written_in_the_code_is_documented():
    assert {(code, where) for code, where in codes() if not named(code)} == set()


def test_codes_are_found():
    """The search above finds what it is for."""
    found = {code for code, _ in codes()}
    assert {"invalid_value", "missing_required_parameter", "duplicate_custom_id"} <= found


def test_what_is_made_of_a_nodes_error_is_documented():
    made = {*normalise._CODES.values(), *normalise._TYPES.values(), *normalise._SPENT}
    assert [word for word in sorted(made) if not named(word)] == []
    for status, code in normalise._CODES.items():
        assert re.search(rf"^\| {status} \| .*`{code}`", ERRORS, re.M)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (Outcome, "behaviour.md"),
        (Outcome, "metrics.md"),
        (Reason, "behaviour.md"),
        (Reason, "metrics.md"),
        (RelayCause, "behaviour.md"),
        (RelayCause, "metrics.md"),
        (WaitReason, "behaviour.md"),
        (State, "nodes.md"),
        (State, "metrics.md"),
        (Sign, "nodes.md"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
def test_closed_lists_are_told_in_full(words: type[StrEnum], page: str):
    text = (DOCS / page).read_text()
    assert [word.value for word in words if f"`{word.value}`" not in text] == []


def test_every_event_of_a_node_is_drawn():
    text = (DOCS / "nodes.md").read_text()
    assert [event.value for event in Event if f" {event.value}" not in text] == []


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in sorted(DOCS.glob("*.md")) if f"(docs/{path.name})" not in readme] == []


def test_every_decision_is_listed():
    listed = (DOCS / "adr/README.md").read_text()
    assert [path.name for path in sorted((DOCS / "adr").glob("0*.md")) if f"({path.name})" not in listed] == []
