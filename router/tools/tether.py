"""Runs a module for as long as whoever started it lives: `python -m router.tools.tether MODULE [ARGUMENT ...]`.

Rules: standard input is the tether. Nothing is ever written to it; when it ends, the other side is gone (also by
SIGKILL, which no signal handler sees). The module then gets SIGTERM, and GRACE_S later the process ends by itself.
"""

import os
import runpy
import signal
import sys
import threading
import time

#: Seconds between asking the module to end and ending it.
GRACE_S = 5.0


def watch(descriptor: int) -> None:
    """Wait until `descriptor` is at its end, then end this process."""
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    """Start the watch, then become the module named on the command line."""
    threading.Thread(target=watch, args=(sys.stdin.fileno(),), name="tether", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
