"""`ebbtide agent`: real process trees, and stand-ins for the parts of a system that are not here."""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from router.errors import SettingsError
from router.fleet.watch import read_agent
from router.tools import agent as command
from router.tools.agent import Agent
from router.tools.trees import Cgroups, Chosen, Gpus, Reading, Tree
from router.upstream.client import Client
from tests.rig import eventually

HOLD = "import sys; held = b'x' * int(sys.argv[2]) * 2**20; print('ready', flush=True); sys.stdin.read()"
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[2], 'inner', sys.argv[3]], stdin=subprocess.PIPE)\n"
    "sys.stdin.read()\n"
)
MIB = 2**20


class Engine:
    """A parent and a child that holds memory, under a name nobody else has."""

    def __init__(self, name: str, mib: int) -> None:
        command = [sys.executable, "-c", PARENT, name, HOLD, str(mib)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def wait(self) -> None:
        assert self._process.stdout.readline() == b"ready\n"

    def __enter__(self):
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=20)


@pytest.fixture
def name(request) -> str:
    return f"ebbtide-test-engine-{os.getpid()}-{abs(hash(request.node.name))}"


def test_the_whole_tree_is_read_and_a_restart_is_seen(name):
    tree = Tree(Chosen(match=re.compile(re.escape(name))))
    assert tree.read() == Reading()
    with Engine(name, 60) as engine:
        seen = tree.read()
        assert seen.processes == 2, "the child does not match, and belongs to the tree"
        assert 60 * MIB < seen.rss_bytes < 250 * MIB
        assert seen.pss_bytes is None or 0 < seen.pss_bytes <= seen.rss_bytes * 1.1
        assert seen.limit_bytes > seen.rss_bytes
        assert (seen.restarts, tree.read().started_at) == (0, seen.started_at)
        assert Tree(Chosen(pid=engine.pid)).read().processes == 2
    gone = tree.read()
    assert (gone.processes, gone.rss_bytes, gone.restarts) == (0, None, 0)
    with Engine(name, 1):
        again = tree.read()
    assert again.restarts == 1
    assert again.started_at > seen.started_at


@pytest.mark.skipif(sys.platform != "linux", reason="where the system derives starts from its clock")
@pytest.mark.parametrize("step_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_is_no_restart(monkeypatch, step_s):
    """Linux tells when a process began by the time of its boot, which moves with the clock."""
    tree = Tree(Chosen(pid=os.getpid()))
    before = tree.read()
    booted = psutil._pslinux.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted + step_s)
    after = tree.read()
    assert (after.started_at, after.restarts) == (before.started_at, 0)


def test_a_pattern_does_not_match_those_who_look():
    """It stands in the command line of the agent and of the shell it was started from."""
    table = {process.pid: process for process in psutil.process_iter()}
    roots = Chosen(match=re.compile("")).roots(table)
    assert not {os.getpid(), os.getppid()} & set(roots)


def test_a_process_that_is_not_there():
    assert Tree(Chosen(pid=2**22 - 3)).read().processes == 0


@pytest.mark.parametrize(
    ("line", "files", "told"),
    [
        (
            "0::/a/b\n",
            {
                "a/b/memory.current": "500",
                "a/b/memory.max": "max",
                "a/b/memory.stat": "anon 300\nfile 200\n",
                "a/memory.current": "900",
                "a/memory.max": "1000",
            },
            (500, 300, 1000),
        ),
        ("0::/seen/by/the/host\n", {"memory.current": "70", "memory.max": "80"}, (70, None, 80)),
        (
            "5:cpu:/x\n4:memory:/x\n0::/\n",
            {"memory/x/memory.usage_in_bytes": "7", "memory/x/memory.limit_in_bytes": str(2**63 - 4096)},
            (7, None, None),
        ),
        ("0::/../..\n", {}, (None, None, None)),
        ("nonsense\n", {"memory.current": "x"}, (None, None, None)),
        ("0::/\n", {"memory.current": "x", "memory.max": "y", "memory.stat": "anon"}, (None, None, None)),
    ],
    ids=["v2", "container", "v1", "none", "nonsense", "not numbers"],
)
def test_control_groups(tmp_path, line, files, told):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7/cgroup").write_text(line)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    assert Cgroups(proc, root).read(7) == told


class Nvml:
    """Two devices; one does not tell its processes."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=(device + 1) * 10)

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        if device:
            raise self.NVMLError
        return [SimpleNamespace(pid=1, usedGpuMemory=4), SimpleNamespace(pid=2, usedGpuMemory=None)]


def test_gpu_memory():
    assert Gpus(Nvml()).read({1, 2, 3}) == ({"0": 10.0, "1": 20.0}, 4.0)
    assert Gpus(Nvml()).read({9}) == ({"0": 10.0, "1": 20.0}, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "either --pid or --match"),
        ({"pid": 1, "match": "x"}, "either --pid or --match"),
        ({"match": "("}, "not a regular expression"),
    ],
)
def test_what_cannot_be_looked_for(options, told):
    with pytest.raises(SettingsError, match=told):
        command.run(argparse.Namespace(**{"pid": None, "match": None, "host": "127.0.0.1", "port": 0, **options}))


class Still:
    """A tree that says what it is told to."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = list(readings)

    def read(self) -> Reading:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def shown(agent: Agent) -> dict[str, float]:
    from prometheus_client import generate_latest

    text = generate_latest(agent.registry).decode()
    return {one.name + str(one.labels or ""): one.value for family in parse_text(text) for one in family.samples}


async def test_what_is_not_known_is_not_shown():
    now = [100.0]
    full = Reading(processes=3, rss_bytes=5.0, started_at=9.0, restarts=2, gpu_bytes={"0": 7.0})
    agent = Agent(Still(full, Reading()), every_s=0.01, clock=lambda: now[0])
    assert shown(agent) == {}
    watching = asyncio.create_task(agent.watch())
    try:
        told = await eventually(lambda: shown(agent))
        assert told["ebbtide_agent_up"] in (0, 1)
        gone = await eventually(lambda: (it := shown(agent))["ebbtide_agent_up"] == 0 and it)
        assert not [name for name in gone if "rss" in name or "resident" in name]
        now[0] = 107.0
        agent._seen, agent._seen_at = full, 100.0
        told = shown(agent)
    finally:
        watching.cancel()
    assert told["ebbtide_agent_tree_rss_bytes"] == told["process_resident_memory_bytes"] == 5
    assert told["ebbtide_agent_restarts_total"] == 2
    assert told["ebbtide_agent_gpu_memory_bytes{'gpu': '0'}"] == 7
    assert told["ebbtide_agent_age_seconds"] == 7
    assert "ebbtide_agent_tree_pss_bytes" not in told


async def test_the_command_serves_what_a_router_reads(name):
    """The whole of it: a process beside an engine, scraped as the router does."""
    with Engine(name, 30):
        arguments = ["-m", "router", "agent", "--match", name, "--port", "0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            url = re.fullmatch(r"ebbtide: agent on (http://127\.0\.0\.1:\d+/metrics)\n", line)[1]
            async with Client() as client:
                for _ in range(200):
                    memory = read_agent(await client.get_text(url, timeout_s=10.0))
                    if memory.rss_bytes is not None:
                        break
                    await asyncio.sleep(0.05)
                alive = await client.get_text(url.replace("/metrics", "/healthz"), timeout_s=10.0)
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 30)
    assert alive == "ok\n"
    assert 30 * MIB < memory.rss_bytes < 250 * MIB
    assert memory.limit_bytes > memory.rss_bytes
    assert memory.started_at > 1e9
