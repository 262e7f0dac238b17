"""Many streams at once: all whole, and nothing left when they have ended, not even for the garbage collector.

The full size is `python loadtests/streams.py`.
"""

import asyncio
import gc
import resource
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from router.process import FILES
from tests.fakes import Script
from tests.rig import Connection, ask, entry, eventually, request, running_process, stream

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


@pytest.mark.timeout(90)
async def test_a_hundred_streams_on_a_router_process():
    """The load test itself, shortened: nodes, router and clients in three processes."""
    shape = ["--streams", "100", "--seconds", "5", "--events", "20", "--gap", "0.1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "loadtests" / "streams.py"),
        *shape,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.rstrip().endswith("all well")


async def test_a_hundred_streams_leave_no_task(rig):
    """The fixture looks for tasks, room, waiters and busy connections at the end."""
    nodes = [await rig.node(script=Script(gap=0.05, n=20)) for _ in range(2)]
    app = await rig.router()
    calls = [asyncio.create_task(ask(app.port, stream())) for _ in range(100)]
    await eventually(lambda: sum(node.running for node in nodes) == 100, within=20)
    assert (await app.metrics())["ebbtide_open_streams"] == 100
    replies = await asyncio.gather(*calls)
    assert all(reply.clean and reply.data[-1] == b"[DONE]" and reply.text.endswith("tok19") for reply in replies)
    assert (await app.metrics())["ebbtide_open_streams"] == 0


async def _hears_all(line):
    assert (await line.reply()).clean


async def _leaves_inside(line):
    await line.read_until(b"tok1")


async def _leaves_before(line):
    await asyncio.sleep(0.1)


async def _is_refused(line):
    assert (await line.reply()).status == 503


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="this system does not tell another process's limits")
async def test_the_router_takes_the_files_it_needs(tmp_path, node):
    """A stream needs two; the soft limit that shells give is 1,024, so 500 streams."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        async with running_process({"nodes": [entry(node)]}, tmp_path) as router:
            soft, hard = psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft == min(hard, FILES)


@pytest.mark.parametrize(
    ("client", "script", "sequences"),
    [
        (_hears_all, Script(gap=0.03, n=4), None),
        (_hears_all, Script(gap=0.001, n=2), 1),
        (_leaves_inside, Script(gap=0.03, n=4), None),
        (_leaves_before, Script(ttft=5), None),
        (_leaves_before, Script(ttft=5), 1),
        (_is_refused, Script(ttft=1), 0),
    ],
)
async def test_an_ended_call_leaves_nothing_to_the_garbage_collector(rig, client, script, sequences):
    """Circles are freed only by a full collection, which a loaded router makes seldom: they look like a leak.

    `sequences`: what the node takes at once; the rest waits. 0: somebody else has its only place. No look at the node
    falls into the test: one that comes late on a busy machine fails, and what a failed look leaves is not in question.
    """
    node = await rig.node()
    told = {} if sequences is None else {"max_sequences": max(1, sequences)}
    app = await rig.router(
        entry(node, **told),
        pools={"interactive": {"patience_s": 5 if sequences else 0.2}},
        probe={"every_s": 60},
        upstream={"first_byte_s": 20, "idle_s": 20},
    )
    other = await Connection.open(app.port)
    if sequences == 0:
        node.script = Script(ttft=30)
        await other.send(request(CHAT, stream()))
        await eventually(lambda: node.inflight == 1)
    node.script = script

    async def call():
        async with await Connection.open(app.port) as line:
            await line.send(request(CHAT, stream()))
            await client(line)

    await call()
    with collecting() as found:
        await asyncio.gather(*(call() for _ in range(20)))
        await eventually(lambda: len(app.inside.dispatcher.trips) == (sequences == 0))
    assert not found
    other.close()


@contextmanager
def collecting():
    """What of ours only the collector would free at the end of the block, by type; filled there."""
    found = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("router."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
