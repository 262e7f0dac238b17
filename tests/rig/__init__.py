"""The bench the router is tested on: starting it, talking to it byte by byte, waiting on conditions, finding leaks."""

from tests.rig.client import Connection, Event, Reply, ask, chat, converse, request, stream
from tests.rig.leaks import Baseline, leaks, nothing_leaks
from tests.rig.routers import App, RouterProcess, entry, relay_entry, running_app, running_process
from tests.rig.wait import eventually

__all__ = [
    "App",
    "Baseline",
    "Connection",
    "Event",
    "Reply",
    "RouterProcess",
    "ask",
    "chat",
    "converse",
    "entry",
    "eventually",
    "leaks",
    "nothing_leaks",
    "relay_entry",
    "request",
    "running_app",
    "running_process",
    "stream",
]
