"""`ebbtide demo`: two small llama.cpp nodes, the router before them and a tour, on a machine without a GPU.

Rules: the router is started as anybody would, `ebbtide serve --config FILE`, with a file that can be read afterwards;
nodes and router are children that end with this process, however it ends; everything on disk is in one folder.
"""

import argparse
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console
from rich.status import Status

from router.errors import EbbtideError
from router.tools.child import Child
from router.tools.tour import tour
from router.tools.weights import provide

HOST = "127.0.0.1"
MODEL = "smollm2-135m"
START_S = 120.0
LONG_PROMPT_TOKENS = 1500
CONFIG = """\
# Written by `ebbtide demo`. Two nodes of one model in two shapes; size tells which a call gets.
server: {{host: 127.0.0.1, port: {port}, heartbeat_s: 300}}
store: {{url: {store}}}
classify: {{long_prompt_tokens: {long}}}
nodes:
{nodes}
log: {{format: text}}
"""


class Shape(NamedTuple):
    """One node of the demo: calls at the same time, tokens of context for each, and the pool it serves."""

    name: str
    slots: int
    context: int
    pool: str


SHAPES = (Shape("chat", 4, 2048, "interactive"), Shape("long", 1, 8192, "batch"))


def run(args: argparse.Namespace) -> int:
    """Set up, show, stay until interrupted (or leave after the tour with `args.once`); the exit status.

    `args` has `once`, `model` (a GGUF file or None), `port` and `cache` (a folder or None).
    """
    console = Console(stderr=False, highlight=False)
    _need_llama()
    cache = args.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide"
    cache.mkdir(parents=True, exist_ok=True)
    with _sigterm_as_interrupt(), ExitStack() as children:
        name, port = _set_up(console, children, args, cache)
        tour(console, port, name)
        if not args.once:
            _stay(console, port, name, cache)
    return 0


def _set_up(console: Console, children: ExitStack, args: argparse.Namespace, cache: Path) -> tuple[str, int]:
    """Model, nodes and router, ready; the model's public name and the router's port."""
    with console.status("starting") as status:
        model, name = _model(args.model, cache, status)
        ports = _start_nodes(children, model, name, cache)
        status.update("loading the model twice, as two nodes of different shape")
        port = _port(args.port, console)
        router = children.enter_context(Child("the router", cache / "router.log"))
        config = cache / "demo.yaml"
        config.write_text(settings(port, ports, cache))
        for shape, (child, node_port) in zip(SHAPES, ports, strict=True):
            child.wait_ready(f"http://{HOST}:{node_port}/health", START_S)
            console.print(f"node [bold]{shape.name}[/bold]: {shape.slots} x {shape.context:,} tokens")
        status.update("starting the router")
        router.start("router", ["serve", "--config", str(config)])
        router.wait_ready(f"http://{HOST}:{port}/readyz", START_S)
    console.print(f"router: [bold]http://{HOST}:{port}/v1[/bold]")
    return name, port
