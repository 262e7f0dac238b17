"""The desk for files and batches on a real socket, over a real store; the runner's part is played by the test.

`Counter.work` answers lines the way the runner would: it claims them, writes results and sweeps.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from openai import AsyncOpenAI
from uvicorn.server import ServerState

from router.api.auth import Caller, Keyring
from router.api.batches import Batches
from router.api.desk import Desk
from router.api.files import Files
from router.api.front import Front
from router.api.house import House
from router.api.protocol import FrontProtocol
from router.api.terms import Terms
from router.api.uploads import Uploads
from router.jobs.checks import Rules
from router.jobs.intake import Intake
from router.jobs.store import JobRow, NewResult, Store, Tokens
from tests.rig import Reply, ask

START = 1_800_000_000
MODELS = ("tiny", "other")
Answer = Callable[[JobRow], NewResult]


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


class Counter:
    """The desk, listening."""

    def __init__(self, store: Store, desk: Desk, intake: Intake, clock: Clock, port: int, state: ServerState) -> None:
        self.store, self.desk, self.intake, self.clock = store, desk, intake, clock
        self.port, self._state = port, state

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return len(self._state.connections)

    def sdk(self, key: str = "sk-ann", **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, **options)

    async def ask(self, method: str, path: str, body: Any = None, *, key: str = "sk-ann", **options: Any) -> Reply:
        headers = (("Authorization", f"Bearer {key}"), *options.pop("headers", ()))
        return await ask(self.port, body, path, method=method, headers=headers, **options)

    async def send(self, content: bytes, **told: Any) -> Reply:
        """Upload a file, by a form with these fields."""
        fields = {"purpose": "batch"} | told.pop("fields", {})
        raw, kind = form(content, fields=fields, **told)
        return await self.ask("POST", "/v1/files", raw, headers=(("Content-Type", kind),))

    async def file(self, content: bytes, **told: Any) -> str:
        """The id of a file that was uploaded."""
        reply = await self.send(content, **told)
        assert reply.status == 200, reply.body
        return str(reply.json["id"])

    async def batch(self, *lines: Any, **fields: Any) -> dict[str, Any]:
        """A batch of these lines, checked."""
        told = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | fields
        if "input_file_id" not in told:
            told["input_file_id"] = await self.file(jsonl(*lines))
        reply = await self.ask("POST", "/v1/batches", told)
        assert reply.status == 200, reply.body
        await self.check()
        return await self.get(reply.json["id"])

    async def check(self) -> None:
        """Check every batch that waits for it."""
        while await self.intake.step():
            pass

    async def get(self, batch_id: str) -> dict[str, Any]:
        reply = await self.ask("GET", f"/v1/batches/{batch_id}")
        assert reply.status == 200, reply.body
        return dict(reply.json)

    async def work(self, answer: Answer, limit: int = 1000) -> list[JobRow]:
        """Answer up to `limit` lines and do what is due."""
        jobs = await self.store.claim(models=MODELS, limit=limit, lease_s=30)
        await asyncio.gather(*(self.store.finish(job, answer(job)) for job in jobs))
        await self.sweep()
        return jobs

    async def sweep(self) -> None:
        while (await self.store.sweep()).more:
            pass


def good(job: JobRow) -> NewResult:
    """An answer that tells which line it is of."""
    body = json.dumps({"id": f"chatcmpl-{job.custom_id}", "object": "chat.completion"}).encode()
    return NewResult(status=200, request_id="req_1", body=body, tokens=Tokens(input=5, output=2, cached=1))


def bad(job: JobRow) -> NewResult:
    """A refusal by the node."""
    return NewResult(status=400, request_id="req_2", body=b'{"error":{"message":"no","type":"x","code":null}}')


def line(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(raw if isinstance(raw, bytes) else json.dumps(raw).encode() + b"\n" for raw in lines)


def form(
    content: bytes | None,
    *,
    fields: dict[str, str],
    field: str = "file",
    name: str | None = "in.jsonl",
    file_first: bool = False,
) -> tuple[bytes, str]:
    """A multipart body and its Content-Type."""
    mark = b"------form-7d1c"
    parts = [b'name="%s"\r\n\r\n%s' % (key.encode(), value.encode()) for key, value in fields.items()]
    if content is not None:
        named = b"" if name is None else b'; filename="%s"\r\nContent-Type: application/octet-stream' % name.encode()
        file = b'name="%s"%s\r\n\r\n%s' % (field.encode(), named, content)
        parts.insert(0 if file_first else len(parts), file)
    whole = b"".join(b"--%s\r\nContent-Disposition: form-data; %s\r\n" % (mark, part) for part in parts)
    return whole + b"--%s--\r\n" % mark, f"multipart/form-data; boundary={mark.decode()}"


@asynccontextmanager
async def open_counter(home: Path, *, rules: Sequence[tuple[str, Any]] = (), **desk: Any) -> AsyncIterator[Counter]:
    """A desk over a fresh store; options as for `Desk`, `terms` and `allowance` included."""
    clock = Clock()
    await _migrated(home / "desk.db")
    store = await Store.open(f"sqlite:///{home}/desk.db", router="here", clock=clock)
    keyring = Keyring((sha256(f"sk-{name}".encode()).digest(), Caller(name=name)) for name in ("ann", "bob"))
    terms = desk.pop("terms", Terms())
    allowance = {"allowance": desk.pop("allowance")} if "allowance" in desk else {}
    reader = ThreadPoolExecutor(1)
    intake = Intake(
        store=store, rules=Rules(**{"models": MODELS.__contains__, **dict(rules)}), reader=reader, **allowance
    )
    there = Desk(store=store, keyring=keyring, terms=terms, clock=clock, **desk)
    try:
        async with listening(there) as (port, state):
            yield Counter(store, there, intake, clock, port, state)
    finally:
        reader.shutdown()
        await store.close()


_fresh: list[bytes] = []


async def _migrated(path: Path) -> None:
    """An empty database; migrated once, copied from then on."""
    if not _fresh:
        await (await Store.open(f"sqlite:///{path}", router="first")).close()
    _copy(path)


def _copy(path: Path) -> None:
    if not _fresh:
        _fresh.append(path.read_bytes())
    path.write_bytes(_fresh[0])


@asynccontextmanager
async def listening(desk: Desk) -> AsyncIterator[tuple[int, ServerState]]:
    """Serves the desk's paths behind the real front; of the house only the bounds are needed."""
    house = cast(House, SimpleNamespace(terms=desk.terms, keyring=desk.keyring))
    routes = [route for room in (Files, Uploads, Batches) for route in room(desk).routes()]
    front = Front(house, routes)
    config = uvicorn.Config(front, http=FrontProtocol, ws="none", lifespan="off", access_log=False, log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FrontProtocol(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)
