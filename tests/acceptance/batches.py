"""A batch seen from outside: made, watched and counted over HTTP, whatever becomes of the routers meanwhile."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import Any

from tests.fakes import FakeNode
from tests.rig import ask

FINAL = {"completed", "failed", "expired", "cancelled"}
MARK = b"----lines"


def lines(count: int, **body: Any) -> bytes:
    """An input file: line number n asks with `say n.`."""
    made = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"say {number}."}],
                "max_tokens": 3,
                **body,
            },
        }
        for number in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


PURPOSE = b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' % MARK
FILE = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' % MARK
END = b"--%b--\r\n" % MARK
FORM = (("Content-Type", f"multipart/form-data; boundary={MARK.decode()}"),)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The header that says who asks; none without a key."""
    return (("Authorization", f"Bearer {key}"),) if key else ()


async def upload(port: int, content: bytes, key: str = "") -> str:
    """Upload an input file; its id."""
    file = await ask(port, PURPOSE + FILE + content + b"\r\n" + END, "/v1/files", headers=(*FORM, *bearer(key)))
    assert file.status == 200, file.body
    return str(file.json["id"])


async def create(
    port: int, file_id: str, *, window: str = "24h", endpoint: str = "/v1/chat/completions", key: str = ""
) -> str:
    """Make a batch of a file; its id."""
    told = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    batch = await ask(port, told, "/v1/batches", headers=bearer(key))
    assert batch.status == 200, batch.body
    return str(batch.json["id"])


async def submit(port: int, content: bytes, window: str = "24h") -> str:
    """Upload a file and make a batch of it; the batch's id."""
    return await create(port, await upload(port, content), window=window)


async def look(port: int, batch_id: str, key: str = "") -> dict[str, Any]:
    reply = await ask(port, path=f"/v1/batches/{batch_id}", method="GET", headers=bearer(key))
    assert reply.status == 200, reply.body
    return dict(reply.json)


async def ended(port: int, batch_id: str, within: float, key: str = "") -> dict[str, Any]:
    """The batch once it is final."""
    deadline = monotonic() + within
    while (batch := await look(port, batch_id, key))["status"] not in FINAL:
        assert monotonic() < deadline, batch
        await asyncio.sleep(0.1)
    return batch


async def content(port: int, file_id: str | None, key: str = "") -> list[dict[str, Any]]:
    """The lines of a result file."""
    if file_id is None:
        return []
    reply = await ask(port, path=f"/v1/files/{file_id}/content", method="GET", headers=bearer(key))
    assert reply.status == 200
    return [json.loads(line) for line in reply.body.splitlines()]


@dataclass
class Tally:
    """What nodes saw of each line, over all their lives."""

    nodes: list[FakeNode]

    def asked(self) -> Counter[str]:
        """How often each line was asked."""
        return Counter(_line_of(body) for node in self.nodes for body in node.bodies)

    @property
    def repeats(self) -> int:
        """Calls beyond the first of each line."""
        return sum(self.asked().values()) - len(self.asked())

    @property
    def inflight(self) -> int:
        return sum(node.inflight for node in self.nodes)

    @property
    def completed(self) -> int:
        return sum(node.completed for node in self.nodes)


def _line_of(body: bytes) -> str:
    said: str = json.loads(body)["messages"][0]["content"]
    return f"r{said.removeprefix('say ').removesuffix('.')}"


async def counted_exactly(port: int, batch_id: str, count: int, within: float) -> None:
    """The batch completes, and each line is in its output once, with an answer of its own."""
    batch = await ended(port, batch_id, within)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    assert await content(port, batch["error_file_id"]) == []
    output = await content(port, batch["output_file_id"])
    assert sorted(line["custom_id"] for line in output) == sorted(f"r{number}" for number in range(count))
    assert len({line["id"] for line in output}) == count
    for line in output:
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "tok0 tok1 tok2"
    tokens = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    assert batch["usage"]["output_tokens"] == tokens
