"""`ebbtide demo`, the whole of it, once: real nodes and a real model, fetched into the user's cache on first use."""

import importlib.util
import os
import subprocess
import sys

import psutil
import pytest

from tests.test_demo import ROOT, gone


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.timeout(900)
def test_the_tour_is_shown_and_nothing_is_left():
    command = [sys.executable, "-m", "router", "demo", "--once", "--brief", "--port", "0"]
    environment = {**os.environ, "COLUMNS": "100"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        below = psutil.Process(process.pid)
        told, children = "", set()
        for line in process.stdout:
            told += line
            children |= {child.pid for child in below.children(recursive=True)}
    assert process.returncode == 0, told
    assert "What went where, and why" in told
    assert len(children) >= 4
    assert all(gone(pid) for pid in children)
