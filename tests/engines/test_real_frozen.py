"""A real llama.cpp that is frozen and thawed: chat goes on elsewhere, nobody is told an error, no herd meets it."""

import asyncio
import os
import signal
from time import monotonic

import pytest

from router.core.node import State
from router.tools.child import Child
from tests.engines.conftest import START_S
from tests.engines.live import LLAMA_MODEL, Llama
from tests.fakes import Script
from tests.rig import ask, eventually, stream
from tests.rig.routers import free_port

LEAST_S = 4.0
MODEL = {"model": LLAMA_MODEL, "max_tokens": 6}
pytestmark = pytest.mark.timeout(110)


async def test_a_frozen_llama_leaves_within_its_bound_and_comes_back_without_a_herd(rig, weights, tmp_path):
    llama = Llama("frozen", free_port(), slots=4, context=512)
    other = await rig.node("spare", models=[LLAMA_MODEL], script=Script(ttft=0.2, n=5))
    with Child("frozen", tmp_path / "frozen.log") as child:
        child.start("router.tools.llama", llama.arguments(weights))
        await asyncio.to_thread(child.wait_ready, f"{llama.url}/health", START_S)
        app = await rig.router(
            llama.entry(kv_tokens=2048),
            {"name": "spare", "url": other.url, "engine": "vllm"},
            probe={"every_s": 1, "timeout_s": 2},
            upstream={"first_byte_s": 60, "idle_s": 60, "retries": 1},
            care={"first_byte_least_s": LEAST_S},
        )
        node = app.node("frozen")
        app.node("spare").refused_until = 1e12
        for number in range(9):
            assert (await ask(app.port, stream(f"Say {number}.", **MODEL))).header("x-ebbtide-node") == "frozen"
        app.node("spare").refused_until = 0
        assert node.pace.worst((20).bit_length()) is not None, "it has shown how long it reads"
        assert child.pid is not None
        os.killpg(child.pid, signal.SIGSTOP)
        try:
            began = monotonic()
            replies = await asyncio.gather(*(ask(app.port, stream(f"Go {n}.", **MODEL)) for n in range(6)))
            assert {(reply.status, reply.header("x-ebbtide-node")) for reply in replies} == {(200, "spare")}
            await eventually(lambda: node.state is State.DOWN, within=6)
            assert monotonic() - began < 5 * 256 * node.pace.worst((256).bit_length()) * 8 + LEAST_S + 6
            assert (await ask(app.port, stream("On.", **MODEL))).status == 200
        finally:
            os.killpg(child.pid, signal.SIGCONT)
        held = [0]
        stop = asyncio.Event()

        async def load():
            while not stop.is_set():
                reply = await ask(app.port, stream("And on.", **MODEL))
                assert (reply.status, reply.clean) == (200, True)

        def watch():
            if node.state is not State.READY:
                held.append(node.budget.held().sequences)
            return node.state is State.READY

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(load())
            await eventually(watch, within=30)
            stop.set()
        assert max(held) <= 1, "one call tries it, and no herd"
