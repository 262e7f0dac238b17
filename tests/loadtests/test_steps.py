"""What a call costs in steps of Python, held by their number: a time would be another on every machine."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS = 120
"""Of Python functions for one small chat; 100 where this was written, fewer on later Pythons."""


def test_a_small_chat_takes_few_steps():
    command = [sys.executable, "loadtests/overhead/steps.py", "--functions", "--top", "200"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    rows = {line[:60].strip(): line[60:].split() for line in told.splitlines()}
    assert float(rows["upstream/connection.py Connection.start"][1]) >= 1
    assert float(rows["all"][1]) < CALLS, told
