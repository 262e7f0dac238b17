"""`ebbtide demo`: three small llama.cpp nodes, the router before them and a tour, on a machine without a GPU.

Rules: the router is started as anybody would, `ebbtide serve --config FILE`, with a file that can be read afterwards;
nodes and router are children that end with this process, however it ends; everything on disk is in one folder.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console
from rich.status import Status
from rich.text import Text

from router.errors import EbbtideError
from router.tools.child import Child
from router.tools.tour import SHARED, tour
from router.tools.weights import provide

HOST = "127.0.0.1"
MODEL = "smollm2-135m"
START_S = 120.0
LONG_PROMPT_TOKENS = 1000
CONFIG = """\
# Written by `ebbtide demo`. Two nodes of one model in two shapes; size tells which a call gets. A third serves both
# kinds of work, under a name of its own: there batch makes way when chat comes.
# The bounds are wide for slow machines, and no heartbeat sends a head before it is known where a call ran.
server: {{host: 127.0.0.1, port: {port}, heartbeat_s: 300}}
store: {{url: {store}}}
classify: {{long_prompt_tokens: {long}}}
upstream: {{first_byte_s: 900, idle_s: 900}}
nodes:
{nodes}
log: {{format: text}}
"""


class Shape(NamedTuple):
    """One node of the demo: calls at the same time, tokens of context for each, the pools it serves, what is added to
    the model's name, and the threads it computes with."""

    name: str
    slots: int
    context: int
    pools: str
    suffix: str = ""
    threads: int = 1

    def arguments(self, model: Path, name: str, port: int) -> list[str]:
        """What `router.tools.llama` is told."""
        shape = {"slots": self.slots, "context": self.context, "threads": self.threads}
        told = {"model": model, "name": name + self.suffix, "port": port, **shape}
        return [word for key, value in told.items() for word in (f"--{key}", str(value))]


SHAPES = (
    Shape("chat", 4, 2048, "interactive"),
    Shape("long", 1, 8192, "batch"),
    # llama.cpp hears that a call has left once a second, and then ends its step: two threads make that short. The other
    # two nodes rest while it is shown.
    Shape("shared", 2, 4096, "interactive, batch", SHARED, threads=min(2, os.cpu_count() or 1)),
)


class Place(NamedTuple):
    """Where the demo can be asked: the router's port and the model's public name."""

    port: int
    model: str


def run(args: argparse.Namespace) -> int:
    """Set up, show, stay until interrupted (or leave after the tour with `args.once`); the exit status.

    `args` has `once`, `brief`, `model` (a GGUF file or None), `port` and `cache` (a folder or None).
    Raises EbbtideError.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise EbbtideError("the demo needs llama.cpp: pip install 'ebbtide[demo]'")
    console = Console(highlight=False)
    cache = (args.cache or _user_cache() / "ebbtide").resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with _sigterm_as_interrupt(), ExitStack() as block:
        children = [
            block.enter_context(Child(name, cache / f"{name}.log"))
            for name in (*(shape.name for shape in SHAPES), "router")
        ]
        try:
            place = _set_up(console, children, args, cache)
            tour(console, place.port, place.model, brief=args.brief)
            if not args.once:
                _stay(console, children, place, cache)
        except EbbtideError:
            for child in children:
                child.check()
            raise
    return 0


def settings(port: int, node_ports: Sequence[int], store: Path) -> str:
    """The demo's settings file."""
    nodes = "\n".join(
        f'  - {{name: {shape.name}, url: "http://{HOST}:{node_port}", pools: [{shape.pools}], engine: llamacpp}}'
        for shape, node_port in zip(SHAPES, node_ports, strict=True)
    )
    url = json.dumps(f"sqlite:///{store}".replace("${", "$${"))
    return CONFIG.format(port=port, store=url, long=LONG_PROMPT_TOKENS, nodes=nodes)


def _set_up(console: Console, children: Sequence[Child], args: argparse.Namespace, cache: Path) -> Place:
    """Fetch the model, start nodes and router, wait until they can serve."""
    *nodes, router = children
    with console.status("starting") as status:
        model, name = _model(args.model, cache, status)
        status.update("loading the model three times: nodes of different shape")
        ports = [_free_port() for _ in SHAPES]
        for child, shape, port in zip(nodes, SHAPES, ports, strict=True):
            child.start("router.tools.llama", shape.arguments(model, name, port))
        for child, shape, port in zip(nodes, SHAPES, ports, strict=True):
            child.wait_ready(f"http://{HOST}:{port}/health", START_S)
            console.print(f"{shape.name} node: {shape.slots} x {shape.context:,} tokens at http://{HOST}:{port}")
        status.update("starting the router")
        port = _port(args.port, console)
        config = cache / "demo.yaml"
        config.write_text(settings(port, ports, cache / "demo.db"))
        router.start("router", ["serve", "--config", str(config)])
        router.wait_ready(f"http://{HOST}:{port}/readyz", START_S)
    console.print(f"router: [bold]http://{HOST}:{port}/v1[/bold], started with {config}", soft_wrap=True)
    return Place(port, name)


def _model(given: Path | None, cache: Path, status: Status) -> tuple[Path, str]:
    """The model's file and public name."""
    if given is None:
        return provide(cache, status.update), MODEL
    if not given.is_file():
        raise EbbtideError(f"--model: there is no file {given}")
    return given.resolve(), re.sub(r"[^a-z0-9.-]+", "-", given.stem.lower())


def _stay(console: Console, children: Sequence[Child], place: Place, cache: Path) -> None:
    """Tell how to ask, and wait for Ctrl-C."""
    base = f"http://{HOST}:{place.port}"
    question = json.dumps({"model": place.model, "messages": [{"role": "user", "content": "Why is the sea salty?"}]})
    console.print("[bold]Now you.[/bold] Any OpenAI client works with this base URL, and any key:")
    console.print(f"   {base}/v1   ({base}/metrics, {base}/readyz; logs in {cache})\n", soft_wrap=True)
    console.print(Text(f"   curl -i {base}/v1/chat/completions -d '{question}'"), soft_wrap=True)
    console.print("\nCtrl-C ends everything.")
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(0.5)
            for child in children:
                child.check()


def _port(wanted: int, console: Console) -> int:
    """The port asked for, or a free one if it is taken."""
    try:
        with socket.create_server((HOST, wanted)) as listener:
            return int(listener.getsockname()[1])
    except OSError:
        port = _free_port()
        console.print(f"port {wanted} is taken: using {port} instead")
        return port


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, children first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
