"""The router as a process: what it asks of the system, and what signals mean.

SIGTERM and SIGINT end it, the first one gently; SIGHUP makes it read its settings again.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable

import uvloop

from router import logs
from router.app import App, running
from router.core.events import Topic
from router.errors import SettingsError
from router.settings import Change, Settings

FILES = 65_536
"""Open files the router asks the system for: enough for 30,000 streams."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects between collections. At CPython's 700 the collector took 16 % of a loaded router's time and found nothing:
what a call leaves behind is freed by its reference counts."""
SWITCH_S = 0.0005
"""How long a thread that wants the interpreter waits for the loop to let go of it. At CPython's 5 ms a statement of the
store, which needs it a few times, took 40 ms beside a busy loop."""

log = logging.getLogger("ebbtide.settings")


def serve(settings: Settings, again: Callable[[], Settings]) -> int:
    """Serve until told to stop; the exit status. `again` reads the settings again and raises SettingsError."""
    _log_as(settings)
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
    _allow_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, again))


def _log_as(settings: Settings) -> None:
    logs.configure(level=settings.log.level, form=settings.log.format, calls=settings.log.calls)


def _allow_files() -> None:
    """A stream takes two files, and the soft limit most shells set is 1,024; the hard one is what the system means."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(settings: Settings, again: Callable[[], Settings]) -> int:
    """First SIGTERM or SIGINT: finish what runs, within the drain's bound. Second: now. SIGHUP: read the settings."""
    told, hung_up = asyncio.Queue[int](), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.put_nowait, number)
    async with running(settings) as app:
        gc.collect()
        gc.freeze()
        _greet(app)
        async with asyncio.TaskGroup() as group:
            reloading = group.create_task(_reload_when(hung_up, app, again), name="reload")
            await told.get()
            reloading.cancel()
        await app.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(app.settings.server.drain_s):
                await _drained(app, told)
    return 0


async def _reload_when(hung_up: asyncio.Event, app: App, again: Callable[[], Settings]) -> None:
    """Read the settings whenever told to. What cannot be used changes nothing."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            found = await app.reload(await asyncio.to_thread(again))
        except SettingsError as error:
            app.metrics.reloaded(None)
            for line in str(error).splitlines():
                log.warning("settings not reloaded: %s", line)
        except Exception:
            app.metrics.reloaded(None)
            log.error("settings not reloaded through a fault of ours", exc_info=True)
        else:
            app.metrics.reloaded(time.time())
            if any(change.key.startswith("log.") for change in found):
                _log_as(app.settings)
            _tell(found)
            if found:
                app.events.add(Topic.SETTINGS, ", ".join(str(change) for change in found)[:400])


async def _drained(app: App, told: asyncio.Queue[int]) -> None:
    """Wait until no call is open, or a second signal."""
    second = asyncio.ensure_future(told.get())
    try:
        while app.dispatcher.trips and not second.done():
            await asyncio.wait([second], timeout=0.1)
    finally:
        second.cancel()


def _greet(app: App) -> None:
    server = app.settings.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    sys.stderr.write(f"ebbtide: listening on http://{host}:{app.port}\n")
    sys.stderr.flush()


def _tell(found: Iterable[Change]) -> None:
    """Write down what a reload changed."""
    changed = list(found)
    for change in changed:
        if change.live:
            log.info("settings reloaded: %s", change)
        else:
            log.warning("settings reloaded: %s, which needs a restart", change)
    if not changed:
        log.info("settings reloaded: nothing changed")
