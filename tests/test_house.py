"""The rules of the house that no linter knows: sizes, names, the staircase, documented nouns."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "router").rglob("*.py"))
PYTHON = [
    path for folder in ("router", "tests", "loadtests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
]
FILE_LINES, FUNCTION_LINES = 400, 40
BANNED = re.compile(r"Manager|Service|Handler|Helper|Utils?(?![a-z])|Base(?![a-z])|Common(?![a-z])")
BANNED_MODULES = {"manager", "service", "handler", "helper", "helpers", "utils", "util", "base", "common"}
MOCKS = re.compile(r"^\s*(?:from unittest\.mock|from unittest import mock|import unittest\.mock|import mock\b)", re.M)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


@pytest.mark.parametrize("path", PYTHON, ids=ids)
def test_a_file_is_short(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_a_function_is_short(path):
    lines = {
        (node.name, node.lineno): node.end_lineno - node.lineno + 1
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_names_are_nouns_of_the_trade(path):
    assert path.stem.lower() not in BANNED_MODULES
    assert [node.name for node in nodes(path, ast.ClassDef) if BANNED.search(node.name)] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.read_text().strip()], ids=ids)
def test_what_is_public_says_what_it_is(path):
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), "a module opens with its rules"
    known = told_before(module)
    assert [
        name for name, node in public(module) if not ast.get_docstring(node) and name.split(".")[-1] not in known
    ] == []


def told_before(module: ast.Module) -> set[str]:
    """Methods that a class of the module documents: those of the same name in its siblings play the same part."""
    inner = [child for owner in module.body if isinstance(owner, ast.ClassDef) for child in owner.body]
    return {child.name for child in inner if isinstance(child, Function) and ast.get_docstring(child)}


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public classes and functions, and the public methods and properties of public classes that are not overrides."""
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_") and not inherited(node, child):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def inherited(owner: ast.AST, child: ast.AST) -> bool:
    """Whether a method answers to a base class of ours or of a library, which says what it is for."""
    return isinstance(owner, ast.ClassDef) and bool(owner.bases) and isinstance(child, Function)


@pytest.mark.parametrize("path", PYTHON, ids=ids)
def test_fakes_not_mocks(path):
    assert not MOCKS.search(path.read_text())


def test_imports_go_down_the_staircase():
    """Also: the core touches nothing, and one module speaks through httpx2."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_private_to_a_machine_is_named():
    """A clone works anywhere: no absolute path of a machine, and no registry's host."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    told = re.compile(rb"(?<![\w.$}])/(?:work|home|root|Users)/[a-z]")
    found = {
        ids(path) for path in paths if path.is_file() and path != Path(__file__) and told.search(path.read_bytes())
    }
    assert found == set()
