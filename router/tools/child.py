"""A process that never outlives the one that started it.

Rules: it runs under `router.tools.tether`, in a session of its own so that Ctrl-C reaches the parent alone; what it
says goes to a log file, and the end of that file explains its failure. Held for a block: leaving it ends the process.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from router.errors import EbbtideError

#: Seconds a child has to end after its tether is cut; a little more than the tether itself gives.
END_S = 7.0
TAIL_LINES = 12


class Child:
    """One module run as a process. `name` is what messages call it, `log` the file it writes."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """Run `python -m module arguments`, without Ebbtide's own environment variables."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.tools.tether", module, *arguments],
                env=environment,
                # not where the user stands: a folder `router` there would be taken for ours
                cwd=self.log.parent,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The process's id, None before it is started."""
        return self._process.pid if self._process is not None else None

    def check(self) -> None:
        """Raise EbbtideError with the end of its log if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise EbbtideError(f"{self.name} ended with status {self._process.returncode}; {self._told()}")

    def ready(self, url: str) -> bool:
        """Whether `url` answers 200. Raises EbbtideError if the process has ended."""
        self.check()
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait_ready(self, url: str, timeout_s: float) -> None:
        """Wait until `url` answers 200. Raises EbbtideError if the process ends first or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.ready(url):
            if time.monotonic() > deadline:
                raise EbbtideError(f"{self.name} was not ready within {timeout_s:.0f} s; {self._told()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Cut the tether and wait until the process is gone."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()

    def _told(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self.log}:", *(f"  {line}" for line in lines)])
