"""The command line: one row of `COMMANDS` and one function for each subcommand.

Rules: what a subcommand needs is imported inside it, so that `--help` is instant and a broken part breaks only its own
command; results go to standard output, everything else to standard error; exit status 0 is success, 1 a failure or bad
settings, 2 a usage error, 130 an interrupt.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from router.errors import EbbtideError, SettingsError

if TYPE_CHECKING:
    from router.settings import Settings

Arguments = argparse.Namespace


class NodeReport(Protocol):
    """What one look at a node found. None is unknown; `problem` is None when it can be used."""

    name: str
    url: str
    engine: str
    models: list[str]
    context: int | None
    kv_tokens: int | None
    sequences: int | None
    pools: Sequence[str]
    problem: str | None


class Flag(NamedTuple):
    """One option or argument: its name, what argparse needs to know of it, and a short name if it has one."""

    name: str
    options: Mapping[str, Any]
    short: str | None = None


class Command(NamedTuple):
    """One subcommand. `run` takes the parsed arguments and returns the exit status."""

    name: str
    summary: str
    run: Callable[[Arguments], int]
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit status."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EbbtideError as error:
        _complain(*str(error).splitlines())
        return 1
    except OSError as error:
        _complain(error.strerror or type(error).__name__)
        return 1
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of every command in the table."""
    whole = argparse.ArgumentParser(
        prog="ebbtide",
        description="Route chat and batch work onto your own LLM nodes through one OpenAI-compatible address.",
        epilog="'ebbtide COMMAND --help' shows a command's options and examples.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"ebbtide {version('ebbtide')}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog="\n".join(["examples:", *(f"  {example}" for example in command.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for flag in command.flags:
            names = (flag.name,) if flag.short is None else (flag.short, flag.name)
            one.add_argument(*names, **flag.options)
        one.set_defaults(run=command.run)
    return whole


def serve(arguments: Arguments) -> int:
    """Serve until told to stop."""
    # Held back until somebody listens: before that it would end the process, and a change would be missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    gc.disable()  # Imports leave next to no garbage, and looking for it took a seventh of the start.
    from router.process import serve as serve_process

    gc.enable()
    return serve_process(_settings(arguments), lambda: _settings(arguments))


def check(arguments: Arguments) -> int:
    """Check the settings and, when asked, look at every node once."""
    from router.settings import dump

    try:
        settings = _settings(arguments)
    except SettingsError as error:
        if not arguments.json:
            raise
        _print_json({"ok": False, "problems": str(error).splitlines()})
        return 1
    reports = _look(settings) if arguments.probe else []
    problems = [f"{report.name}: {report.problem}" for report in reports if report.problem]
    if arguments.json:
        nodes = [{field: getattr(report, field) for field in NodeReport.__annotations__} for report in reports]
        _print_json({"ok": not problems, "problems": problems, "settings": dump(settings), "nodes": nodes})
    elif arguments.probe:
        _print_table(reports)
    else:
        relay = "a relay" if settings.relay else "no relay"
        _print(f"settings are fine: {len(settings.nodes)} nodes, {relay}, {len(settings.keys)} keys")
    return 1 if problems else 0


def demo(arguments: Arguments) -> int:
    """Show the whole thing on this machine."""
    from router.tools.demo import run

    return run(arguments)


def batch(arguments: Arguments) -> int:
    """Submit, watch, fetch or cancel a batch of any OpenAI-compatible service."""
    from router.tools.batch import run

    return run(arguments)


def top(arguments: Arguments) -> int:
    """Show how a running router is doing."""
    from router.tools.top import run

    return run(arguments)


def diagnose(arguments: Arguments) -> int:
    """Replay a recorded series of one node."""
    from router.tools.diagnose import run

    return run(arguments)


def agent(arguments: Arguments) -> int:
    """Tell the memory of an engine's process tree."""
    from router.tools.agent import run

    return run(arguments)


def node(arguments: Arguments) -> int:
    """Look at a router's nodes, or take one out and in again."""
    from router.tools.node import run

    return run(arguments)


def _pair(text: str) -> list[str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError("metadata is written NAME=VALUE")
    return [name, value]


def _settings(arguments: Arguments) -> "Settings":
    from router.settings import load

    given = {name: getattr(arguments, name, None) for name in ("host", "port")}
    server = {name: value for name, value in given.items() if value is not None}
    return load(arguments.config, os.environ, {"server": server} if server else None)


def _look(settings: "Settings") -> Sequence[NodeReport]:
    from router import logs
    from router.app import look

    logs.configure(level="error", form="text")
    return asyncio.run(look(settings))


def _print_table(reports: Sequence[NodeReport]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("node", "engine", "models", "context", "KV tokens", "slots", "pools", "verdict")
    for report in reports:
        numbers = (report.context, report.kv_tokens, report.sequences)
        cells = (
            report.name,
            report.engine,
            "\n".join(report.models) or "-",
            *("?" if number is None else f"{number:,}" for number in numbers),
            ", ".join(sorted(report.pools)),
        )
        verdict = Text(_shown(report.problem), "red") if report.problem else Text("ok", "green")
        table.add_row(*(Text(_shown(cell)) for cell in cells), verdict)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _shown(text: str) -> str:
    """What a node says of itself, fit for a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print_json(value: object) -> None:
    _print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def _complain(*lines: str) -> None:
    sys.stderr.writelines(f"ebbtide: {line}\n" for line in lines)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 60:
        raise argparse.ArgumentTypeError("seconds are a number from 0.01 to 60")
    return seconds


CONFIG = Flag(
    "--config",
    {"metavar": "FILE", "type": Path, "help": "YAML settings; without it they come from EBBTIDE_* variables alone"},
)
HOST = Flag("--host", {"metavar": "HOST", "help": "address to listen on, instead of server.host"})
PORT = Flag("--port", {"metavar": "PORT", "type": _port, "help": "port to listen on, instead of server.port"})

COMMANDS = (
    Command(
        "serve",
        "route calls until told to stop",
        serve,
        (CONFIG, HOST, PORT),
        (
            "ebbtide serve --config ebbtide.yaml",
            "ebbtide serve --config ebbtide.yaml --host 0.0.0.0 --port 9000",
            "EBBTIDE_NODES='[{name: a, url: http://127.0.0.1:8001}]' ebbtide serve",
        ),
    ),
    Command(
        "check",
        "check the settings and, with --probe, look at every node once",
        check,
        (
            CONFIG,
            Flag(
                "--probe", {"action": "store_true", "help": "ask every node what it is; fails when one cannot be used"}
            ),
            Flag("--json", {"action": "store_true", "help": "print JSON, with the settings in force and no secrets"}),
        ),
        ("ebbtide check --config ebbtide.yaml", "ebbtide check --config ebbtide.yaml --probe --json"),
    ),
    Command(
        "batch",
        "submit a batch to this or any OpenAI-compatible service, watch it, fetch its results or cancel it",
        batch,
        (
            Flag("action", {"choices": ("submit", "status", "results", "cancel"), "help": "what to do"}),
            Flag("target", {"metavar": "FILE|ID", "help": "JSONL file to submit, or the id of a batch"}),
            Flag("--url", {"metavar": "URL", "help": "API base; else OPENAI_BASE_URL, else http://127.0.0.1:8080/v1"}),
            Flag("--endpoint", {"metavar": "PATH", "help": "what the lines ask for; else what the first line says"}),
            Flag("--window", {"metavar": "TIME", "default": "24h", "help": "time the service has, 5m to 14d (24h)"}),
            Flag(
                "--metadata",
                {
                    "metavar": "NAME=VALUE",
                    "type": _pair,
                    "action": "append",
                    "default": [],
                    "help": "kept with the batch; may be given several times",
                },
            ),
            Flag("--webhook", {"metavar": "URL", "help": "told when the batch has ended; for routers like this one"}),
            Flag("--wait", {"action": "store_true", "help": "stay until it is over and show how it gets on"}),
            Flag("--output", {"metavar": "FILE", "type": Path, "help": "where answers go"}, "-o"),
            Flag("--errors", {"metavar": "FILE", "type": Path, "help": "where failed lines go"}),
            Flag("--json", {"action": "store_true", "help": "print the batch as JSON"}),
        ),
        (
            "ebbtide batch submit lines.jsonl --wait -o results.jsonl",
            "ebbtide batch status batch_0123456789abcdef01234567",
            "ebbtide batch results batch_0123456789abcdef01234567 -o results.jsonl",
        ),
    ),
    Command(
        "top",
        "show live how a running router is doing: chat, queue, nodes, batches, relay",
        top,
        (
            Flag("--url", {"metavar": "URL", "default": "http://127.0.0.1:8080", "help": "the router's address"}),
            Flag("--key", {"metavar": "KEY", "help": "whose batches are shown; else OPENAI_API_KEY"}),
            Flag("--once", {"action": "store_true", "help": "print one picture and leave, as without a terminal"}),
        ),
        ("ebbtide top", "ebbtide top --url http://router.example:8080 --once"),
    ),
    Command(
        "diagnose",
        "tell what is wrong with a node from a recorded series of its signals",
        diagnose,
        (
            Flag(
                "file", {"metavar": "FILE", "type": Path, "help": "CSV with named columns; docs/diagnosis.md has them"}
            ),
            Flag("--relay", {"metavar": "FILE", "type": Path, "help": "CSV of the relay: at, ttft_s, gap_s"}),
            Flag("--limit", {"metavar": "BYTES", "type": float, "help": "most memory the node may have"}),
            Flag("--json", {"action": "store_true", "help": "print JSON, with every number that led to the verdict"}),
        ),
        (
            "ebbtide diagnose config/examples/decay.csv",
            "ebbtide diagnose node-a.csv --relay relay.csv --limit 68719476736 --json",
        ),
    ),
    Command(
        "agent",
        "run beside an engine and tell the memory of its whole process tree as Prometheus text",
        agent,
        (
            Flag("--pid", {"metavar": "N", "type": int, "help": "process id of the engine"}),
            Flag("--match", {"metavar": "REGEX", "help": "or: command lines to look for; restarts are followed"}),
            Flag("--host", {"metavar": "HOST", "default": "127.0.0.1", "help": "address to listen on (127.0.0.1)"}),
            Flag("--port", {"metavar": "PORT", "type": _port, "default": 9400, "help": "port to listen on (9400)"}),
            Flag("--every", {"metavar": "S", "type": _seconds, "default": 5.0, "help": "seconds between readings (5)"}),
        ),
        ("ebbtide agent --match 'vllm serve' --host 10.0.0.5", "ebbtide agent --pid 4711 --port 9401"),
    ),
    Command(
        "node",
        "show the nodes of a running router, or drain, resume or recycle one",
        node,
        (
            Flag("action", {"choices": ("list", "drain", "resume", "recycle"), "help": "what to do"}),
            Flag("name", {"metavar": "NAME", "nargs": "?", "help": "which node; list shows all without it"}),
            Flag("--url", {"metavar": "URL", "help": "the router; else EBBTIDE_URL, else http://127.0.0.1:8080"}),
            Flag("--key", {"metavar": "KEY", "help": "a key with admin: true; better in EBBTIDE_KEY"}),
            Flag("--force", {"action": "store_true", "help": "recycle although callers may notice"}),
            Flag("--wait", {"action": "store_true", "help": "stay until the node is drained, back, or down"}),
            Flag("--json", {"action": "store_true", "help": "print JSON"}),
        ),
        (
            "ebbtide node list",
            "ebbtide node drain gpu-1 --wait",
            "ebbtide node resume gpu-1",
            "ebbtide node recycle gpu-1 --url https://llm.example.org --wait",
        ),
    ),
    Command(
        "demo",
        "show it all on this machine with a small model, no GPU needed",
        demo,
        (
            Flag("--once", {"action": "store_true", "help": "run the scenario once, print what happened and leave"}),
            Flag("--brief", {"action": "store_true", "help": "shorter documents, for a quick look or a slow machine"}),
            Flag("--model", {"metavar": "FILE", "type": Path, "help": "GGUF model to use instead of the default one"}),
            Flag("--port", {"metavar": "PORT", "type": _port, "default": 8080, "help": "port to listen on (8080)"}),
            Flag("--cache", {"metavar": "DIR", "type": Path, "help": "folder that downloads are kept in"}),
        ),
        ("ebbtide demo", "ebbtide demo --once --model smollm2-135m-instruct-q8_0.gguf"),
    ),
)
"""Every subcommand, in the order of `--help`."""
