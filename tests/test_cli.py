"""The command line: what it prints where, and how it ends."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from router.cli import COMMANDS, main
from router.errors import ConnectFailed
from tests.logging_state import logging_restored

ROOT = Path(__file__).resolve().parent.parent
SECRET = "hunter2-hunter2"


@pytest.fixture
def config(tmp_path):
    """A file with one node, a relay and a key."""
    path = tmp_path / "e.yaml"
    path.write_text(
        f'nodes: [{{name: a, url: "http://127.0.0.1:8001", api_key: "{SECRET}"}}]\n'
        f'relay: {{url: "http://r/v1", api_key: "{SECRET}", models: [m]}}\nkeys: [{{name: k, key: "{SECRET}"}}]\n'
    )
    return path


@pytest.fixture
def stand_in(monkeypatch):
    """Put a module of these functions where a subcommand looks for its own."""

    def stand_in(name, **functions):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return stand_in


@pytest.fixture(autouse=True)
def _logging():
    with logging_restored():
        yield


def report(**changed):
    whole = {
        "name": "a",
        "url": "http://127.0.0.1:8001",
        "engine": "vllm",
        "models": ["llama"],
        "context": 32768,
        "kv_tokens": 400000,
        "sequences": None,
        "pools": ["batch", "interactive"],
        "problem": None,
    }
    return SimpleNamespace(**{**whole, **changed})


def looking(stand_in, *reports):
    async def look(settings):
        return list(reports)

    stand_in("router.app", look=look)


def test_version_and_help_from_outside():
    run = subprocess.run([sys.executable, "-m", "router", "--version"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout[:8], run.stderr) == (0, "ebbtide ", "")
    run = subprocess.run([sys.executable, "-m", "router", "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert all(command.name in run.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"examples:\n  ebbtide {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["sreve"],
        ["serve", "--conf", "x"],
        ["serve", "--port", "x"],
        ["serve", "--port", "65536"],
        ["demo", "--port", "-1"],
        ["check", "x"],
    ],
    ids=" ".join,
)
def test_usage_errors_end_with_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert capsys.readouterr().err


def test_serve_hands_over_settings_with_the_flags_over_them(config, stand_in):
    seen = []
    stand_in("router.process", serve=lambda settings, again: seen.append(settings) or 0)
    assert main(["serve", "--config", str(config), "--host", "127.0.0.2", "--port", "0"]) == 0
    assert (seen[0].server.host, seen[0].server.port, seen[0].nodes[0].name) == ("127.0.0.2", 0, "a")
    assert main(["serve", "--config", str(config)]) == 0
    assert (seen[1].server.host, seen[1].server.port) == ("127.0.0.1", 8080)


def test_a_hang_up_before_the_router_listens_to_it_is_kept(config, stand_in):
    """It would end the process, or be lost; the settings may have changed since they were read."""
    held = []
    stand_in("router.process", serve=lambda *_: held.extend(signal.pthread_sigmask(signal.SIG_BLOCK, ())) or 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert main(["serve", "--config", str(config)]) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert signal.SIGHUP in held


def test_settings_may_come_from_the_environment_alone(monkeypatch, stand_in):
    monkeypatch.setenv("EBBTIDE_NODES", "[{name: env, url: http://127.0.0.1:1}]")
    seen = []
    stand_in("router.process", serve=lambda settings, again: seen.append(settings) or 0)
    assert main(["serve"]) == 0
    assert seen[0].nodes[0].name == "env"


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ConnectFailed("nobody there"), 1, "ebbtide: nobody there\n"),
        (OSError(98, "Address already in use"), 1, "ebbtide: Address already in use\n"),
    ],
    ids=["interrupt", "ours", "system"],
)
def test_failures_are_one_line_and_a_status(config, stand_in, capsys, error, status, told):
    def serve(settings, again):
        raise error

    stand_in("router.process", serve=serve)
    assert main(["serve", "--config", str(config)]) == status
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_bad_settings_are_told_line_by_line(command, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("server: {prot: 1}\nnodes: []\n")
    assert main([command, "--config", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"ebbtide: {path}:1: server.prot: unknown key; did you mean 'port'?",
        f"ebbtide: {path}:2: nodes: at least one node, or a relay, is needed",
    ]


def test_check_of_the_file_alone(config, capsys):
    assert main(["check", "--config", str(config)]) == 0
    assert capsys.readouterr() == ("settings are fine: 1 nodes, a relay, 1 keys\n", "")


def test_check_in_json_shows_settings_without_secrets(config, capsys):
    assert main(["check", "--config", str(config), "--json"]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told["ok"] is True
    assert told["settings"]["nodes"][0]["api_key"] == "${EBBTIDE_NODES__0__API_KEY}"
    assert SECRET not in out


def test_check_in_json_tells_problems(tmp_path, capsys):
    assert main(["check", "--config", str(tmp_path / "none.yaml"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told == {"ok": False, "problems": [f"{tmp_path}/none.yaml: cannot be read: no such file or directory"]}


def test_probe_prints_a_table(config, stand_in, capsys):
    looking(stand_in, report(models=["[red]x[/]", "evil\x1b[2J"]))
    assert main(["check", "--config", str(config), "--probe"]) == 0
    out = capsys.readouterr().out
    for word in ("vllm", "[red]x[/]", "evil\\x1b[2J", "32,768", "400,000", "?", "batch, interactive", "ok"):
        assert word in out
    assert "\x1b" not in out


def test_probe_fails_when_a_node_cannot_be_used(config, stand_in, capsys):
    looking(stand_in, report(problem="connection refused", models=[], context=None), report(name="b"))
    assert main(["check", "--config", str(config), "--probe"]) == 1
    assert "connection refused" in capsys.readouterr().out
    assert main(["check", "--config", str(config), "--probe", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == ["a: connection refused"]
    assert [node["name"] for node in told["nodes"]] == ["a", "b"]


def test_demo_gets_its_arguments(stand_in):
    seen = []
    stand_in("router.tools.demo", run=lambda arguments: seen.append(arguments) or 3)
    assert main(["demo", "--once", "--model", "m.gguf", "--cache", "c"]) == 3
    (arguments,) = seen
    assert (arguments.once, arguments.model, arguments.port, arguments.cache) == (True, Path("m.gguf"), 8080, Path("c"))


def test_a_closed_pipe_is_quiet():
    command = f"'{sys.executable}' -m router serve --help | head -c 1"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert run.stderr == ""


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """`scripts/docs.py`."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "scripts/docs.py")
    docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docs)
    return docs


def test_generated_pages_are_current(docs):
    for name in docs.PAGES:
        assert docs.page(name) == (ROOT / "docs" / name).read_text(), f"docs/{name}: run scripts/docs.py"


def test_every_flag_and_setting_is_documented(docs):
    from router.settings import FIELDS, variable

    cli = (ROOT / "docs/cli.md").read_text()
    for command in COMMANDS:
        for flag in command.flags:
            assert f"`{flag.name}" in cli
            assert flag.options["help"] in cli
    configuration = (ROOT / "docs/configuration.md").read_text()
    sections = {way[:-1] for way in FIELDS} | {way[:-1] for way in FIELDS if way[-1] == "*"}
    said = docs.meanings()
    for way in FIELDS:
        assert said[way], way
        if way not in sections and (*way, "*") not in sections:
            assert f"`{variable(tuple('0' if part == '*' else part for part in way))}`" in configuration
