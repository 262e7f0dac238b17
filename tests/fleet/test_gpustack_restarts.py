"""Restarting the one instance that is a node, and what is refused, against a server that answers as a recorded one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.core.node import Node, Spec
from router.errors import RecycleFailed
from router.fleet.discovery import Instances
from router.fleet.gpustack import Gpustack, Restarts
from router.upstream.client import Client
from router.upstream.target import Target
from tests.fakes.gpustack import FakeGpustack
from tests.fleet.hearing import hearing, listed_instance
from tests.fleet.looking import BOTH
from tests.rig import eventually

NAME = "qwen2.5-7b-00001"
URL, OTHER = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


@pytest.fixture
async def server() -> AsyncIterator[FakeGpustack]:
    """Two instances of one model, both running."""
    async with FakeGpustack() as fake:
        fake.add(port=8001)
        fake.add(port=8002)
        yield fake


@pytest.fixture
async def restarts(server: FakeGpustack) -> AsyncIterator[Restarts]:
    async with Client() as client:
        yield of(server, client)


def of(server: FakeGpustack, client: Client, **bounds: float) -> Restarts:
    asked = Gpustack(client, Target.parse(server.url, api_key=server.key), timeout_s=5)
    return Restarts(asked, sleep=lambda _: asyncio.sleep(0.005), **{"within_s": 5, "leave_s": 5, **bounds})


def looks(server: FakeGpustack) -> int:
    return sum(seen.path.endswith("/model-instances/1") for seen in server.asked("GET"))


async def looked(server: FakeGpustack) -> None:
    """Until it was looked at twice more, so that one look began and ended meanwhile."""
    before = looks(server)
    await eventually(lambda: looks(server) >= before + 2)


async def test_an_instance_is_restarted_where_it_is(server: FakeGpustack, restarts: Restarts) -> None:
    task = asyncio.create_task(restarts.restart(URL))
    await eventually(lambda: server.rows[1]["state"] == "scheduled")
    (put,) = server.asked("PUT")
    assert put.path == "/v2/model-instances/1"
    assert put.json == {
        "source": "local_path",
        "huggingface_repo_id": None,
        "huggingface_filename": None,
        "model_scope_model_id": None,
        "model_scope_file_path": None,
        "local_path": "/models/qwen2.5-7b",
        "name": NAME,
        "model_name": "qwen2.5-7b",
        "state": "scheduled",
        "state_message": "restarted by Ebbtide",
    }, "what is sent is written over what the agent may write now"
    for state in ("initializing", "starting"):
        await looked(server)
        server.update(1, state=state)
        await looked(server)
        assert not task.done()
    server.update(1, state="running")
    await task
    assert sorted(server.rows) == [1, 2]
    assert not server.asked("DELETE")


async def test_a_suspect_node_is_replaced(server: FakeGpustack, restarts: Restarts) -> None:
    await restarts.replace(URL)
    assert sorted(server.rows) == [2]


@pytest.mark.parametrize("what", ["restart", "replace"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"ready_replicas": 1}, "only 1 of 2 instances of qwen2.5-7b are ready"),
        ({"restarting_since": "2026-11-29T15:07:09Z"}, "GPUStack is restarting all of qwen2.5-7b"),
    ],
)
async def test_a_model_in_trouble_is_left_alone(
    server: FakeGpustack, restarts: Restarts, what: str, model: dict, told: str
) -> None:
    server.model |= model
    with pytest.raises(RecycleFailed, match=told):
        await getattr(restarts, what)(URL)
    assert not server.asked("PUT") + server.asked("DELETE")


async def test_the_instance_that_is_not_ready_may_be_replaced(server: FakeGpustack, restarts: Restarts) -> None:
    server.update(1, state="unreachable")
    server.model["ready_replicas"] = 1
    await restarts.replace(URL)
    assert sorted(server.rows) == [2]


async def test_one_instance_of_a_model_at_a_time(server: FakeGpustack, restarts: Restarts) -> None:
    task = asyncio.create_task(restarts.restart(URL))
    await eventually(lambda: server.asked("PUT"))
    with pytest.raises(RecycleFailed, match=r"another instance of qwen2\.5-7b is being"):
        await restarts.replace(OTHER)
    await looked(server)
    server.update(1, state="running")
    await task
    await restarts.replace(OTHER)


async def test_a_node_that_is_no_instance(restarts: Restarts) -> None:
    with pytest.raises(RecycleFailed, match="GPUStack has no instance at http://127"):
        await restarts.restart("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("then", "told"),
    [("error", "failed while it was restarted"), ("deleted", "deleted the instance qwen2.5-7b-00001")],
)
async def test_a_restart_that_goes_wrong_is_told(
    server: FakeGpustack, restarts: Restarts, then: str, told: str
) -> None:
    task = asyncio.create_task(restarts.restart(URL))
    await eventually(lambda: server.asked("PUT"))
    await looked(server)
    server.remove(1) if then == "deleted" else server.update(1, state=then)
    with pytest.raises(RecycleFailed, match=told):
        await task


async def test_a_restart_nobody_takes_up_is_no_restart(server: FakeGpustack) -> None:
    server.overwrites = True
    async with Client() as client:
        with pytest.raises(RecycleFailed, match=r"did not begin to restart within 0\.1 s"):
            await of(server, client, leave_s=0.1).restart(URL)


async def test_an_agent_that_is_down_is_waited_for_so_long(server: FakeGpustack) -> None:
    async with Client() as client:
        with pytest.raises(RecycleFailed, match=r"did not run again within 0\.1 s"):
            await of(server, client, within_s=0.1).restart(URL)


async def test_a_server_that_is_away_meanwhile_is_waited_for(server: FakeGpustack, restarts: Restarts) -> None:
    task = asyncio.create_task(restarts.restart(URL))
    await eventually(lambda: server.asked("PUT"))
    await looked(server)
    await server.down()
    server.rows[1]["state"] = "running"
    await server.up()
    await task


@pytest.mark.parametrize(
    ("status", "told"), [(401, "refuses the key"), (403, "denies the key"), (500, "GPUStack: status 500")]
)
async def test_a_refusal_is_told(server: FakeGpustack, restarts: Restarts, status: int, told: str) -> None:
    server.refuses = status
    with pytest.raises(RecycleFailed, match=told):
        await restarts.restart(URL)


async def test_a_key_that_is_revoked_meanwhile_ends_the_wait(server: FakeGpustack, restarts: Restarts) -> None:
    task = asyncio.create_task(restarts.restart(URL))
    await eventually(lambda: server.asked("PUT"))
    server.refuses = 401
    with pytest.raises(RecycleFailed, match="refuses the key"):
        await task


async def test_as_a_hook_it_restarts_and_next_replaces_what_did_not_come_back(server: FakeGpustack) -> None:
    node = Node(Spec(name="of the settings", url=URL, pools=BOTH))
    async with Client() as client:
        restarts = of(server, client, within_s=0.1)
        with pytest.raises(RecycleFailed, match="did not run again"):
            await restarts(node)
        server.model["ready_replicas"] = 1
        await restarts(node)
        assert sorted(server.rows) == [2]
        server.model["ready_replicas"] = 2
        server.add(port=8001)
        with pytest.raises(RecycleFailed, match="did not run again"):
            await restarts(node)
    assert [seen.path.rpartition("/")[2] for seen in server.asked("PUT") + server.asked("DELETE")] == ["1", "3", "1"]


async def test_what_is_restarted_stays_a_node_and_what_did_not_come_back_goes(server: FakeGpustack) -> None:
    async with Client() as client:
        asked = Gpustack(client, Target.parse(server.url, api_key=server.key), timeout_s=5)
        async with hearing(Instances(server=asked, listed=listed_instance, poll_s=0.02)) as ears:
            await ears.discovery.first(5)
            restarts = Restarts(asked, sleep=lambda _: asyncio.sleep(0.005))
            task = asyncio.create_task(restarts.restart(URL))
            await eventually(lambda: server.rows[1]["state"] == "scheduled")
            before = server.lists
            await eventually(lambda: server.lists > before + 1)
            assert len(ears.lists) == 1, "no news"
            server.update(2, state="scheduled")
            await eventually(lambda: ears.names == [NAME])
            server.update(1, state="error")
            with pytest.raises(RecycleFailed, match="failed while it was restarted"):
                await task
            await eventually(lambda: ears.names == [])
