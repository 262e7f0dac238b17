"""Routers forked from one process that has imported everything: imports are most of what a start costs.

Each is a process of its own, with a log and settings of its own, and dies as any other; only what it imported is its
parent's. For tests that start many. Its program reads a JSON list a line (the folder it is started in, its log, then
the command line) and answers with a process id.
"""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from tests.rig.stem import main; main()"


class Forked:
    """The part of asyncio's `Process` that the rig uses. `returncode` is None while it lives, then 0: nobody knows."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._file = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._file, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self.returncode = 0
        self._ended.set()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._file, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


class Stem:
    """A process that forks routers, in any event loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def fork(self, command: Sequence[str], home: Path, log: Path) -> Forked:
        """`ebbtide` with this command line."""
        return Forked(await asyncio.to_thread(self._ask, json.dumps([str(home), str(log), *command])))

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def stem() -> Iterator[Stem | None]:
    """One that lasts as long as the block. None where the system has no handles of processes (all but Linux)."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    # Leaving the block ends what it reads, and thereby it.
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        yield Stem(process)


def main() -> None:
    """Import, then fork at every line until there are no more."""
    from router import cli, process, tokens
    from router.upstream.target import verified

    assert process
    tokens.Tokens.load().close()
    verified()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while line := sys.stdin.buffer.readline():
        home, log, *command = json.loads(line)
        if pid := os.fork():
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
            os.dup2(os.open(path, flags, 0o644), number)
        os.dup2(1, 2)
        os.chdir(home)
        sys.exit(cli.main(command))
