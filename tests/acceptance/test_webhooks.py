"""C87: a router as operators run it tells a receiver that batches ended, and every SDK takes what it was told."""

import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from tests.acceptance.batches import lines
from tests.acceptance.sdks import CLIENTS, SDKS, Sdk, unavailable
from tests.fakes import FakeNode, Script
from tests.rig import RouterProcess, entry, eventually, running_process
from tests.store.conftest import database, server, socket_of
from tests.upstream.wire import Node, Peer

__all__ = ["server"]

SECRET = "whsec_" + "c2VjcmV0IHdpdGggMzIgYnl0ZXMgb2YgcmFuZG9tIQ=="
OLD_SECRET = "whsec_" + "YW5vdGhlciBzZWNyZXQgb2YgMzIgcmFuZG9tIGJ5dGU="
SECRETS = {"HOOK_SECRET": SECRET, "OLD_HOOK_SECRET": OLD_SECRET}
KEY = "nightly-key"
OPENAI = [sdk for sdk in SDKS if sdk.package == "openai"]


@dataclass
class Received:
    """What a receiver was told, and with which statuses it answers (the last for ever)."""

    statuses: list[int]
    port: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, peer: Peer) -> None:
        head, body = await peer.request()
        first, *fields = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in fields)}
        self.events.append({"path": first.split(" ")[1], "headers": headers, "body": body.decode()})
        status = self.statuses[min(len(self.events), len(self.statuses)) - 1]
        await peer.send(b"HTTP/1.1 %d Said\r\nContent-Length: 0\r\n\r\n" % status)

    def of(self, batch_id: str) -> list[dict[str, Any]]:
        return [event for event in self.events if json.loads(event["body"])["data"]["id"] == batch_id]


@asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Received]:
    received = Received(list(statuses))
    async with Node(received.answer).listening() as node:
        received.port = node.port
        yield received


def settings(node: FakeNode, home: Path, default: str | None = None) -> dict[str, Any]:
    """What an operator writes who tests with a receiver on the same machine."""
    return {
        "store": {"url": f"sqlite:///{home}/ebbtide.db"},
        "nodes": [entry(node)],
        "keys": [{"name": "nightly", "key": KEY, "webhook_url": default}],
        "webhooks": {
            "allowed_hosts": ["127.0.0.1"],
            "allow_private": True,
            "secret": "${HOOK_SECRET}",
            "previous_secret": "${OLD_HOOK_SECRET}",
            "retry_s": [0.5, 0.5],
        },
        "log": {"level": "info"},
    }


async def submit(router: RouterProcess, **extra: Any) -> Any:
    """A batch of two lines, by the SDK."""
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY) as client:
        file = await client.files.create(file=("in.jsonl", lines(2)), purpose="batch")
        return await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=extra
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, dict[str, Any]]]:
    """What a receiver was told: of a batch that named it, of one whose key did, of one that was cancelled."""
    home = tmp_path_factory.mktemp("webhooks")
    async with FakeNode() as node, receiving(200) as received:
        base = f"http://127.0.0.1:{received.port}"
        async with running_process(settings(node, home, f"{base}/default?token=hunter2"), home, env=SECRETS) as router:
            ids = {
                "named": (await submit(router, webhook={"url": f"{base}/named?token=hunter2"})).id,
                "default": (await submit(router)).id,
            }
            with pytest.raises(BadRequestError) as caught:
                await submit(router, webhook={"url": "https://169.254.169.254/latest/meta-data"})
            assert (caught.value.param, caught.value.code) == ("webhook", "invalid_value")
            await eventually(lambda: len(received.events) == 2, within=20)
            node.scripts = {"tiny": Script(ttft=60)}
            stopped = await submit(router, webhook=f"{base}/stopped")
            await eventually(lambda: node.inflight, within=10)
            async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY) as client:
                await client.batches.cancel(stopped.id)
            ids["stopped"] = stopped.id
            await eventually(lambda: all(received.of(id_) for id_ in ids.values()), within=15)
        assert "hunter2" not in router.said
        assert router.said.count("webhook delivered") == 3
        yield {name: {"id": id_, "events": received.of(id_)} for name, id_ in ids.items()}


@pytest.mark.asyncio(loop_scope="module")
async def test_each_end_is_told_once_and_to_whom_it_concerns(told):
    assert {name: [event["path"] for event in one["events"]] for name, one in told.items()} == {
        "named": ["/named?token=hunter2"],
        "default": ["/default?token=hunter2"],
        "stopped": ["/stopped"],
    }


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.check("C87")
@pytest.mark.parametrize("sdk", OPENAI, ids=lambda sdk: sdk.name)
@pytest.mark.timeout(600)
async def test_the_sdk_takes_what_is_true_and_nothing_else(told, sdk):
    if (reason := unavailable(sdk)) is not None:
        pytest.skip(reason)
    events = [one["events"][0] for one in told.values()]
    forged = {**events[0], "body": events[0]["body"].replace(told["named"]["id"], "batch_another")}
    wanted = [["batch.completed", told["named"]["id"]], ["batch.completed", told["default"]["id"]]]
    wanted += [["batch.cancelled", told["stopped"]["id"]], ["InvalidWebhookSignatureError"]]
    asked = [{**event, "secret": secret} for secret in SECRETS.values() for event in (*events, forged)]
    assert await unwrapped(sdk, asked) == wanted * 2


async def unwrapped(sdk: Sdk, events: list[dict[str, Any]]) -> list[Any]:
    """What an SDK says of events, in a process of its own."""
    name = "webhook_client.py" if sdk.runtime == "python" else "webhook_client.mjs"
    script = CLIENTS / name
    if sdk.runtime == "node":
        script = Path(shutil.copy(script, sdk.home / name))
    process = await asyncio.create_subprocess_exec(
        sdk.command[0],
        str(script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, wrong = await process.communicate(b"".join(json.dumps(event).encode() + b"\n" for event in events))
    assert process.returncode == 0, wrong.decode()
    return [json.loads(line) for line in said.splitlines()]


async def test_a_router_that_was_killed_between_two_attempts_makes_the_next(tmp_path):
    async with FakeNode() as node, receiving(500, 200) as received:
        how = settings(node, tmp_path)
        async with running_process(how, tmp_path, env=SECRETS) as router:
            batch = await submit(router, webhook=f"http://127.0.0.1:{received.port}/")
            await eventually(lambda: failed_once(tmp_path), within=15)
            router.process.kill()
            await router.process.wait()
        async with running_process(how, tmp_path, env=SECRETS):
            await eventually(lambda: len(received.events) == 2, within=10)
        first, second = received.of(batch.id)
        assert first["headers"]["webhook-id"] == second["headers"]["webhook-id"]
        assert first["body"] == second["body"]


def failed_once(home: Path) -> bool:
    """Whether the failure of the first attempt is written down, and the next one due soon."""
    with closing(sqlite3.connect(home / "ebbtide.db")) as database:
        due = f"SELECT count(*) FROM deliveries WHERE attempts = 1 AND due_at < {time() + 10}"
        return bool(database.execute(due).fetchone()[0])


async def test_two_routers_on_one_postgresql_tell_each_end_once(tmp_path, request):
    """Both look for what is due all the time; twelve batches end at the one or the other, and each is told of once."""
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(database(socket_of(request.getfixturevalue("server")), "template1"))
        node = await stack.enter_async_context(FakeNode())
        received = await stack.enter_async_context(receiving(200))
        how = {**settings(node, tmp_path), "store": {"url": store}}
        routers = [await stack.enter_async_context(running_process(how, home, env=SECRETS)) for home in homes]
        hook = f"http://127.0.0.1:{received.port}/ended"
        made = await asyncio.gather(*(submit(routers[number % 2], webhook=hook) for number in range(12)))
        await eventually(lambda: all(received.of(batch.id) for batch in made), within=30)
    assert sorted(Counter(event["headers"]["webhook-id"] for event in received.events).values()) == [1] * 12
    assert sum(router.said.count("webhook delivered") for router in routers) == 12
