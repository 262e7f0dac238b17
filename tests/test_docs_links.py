"""What the documents point at is there, and what they show loads."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from router.settings import load

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "config").rglob("*.md")])
FENCE = re.compile(r"^(?P<ticks>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=ticks)\s*$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SETTINGS = "yaml settings"
"""The words after the fence of a block that is a whole settings file."""


def ids(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def fences(path: Path, info: str) -> list[str]:
    return [match["text"] for match in FENCE.finditer(path.read_text()) if match["info"].strip() == info]


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    prose = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+\s+(.*?)\s*$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_rows_of_tables_are_whole(path):
    """A row that goes over two lines ends the table, and is shown as text."""
    lines = FENCE.sub("", path.read_text()).splitlines()
    assert not [line for line in lines if line.startswith("|") != line.endswith("|")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_relative_links_resolve(path):
    prose = FENCE.sub("", path.read_text())
    broken = []
    for match in [*LINK.finditer(prose), *IMAGE.finditer(prose)]:
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(match["target"])
    assert broken == []


BLOCKS = [(path, number, text) for path in DOCUMENTS for number, text in enumerate(fences(path, SETTINGS), 1)]


@pytest.mark.parametrize(
    ("path", "number", "text"), BLOCKS, ids=[f"{ids(path)}-{number}" for path, number, _ in BLOCKS]
)
def test_settings_shown_load(path, number, text, tmp_path):
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    secrets = {name: f"a-secret-of-the-test-{name}" for name in re.findall(r"\$\{(\w+)", text)}
    assert load(file, secrets).nodes


def test_settings_are_shown():
    """The fence's words are spelt as this file expects."""
    assert BLOCKS


def test_scripts_named_in_documents_exist():
    named = {name for path in DOCUMENTS for name in re.findall(r"\bscripts/[a-z-]+(?:\.py)?", path.read_text())}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("path", sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]), ids=ids)
def test_scripts_start(path):
    """Each can be run, and the shell reads it."""
    if path.is_file() and path.read_text().startswith("#!/bin/sh"):
        assert os.access(path, os.X_OK)
        assert subprocess.run(["/bin/sh", "-n", str(path)], capture_output=True, timeout=10).returncode == 0
