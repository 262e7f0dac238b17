"""Clients that leave, stall or wait long: what becomes of their calls, over real sockets through the whole router."""

import asyncio
import json
from time import monotonic
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from router.api.presence import Presence, Watch
from router.api.protocol import FrontProtocol
from router.api.terms import Terms
from router.api.turn import Turn
from router.errors import ClientLeft, RequestTimeout
from tests.conftest import Rig
from tests.fakes import Script
from tests.rig import App, Connection, ask, chat, converse, eventually, request, stream

COMMENT = b": keep-alive"


async def ended(app: App, outcome: str) -> float:
    """Calls that ended so."""
    metrics = await app.metrics()
    return sum(
        value for name, value in metrics.items() if name.startswith("ebbtide_calls_total") and f'"{outcome}"' in name
    )


@pytest.mark.parametrize("body", [chat(), stream()], ids=["whole", "stream"])
async def test_who_leaves_before_the_head_frees_the_node_at_once(rig: Rig, body: dict[str, Any]) -> None:
    node = await rig.node(script=Script(nohead=2.5))
    app = await rig.router()
    line = await Connection.open(app.port)
    await line.send(request("/v1/chat/completions", body))
    await eventually(lambda: node.inflight == 1)
    left = monotonic()
    line.reset()
    await eventually(lambda: node.inflight == 0 and app.held == 0, within=1)
    assert monotonic() - left < 0.5
    assert len(node.aborted) == 1
    assert str(app.node("n1").state) == "ready"


async def test_who_leaves_in_the_stream_frees_the_node_at_once(rig: Rig) -> None:
    node = await rig.node(script=Script(gap=0.02, n=500))
    app = await rig.router()
    for _ in range(5):
        line = await Connection.open(app.port)
        await line.send(request("/v1/chat/completions", stream()))
        await line.read_until(b"tok3")
        line.reset()
        await eventually(lambda: node.inflight == 0 and app.held == 0, within=0.5)
    assert len(node.aborted) == 5
    assert await ended(app, "client_left") == 5


async def test_who_leaves_the_queue_is_never_sent(rig: Rig) -> None:
    node = await rig.node(script=Script(ttft=0.6))
    app = await rig.router({"name": "n1", "url": node.url, "engine": "vllm", "max_sequences": 1})
    first = asyncio.create_task(ask(app.port, chat()))
    await eventually(lambda: node.inflight == 1)
    gone = await Connection.open(app.port)
    await gone.send(request("/v1/chat/completions", chat("never")))
    await asyncio.sleep(0.15)
    gone.close()
    assert (await first).status == 200
    assert (await ask(app.port, chat())).status == 200
    assert node.accepted == 2


async def test_who_leaves_while_sending_costs_nothing(rig: Rig) -> None:
    node = await rig.node()
    app = await rig.router()
    raw = request("/v1/chat/completions", chat("x" * 10_000))
    line = await Connection.open(app.port)
    await line.send(raw[:5000])
    await asyncio.sleep(0.1)
    line.reset()
    assert (await ask(app.port, chat())).status == 200
    assert node.accepted == 1


async def test_a_slow_body_does_not_blind_the_watch(rig: Rig) -> None:
    node = await rig.node(script=Script(nohead=2.5))
    app = await rig.router()
    raw = request("/v1/chat/completions", chat("x" * 1000))
    line = await Connection.open(app.port)
    await line.send(raw[:-10])
    await asyncio.sleep(0.2)
    await line.send(raw[-10:])
    await eventually(lambda: node.inflight == 1)
    line.reset()
    await eventually(lambda: node.inflight == 0, within=0.5)


async def test_who_stops_reading_is_let_go(rig: Rig) -> None:
    node = await rig.node(script=Script(n=3, flood=50 * 2**20))
    app = await rig.router(server={"write_stall_s": 0.4})
    async with await Connection.open(app.port, receive_buffer=4096) as line:
        await line.send(request("/v1/chat/completions", stream()))
        await line.read_until(b"tok1")
        stalled = monotonic()
        await eventually(lambda: node.inflight == 0, within=5)
        assert 0.35 < monotonic() - stalled < 1.5
        assert app.held == 0
        assert await line.ended()
    assert await ended(app, "client_stalled") == 1


async def test_a_slow_reader_that_reads_is_not_let_go(rig: Rig) -> None:
    await rig.node(script=Script(n=2, flood=2**20))
    app = await rig.router(server={"write_stall_s": 0.4})
    async with await Connection.open(app.port, receive_buffer=4096) as line:
        await line.send(request("/v1/chat/completions", stream()))
        size, began = 0, monotonic()
        while monotonic() - began < 1.5:
            size += len(await line.read(16384))
            await asyncio.sleep(0.02)
        assert (await line.read_until(b"[DONE]\n\n")) is not None
        assert size > 2**16


async def test_whole_answers_wait_for_a_client_that_reads_late(rig: Rig) -> None:
    answer = b'{"choices":[],"pad":"%b"}' % (b"x" * 7 * 2**20)
    node = await rig.node(script=Script(answer=answer))
    app = await rig.router()
    async with await Connection.open(app.port, receive_buffer=65536) as line:
        await line.send(request("/v1/chat/completions", chat()) * 3)
        await eventually(lambda: node.accepted == 2 and node.inflight == 0 and app.held == 0)
        got = bytearray()
        while len(got) <= 3 * len(answer) or not got.endswith(b'"}'):
            got += await line.read(2**20)
    assert (got.count(b"HTTP/1.1 200 OK\r\n"), got.count(answer)) == (3, 3)
    assert node.accepted == 3


async def test_an_answer_that_does_not_come_is_refused_before_clients_give_up(rig: Rig) -> None:
    node = await rig.node(script=Script(nohead=2.5))
    app = await rig.router(server={"head_s": 0.5})
    reply = await ask(app.port, chat())
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
    assert reply.header("x-should-retry") == "false"
    await eventually(lambda: node.inflight == 0 and app.held == 0)
    assert await ended(app, "timed_out") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"])
async def test_a_stream_that_waits_hears_comments(rig: Rig, path: str) -> None:
    await rig.node(script=Script(nohead=0.7, n=3))
    app = await rig.router(server={"heartbeat_s": 0.2})
    body = {
        "model": "tiny",
        "stream": True,
        "max_tokens": 3,
        "prompt": "x",
        "input": "x",
        "messages": stream()["messages"],
    }
    reply = await ask(app.port, body, path)
    assert (reply.status, reply.clean) == (200, True)
    assert len(reply.values("x-request-id")) == 1
    events = reply.events
    assert 2 <= sum(event.raw == COMMENT for event in events) <= 4
    assert events[0].raw == COMMENT
    assert b"tok2" in b"".join(event.raw for event in events)
    first_word = next(number for number, event in enumerate(events) if event.raw != COMMENT)
    assert all(event.raw != COMMENT for event in events[first_word:])


async def test_the_first_comment_keeps_its_time_whenever_the_body_came(rig: Rig) -> None:
    await rig.node(script=Script(nohead=1.9, n=1))
    app = await rig.router(server={"heartbeat_s": 1.5})
    sent = request("/v1/chat/completions", stream())
    async with await Connection.open(app.port) as line:
        await line.send(sent[:-2])
        await asyncio.sleep(0.15)
        await line.send(sent[-2:])
        at = monotonic()
        reply = await line.reply()
    assert (reply.clean, reply.events[0].raw) == (True, COMMENT)
    assert 1.45 <= reply.events[0].at - at <= 1.75


@pytest.mark.parametrize(
    ("path", "last"), [("/v1/chat/completions", b"data: [DONE]"), ("/v1/responses", None), ("/v1/messages", None)]
)
async def test_a_failure_after_a_heartbeat_is_an_event(rig: Rig, path: str, last: bytes | None) -> None:
    await rig.node(script=Script(status=400, ttft=0.4, message="no such field"))
    app = await rig.router(server={"heartbeat_s": 0.2})
    body = {"model": "tiny", "stream": True, "max_tokens": 3, "input": "x", "messages": stream()["messages"]}
    reply = await ask(app.port, body, path)
    assert (reply.status, reply.clean) == (200, True)
    told = [event for event in reply.events if event.raw != COMMENT]
    assert b"no such field" in told[0].raw
    error = json.loads(told[0].data)
    if path == "/v1/chat/completions":
        assert error["error"]["message"] == "no such field"
    else:
        assert error["type"] == "error"
        assert told[0].lines[0] == b"event: error"
    assert last is None or told[-1].raw == last


async def test_a_call_refused_after_a_heartbeat_says_so_in_the_stream(rig: Rig) -> None:
    node = await rig.node(script=Script(nohead=2.5))
    settings: dict[str, Any] = {"server": {"heartbeat_s": 0.1}, "pools": {"interactive": {"patience_s": 0.4}}}
    app = await rig.router({"name": "n1", "url": node.url, "engine": "vllm", "max_sequences": 1}, **settings)
    holder = await Connection.open(app.port)
    await holder.send(request("/v1/chat/completions", chat()))
    await eventually(lambda: node.inflight == 1)
    reply = await ask(app.port, stream())
    holder.reset()
    assert reply.status == 200
    assert json.loads(reply.data[-2])["error"]["code"] == "server_is_overloaded"
    assert reply.data[-1] == b"[DONE]"


async def test_a_whole_answer_hears_no_comments(rig: Rig) -> None:
    await rig.node(script=Script(nohead=0.5))
    app = await rig.router(server={"heartbeat_s": 0.1})
    reply = await ask(app.port, chat())
    assert reply.status == 200
    assert reply.header("content-type") == "application/json"


async def test_two_requests_written_at_once_are_both_answered(rig: Rig) -> None:
    await rig.node(script=Script(ttft=0.1))
    app = await rig.router()
    raw = request("/v1/chat/completions", chat())
    async with await Connection.open(app.port) as line:
        await line.send(raw + raw)
        assert (await line.reply()).status == 200
    assert (await converse(app.port, raw)).status == 200


class Door:
    """A server on the protocol alone. Who serves a request reads its body and waits for ever; `told` is how that ended.

    Beside the error stands how many cancellations its task still has to deal with.
    """

    def __init__(self, terms: Terms) -> None:
        self._watch = Watch(terms)
        self.told: asyncio.Queue[tuple[BaseException, int]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self.port = 0

    async def serve(self, turn: Turn) -> None:
        assert turn.task is not None
        self.tasks.append(turn.task)
        try:
            with Presence(turn, self._watch) as presence:
                _ = presence.whole_body(10) or await presence.body(10)
                await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            self.told.put_nowait((error, turn.task.cancelling()))
            raise
        except (ClientLeft, RequestTimeout) as error:
            self.told.put_nowait((error, turn.task.cancelling()))

    async def __aenter__(self) -> "Door":
        config = Config(self.serve, http=FrontProtocol, log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: FrontProtocol(config, state, {}), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


async def test_a_cancellation_from_outside_passes_through() -> None:
    async with Door(Terms()) as door, await Connection.open(door.port) as line:
        await line.send(head(1) + b"x")
        await eventually(lambda: door.tasks)
        await asyncio.sleep(0)
        door.tasks[0].cancel()
        error, _ = await door.told.get()
        assert isinstance(error, asyncio.CancelledError)
        assert door.tasks[0].cancelled()


async def test_a_client_that_left_is_an_error_of_its_own_and_leaves_the_task_clean() -> None:
    async with Door(Terms()) as door:
        async with await Connection.open(door.port) as line:
            await line.send(head(1) + b"x")
            await eventually(lambda: door.tasks)
        error, cancelling = await door.told.get()
        assert isinstance(error, ClientLeft)
        assert cancelling == 0


@pytest.mark.parametrize("part", [b"", b"x"])
async def test_a_body_that_does_not_come_is_not_waited_for(part: bytes) -> None:
    began = monotonic()
    async with Door(Terms(body_s=0.2)) as door, await Connection.open(door.port) as line:
        await line.send(head(5) + part)
        error, _ = await door.told.get()
        assert isinstance(error, RequestTimeout)
    assert 0.2 <= monotonic() - began < 1


def head(length: int) -> bytes:
    """The head of a request with a body of so many bytes."""
    return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % length


async def test_a_long_body_that_breaks_off_never_looks_whole(rig: Rig) -> None:
    node = await rig.node(script=Script(answer=b"x" * (9 * 2**20), content_type="audio/mpeg"))
    app = await rig.router()
    body = {"model": "tiny", "input": "hi", "voice": "a"}
    reply = await ask(app.port, body, "/v1/audio/speech")
    assert (reply.status, reply.clean) == (200, True)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nContent-Length: 9000000\r\n\r\n"
    node.script = Script(raw=(head + b"x" * 100_000, b"x" * 100_000))
    reply = await ask(app.port, body, "/v1/audio/speech")
    assert (reply.status, reply.clean) == (200, False)
    assert len(reply.body) < 9_000_000
