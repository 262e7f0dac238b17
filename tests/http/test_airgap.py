"""A site without a way out: nothing is fetched, at start or later (B60)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = ("unshare", "--map-root-user", "--net")


def refused() -> str:
    """Why no namespace can be made here, or nothing."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


def test_without_a_network_it_starts_counts_exactly_and_serves(tmp_path):
    if why := refused():
        pytest.skip(why)
    told = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [*ALONE, sys.executable, "-m", "tests.http.airgap"]
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["reached"], seen["status"]) == (False, 200)
    assert seen["ready_s"] < 10
    assert seen["counted"] > 4000
