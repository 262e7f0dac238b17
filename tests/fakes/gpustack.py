"""A fake GPUStack 2.3 server on a real socket: list, watch, PUT and DELETE of model instances, as a real one answers.

    async with FakeGpustack() as server:
        row = server.add(port=8001)                      # a running instance, told to whoever watches
        server.update(row["id"], state="scheduled")
        server.remove(row["id"])                         # told with the row as it was, running
        server.refuses = 401                             # every request from now on
        server.cut(b'{"type":2,"da')                     # end all watches, without an end and inside a record

Rows, models and errors are recorded ones (tests/fleet/captures/gpustack) with what a test says written over them.
"""

import asyncio
import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

from tests.fakes.seen import Seen
from tests.fakes.wire import Gone, Wire

CAPTURES = Path(__file__).parents[1] / "fleet" / "captures" / "gpustack"
INSTANCES, MODELS = "/v2/model-instances", "/v2/models"
REQUIRED = ("source", "name", "model_name")
ERRORS = {401: "err-bad-key", 403: "err-inference-key-on-v2", 422: "err-422-put-partial"}


def recorded(name: str) -> Any:
    """The body of a recorded answer."""
    return json.loads((CAPTURES / f"{name}.json").read_text())["body"]


class FakeGpustack:
    """One server. What is public may be changed while it runs."""

    def __init__(self, key: str = "gpustack_management") -> None:
        self.key = key
        self.rows: dict[int, dict[str, Any]] = {}
        self.model: dict[str, Any] = recorded("models")["items"][0]
        self.refuses: int | None = None
        self.body: bytes | None = None  # in place of the list
        self.overwrites = False  # the agent writes its own row over each PUT
        self.mute = False  # a watch begins and nothing follows, no sign of life either
        self.seen: list[Seen] = []
        self.port = 0
        self._last = 0
        self._template = recorded("model-instance")
        self._watches: dict[Wire, asyncio.Queue[bytes | None]] = {}
        self._wires: set[Wire] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watchers(self) -> int:
        return len(self._watches)

    @property
    def lists(self) -> int:
        """How often the list was asked for."""
        return sum(seen.path == INSTANCES and "watch" not in seen.query for seen in self.seen)

    def asked(self, method: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == method]

    async def up(self) -> None:
        """Listens, on the port it had before if any."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Refuses connections and resets those it has."""
        assert self._server is not None
        self._server.close()
        wires = list(self._wires)
        for wire in wires:
            wire.reset()
        await asyncio.gather(*(wire.task for wire in wires if wire.task), return_exceptions=True)
        await self._server.wait_closed()

    # rows

    def add(self, **fields: Any) -> dict[str, Any]:
        """One more instance, running unless said otherwise."""
        self._last += 1
        name = f"{fields.get('model_name', self._template['model_name'])}-{self._last:05}"
        row = {**deepcopy(self._template), "name": name, **fields, "id": self._last}
        self.rows[self._last] = row
        self._tell(1, row, {})
        return row

    def update(self, number: int, **fields: Any) -> None:
        row = self.rows[number]
        changed = {key: [[row[key]], [value]] for key, value in fields.items() if row[key] != value}
        row.update(fields)
        self._tell(2, row, changed)

    def remove(self, number: int) -> None:
        self._tell(3, self.rows.pop(number), {})

    def say(self, text: bytes) -> None:
        """To everybody who watches."""
        for queue in self._watches.values():
            queue.put_nowait(text)

    def cut(self, last: bytes = b"") -> None:
        """End all watches as a server does that shuts down: chunked, without the last chunk."""
        for queue in self._watches.values():
            queue.put_nowait(last)
            queue.put_nowait(None)

    def _tell(self, kind: int, row: dict[str, Any], changed: dict[str, Any]) -> None:
        self.say(_record(kind, row, changed))

    # serving

    def _connect(self) -> Wire:
        wire = Wire(self._serve, len(self._wires), [])
        self._wires.add(wire)
        return wire

    async def _serve(self, wire: Wire) -> None:
        try:
            while True:
                seen = await wire.request()
                self.seen.append(seen)
                if "watch=true" in seen.query and self._refusal(seen) is None:
                    return await self._watch(wire)
                status, body = self._answer(seen)
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
                await wire.send(head.encode() + b"\r\n\r\n" + text)
        finally:
            self._wires.discard(wire)

    def _refusal(self, seen: Seen) -> int | None:
        wrong = 401 if seen.header("authorization") != f"Bearer {self.key}" else None
        return self.refuses or wrong

    def _answer(self, seen: Seen) -> tuple[int, Any]:
        refused = self._refusal(seen)
        if refused is not None:
            return refused, recorded(ERRORS[refused]) if refused in ERRORS else b"Internal Server Error"
        if seen.path == INSTANCES:
            return 200, self._list(seen) if self.body is None else self.body
        place, _, number = seen.path.rpartition("/")
        if place == MODELS:
            return 200, self.model
        row = self.rows.get(int(number)) if place == INSTANCES else None
        if row is None:
            return 404, {"code": 404, "reason": "NotFound", "message": "Model instance not found"}
        return self._change(seen, row)

    def _list(self, seen: Seen) -> dict[str, Any]:
        """Newest first; without `page=-1` a hundred of them."""
        rows = [self.rows[number] for number in sorted(self.rows, reverse=True)]
        whole = parse_qs(seen.query).get("page") == ["-1"]
        items = rows if whole else rows[:100]
        pages = {"page": 1, "perPage": 100, "total": len(rows), "totalPage": 1}
        return {"items": items, "pagination": pages}

    def _change(self, seen: Seen, row: dict[str, Any]) -> tuple[int, Any]:
        if seen.method == "DELETE":
            self.remove(row["id"])
            return 200, None
        if seen.method == "PUT":
            if any(key not in seen.json for key in REQUIRED):
                return 422, recorded(ERRORS[422])
            taken = {} if self.overwrites else seen.json
            self.update(row["id"], **{key: value for key, value in taken.items() if key in row})
        return 200, row

    async def _watch(self, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        if not self.mute:
            for row in self.rows.values():
                queue.put_nowait(_record(1, row, {}))
        self._watches[wire] = queue
        try:
            while (text := await queue.get()) is not None:
                if text and not self.mute:
                    await wire.chunk(text)
        except Gone:
            pass
        finally:
            del self._watches[wire]
            wire.hang_up()


def _record(kind: int, row: dict[str, Any], changed: dict[str, Any]) -> bytes:
    said = {"type": kind, "data": row, "changed_fields": changed, "id": row["id"]}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n\n"
