"""Writes docs/conformance.md from the record of the last conformance run.

    python -m tests.acceptance.report [--check]

The page holds versions and results and no dates, so that it changes only when a result does. With `--check` nothing is
written: the exit status says whether the page is up to date.
"""

import json
import sys

from tests.acceptance.checks import CHECKS
from tests.acceptance.conftest import RECORD
from tests.acceptance.sdks import ROOT, SDKS

PAGE = ROOT / "docs" / "conformance.md"
COLUMNS = {"raw": "raw sockets"} | {sdk.name: sdk.title for sdk in SDKS}
MARKS = {"pass": "yes", "FAIL": "**no**"}
INTRO = """# Conformance

Real client libraries and raw sockets against a running router, with nodes that misbehave on command. Made by
`scripts/conformance`, which runs `tests/acceptance` and writes this page; a cell is empty where a check does not
concern a client.

C1 to C55 are about calls, from C56 on about files and batches.
"""


def page(rows: list[dict[str, str]]) -> str:
    """The page for these results."""
    results = {(row["check"], row["client"]): row["result"] for row in rows}
    clients = [name for name in COLUMNS if any(client == name for _, client in results)]
    header = ["check", "what", *(COLUMNS[name] for name in clients)]
    lines = [_row(header), _row(["---"] * len(header))]
    for check, what in CHECKS.items():
        lines.append(_row([check, what, *(_mark(results.get((check, name))) for name in clients)]))
    skipped = sorted(
        {f"- {COLUMNS[client]}: {result}" for (_, client), result in results.items() if "skipped" in result}
    )
    notes = ["", "Clients that could not be run:", "", *skipped] if skipped else []
    return "\n".join([INTRO, *lines, *notes]) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(result: str | None) -> str:
    return "" if result is None else MARKS.get(result, "not run")


def main(arguments: list[str]) -> int:
    if not RECORD.exists():
        print("no record: run the tests in tests/acceptance first", file=sys.stderr)
        return 2
    text = page(json.loads(RECORD.read_text()))
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
