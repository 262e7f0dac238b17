"""The world the client libraries are run against: one router process, nodes whose models each misbehave in one way.

Every case is a model name, so that one router, one settings file and one process of each client library cover them all.
Bodies carry the client's name in `user`; what reached a node is found by it.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes import FakeNode, Script, Seen
from tests.fakes.plain import error_body, too_long
from tests.fakes.script import PING
from tests.fakes.streams import compact, data_event
from tests.rig.routers import RouterProcess, entry, relay_entry, running_process

KEY = "acceptance-key"
NODE_KEY, RELAY_KEY = "node-key", "relay-key"
ORIGIN = "https://chat.example"
HEARTBEAT_S, HEAD_S, PATIENCE_S, STALL_S = 0.3, 1.5, 0.6, 1.0

_CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "case"}


def chunk(content: str | None, finish: str | None = None) -> bytes:
    """One chat chunk as an SSE event."""
    delta = {} if content is None else {"content": content}
    return data_event({**_CHUNK, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


DIRTY = (
    b"retry: 3000\n\n",
    b"id: 7\n" + chunk("clean"),
    b"event: ping\n\n",
    b"data:\n\n",
    b": keep-alive\n\n",
    b"event: message\n" + chunk(" text"),
    chunk(None, "stop"),
    b"data: [DONE]\n\n",
)
UTF8 = b"".join((chunk("你好🌍 \u2028 \x85 ü"), chunk(None, "stop"), b"data: [DONE]\n\n"))
_RATE = {"message": "You exceeded your current quota", "type": "insufficient_quota", "param": None}

#: Model -> what happens to a call for it.
CASES: dict[str, Script] = {
    "tiny": Script(),
    "org/name": Script(),
    "paced": Script(ttft=0.05, gap=0.05, n=12),
    "endless": Script(gap=0.05, n=400),
    "slow": Script(ttft=1.1),
    "never": Script(nohead=60),
    "linger": Script(linger=4),
    "cut": Script(cut_clean=3),
    "reset": Script(cut=3),
    "cut-inside": Script(cut_inside=3),
    "dirty": Script(pieces=DIRTY),
    "crlf": Script(crlf=True),
    "utf8": Script(pieces=tuple(UTF8[at : at + 1] for at in range(len(UTF8))), piece_gap=0),
    "refused": Script(status=400, message="no such thing"),
    "flat": Script(status=400, shape="sglang", message="flat words"),
    "detail": Script(status=404, shape="detail", message="Not Found"),
    "string": Script(status=400, shape="string", message="string words"),
    "html": Script(status=400, shape="html", message="html words"),
    "long-vllm": Script(status=400, body=compact(too_long("vllm", 10, 99)[1])),
    "long-sglang": Script(status=400, body=compact(too_long("sglang", 10, 99)[1])),
    "long-llamacpp": Script(status=400, body=compact(too_long("llamacpp", 10, 99)[1])),
    "unimplemented": Script(status=501, message="not in this engine"),
    "hops": Script(
        headers=(("Connection", "X-Named"), ("X-Named", "1"), ("Keep-Alive", "timeout=9"), ("Set-Cookie", "a"))
    ),
    "flood": Script(flood=200 * 2**20),
    "ping-first": Script(prelude=(PING,), ttft=0.1),
}
NARROW = {"narrow": Script(ttft=1.0), "held": Script(gap=0.05, n=400), "short": Script()}
RELAYED = {
    "relayed": Script(gzip=True),
    "relayed-plain": Script(),
    "quota": Script(status=429, body={"error": {**_RATE, "code": "insufficient_quota"}}),
}


@dataclass
class World:
    """Everything a check may look at."""

    router: RouterProcess
    a: FakeNode
    b: FakeNode
    narrow: FakeNode
    relay: FakeNode

    @property
    def nodes(self) -> list[FakeNode]:
        return [self.a, self.b, self.narrow, self.relay]

    def seen(self, user: str) -> list[Seen]:
        """Calls that reached a node and carried that `user`, oldest first."""
        calls = [seen for node in self.nodes for seen in node.seen if f'"{user}"'.encode() in seen.body]
        return sorted(calls, key=lambda seen: seen.started)


def settings(world: Mapping[str, FakeNode]) -> dict[str, Any]:
    """What an operator would write for it."""
    return {
        "server": {
            "heartbeat_s": HEARTBEAT_S,
            "head_s": HEAD_S,
            "write_stall_s": STALL_S,
            "cors_origins": [ORIGIN],
        },
        "pools": {"interactive": {"patience_s": PATIENCE_S}},
        "probe": {"every_s": 0.3},
        "upstream": {"first_byte_s": 10, "idle_s": 10},
        "nodes": [
            entry(world["a"], api_key=NODE_KEY),
            entry(world["b"], api_key=NODE_KEY),
            entry(world["narrow"], api_key=NODE_KEY, max_sequences=1),
        ],
        "relay": relay_entry(world["relay"], tuple(RELAYED), api_key=RELAY_KEY),
        "keys": [{"name": "acceptance", "key": KEY}],
    }


@asynccontextmanager
async def a_world(home: Path) -> AsyncIterator[World]:
    """Nodes and relay listening, the router ready."""
    async with AsyncExitStack() as stack:
        made = _nodes()
        for node in made.values():
            await stack.enter_async_context(node)
        router = await stack.enter_async_context(running_process(settings(made), home))
        yield World(router, made["a"], made["b"], made["narrow"], made["relay"])


def _nodes() -> dict[str, FakeNode]:
    a = FakeNode(name="a", models=[*CASES, "pair", "pair-cut"], requires_key=NODE_KEY)
    a.scripts = {**CASES, "pair": Script(status=503, body=error_body("vllm", 503, "queue is full")[1])}
    b = FakeNode(name="b", models=["tiny", "pair", "pair-cut"], requires_key=NODE_KEY)
    a.scripts["pair-cut"] = b.scripts["pair-cut"] = Script(cut=2)
    narrow = FakeNode(name="narrow", models=list(NARROW), requires_key=NODE_KEY, context=64)
    narrow.scripts = dict(NARROW)
    relay = FakeNode(name="relay-service", dialect="openai", models=list(RELAYED), requires_key=RELAY_KEY)
    relay.scripts = dict(RELAYED)
    return {"a": a, "b": b, "narrow": narrow, "relay": relay}
