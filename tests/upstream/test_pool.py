"""Exchanges that go well, and when a connection is kept."""

import asyncio
import socket

import pytest

from router.errors import BadAnswer, Stopped
from router.upstream.pool import Bounds, Exchange, Pool
from router.upstream.target import Target
from tests.upstream.wire import GET, OK, Peer, answering, joined, once, post, settled, until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def whole(pool: Pool, head: bytes = GET, body: bytes = b"") -> tuple[int, bytes]:
    async with pool.exchange(head, body) as answer:
        return answer.status, await answer.all(2**20)


@pytest.mark.parametrize(
    ("pieces", "body", "kept"),
    [
        ((OK,), b"ok", True),
        ((CHUNKED, b"5\r\nhello\r\n", b"6;ext=1\r\n world\r\n", b"0\r\nTrailer: x\r\n\r\n"), b"hello world", True),
        ((b"HTTP/1.1 200 OK\r\n", b"Content-Le", b"ngth: 0\r\n\r", b"\n"), b"", True),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b"", True),
        ((b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",), b"", True),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",), b"ok", False),
        ((b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",), b"ok", False),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK), b"ok", True),
        ((OK + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nextra",), b"ok", False),
        ((OK + b"junk",), b"ok", False),
        (
            (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",),
            b"\x1f\x8b\x08",
            True,
        ),
    ],
)
def test_bodies_by_framing(run, pieces, body, kept):
    async def scenario():
        async with joined(answering(*pieces)) as (pool, _):
            for _ in range(2):
                _, read = await whole(pool, post(b"{}"), b"{}")
                assert read == body
                assert pool.idle == kept

    run(scenario())


def test_a_body_without_length_ends_at_eof(run):
    async def scenario():
        async with joined(once(b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 1000, b"b")) as (pool, _):
            assert await whole(pool) == (200, b"a" * 1000 + b"b")
            await settled()
            assert (pool.open, pool.idle) == (0, 0)

    run(scenario())


def test_the_answer_shows_its_head(run):
    head = b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 2\r\n\r\nno"

    async def scenario():
        async with joined(answering(head)) as (pool, node), pool.exchange(GET) as answer:
            assert node.accepted == 1
            assert answer.status == 429
            assert answer.headers == [
                (b"retry-after", b"3"), (b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"2")
            ]  # fmt: skip
            assert answer.length == 2
            assert [await answer.read(), await answer.read(), await answer.read()] == [b"no", b"", b""]

    run(scenario())


def test_head_and_body_arrive_as_given(run):
    seen = []

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.send(OK)

    async def scenario():
        async with joined(script) as (pool, _):
            for size in (0, 1, 300_000, 3_000_001):
                body = bytes(range(256)) * (size // 256 + 1)
                await whole(pool, post(body[:size]), body[:size])
                assert seen.pop() == (post(body[:size]), body[:size])
            assert (pool.open, pool.idle) == (1, 1)

    run(scenario())


def test_the_answer_to_head_has_no_body(run):
    async def scenario():
        async with joined(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")) as (pool, _):
            assert await whole(pool, b"HEAD /health HTTP/1.1\r\n\r\n") == (200, b"")

    run(scenario())


def test_connections_are_reused_last_in_first_out(run):
    ports: list[int] = []

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            ports.append(peer.number)
            await peer.send(OK)

    async def scenario():
        async with joined(script) as (pool, node):
            async with pool.exchange(GET) as first:
                async with pool.exchange(GET) as second:
                    assert (pool.open, pool.idle) == (2, 0)
                    await second.all(9)
                await first.all(9)
            assert (pool.open, pool.idle) == (2, 2)
            for _ in range(5):
                await whole(pool)
            assert ports == [0, 1, 0, 0, 0, 0, 0]
            assert node.accepted == 2

    run(scenario())


def test_the_idle_stack_is_bounded(run):
    async def scenario():
        async with joined(answering(OK), Bounds(idle_connections=3)) as (pool, _):
            await asyncio.gather(*[whole(pool) for _ in range(10)])
            await settled()
            assert (pool.open, pool.idle) == (3, 3)

    run(scenario())


def test_idle_connections_expire_by_their_own_timer(run):
    async def scenario():
        async with joined(answering(OK), Bounds(keepalive_s=0.1)) as (pool, node):
            for _ in range(5):
                await whole(pool)
                await asyncio.sleep(0.05)
            assert node.accepted == 1
            await until(lambda: pool.open == 0)
            assert pool.idle == 0
            await until(lambda: not node.live)

    run(scenario())


@pytest.mark.parametrize("how", ["close", "reset", "data"])
def test_an_idle_connection_the_server_touches_leaves_at_once(run, how):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await asyncio.sleep(0.02)
        if how == "reset":
            peer.reset()
        elif how == "data":
            await peer.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await peer.gone()

    async def scenario():
        async with joined(script) as (pool, node):
            await whole(pool)
            assert pool.idle == 1
            await until(lambda: pool.open == 0)
            assert pool.idle == 0
            assert await whole(pool) == (200, b"ok")
            assert node.accepted == 2

    run(scenario())


@pytest.mark.parametrize("reset", [False, True])
def test_a_reused_connection_that_dies_before_the_first_byte_is_replaced(run, reset):
    bodies = []

    async def script(peer: Peer) -> None:
        for turn in range(99):
            _, body = await peer.request()
            bodies.append(body)
            if peer.number == 0 and turn == 1:
                return peer.reset() if reset else None
            await peer.send(OK)
        return None

    async def scenario():
        async with joined(script) as (pool, node):
            big = b"x" * 1_000_000
            for body in (b"first", big, b"third"):
                assert await whole(pool, post(body), body) == (200, b"ok")
            assert node.accepted == 2
            assert bodies == [b"first", big, big, b"third"]
            assert (pool.open, pool.idle) == (1, 1)

    run(scenario())


def test_all_is_bounded_by_declaration_and_by_count(run):
    async def scenario():
        for pieces in ((OK,), (CHUNKED, b"1\r\no\r\n", b"1\r\nk\r\n", b"0\r\n\r\n")):
            async with joined(answering(*pieces)) as (pool, _):
                async with pool.exchange(GET) as answer:
                    with pytest.raises(BadAnswer, match="over 1 bytes"):
                        await answer.all(1)
                assert await whole(pool) == (200, b"ok")

    run(scenario())


@pytest.mark.parametrize("tail", [b"0\r\n\r\n", b""])
def test_draining_keeps_a_connection_that_ends_in_time(run, tail):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED, b"1\r\na\r\n")
        await asyncio.sleep(0.02)
        await peer.send(tail)
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, _):
            async with pool.exchange(GET) as answer:
                assert await answer.read() == b"a"
                await answer.drain(0.2)
            await settled()
            assert pool.open == pool.idle == bool(tail)

    run(scenario())


def test_an_answer_is_dead_after_its_block(run):
    async def scenario():
        async with joined(answering(OK)) as (pool, _):
            async with pool.exchange(GET) as answer:
                await answer.all(9)
            assert isinstance(answer, Exchange)
            with pytest.raises(RuntimeError):
                await answer.read()

    run(scenario())


def test_ipv6_and_a_path_prefix(run):
    heads = []

    async def script(peer: Peer) -> None:
        heads.append((await peer.request())[0])
        await peer.send(OK)

    async def scenario():
        async with joined(script, host="::1") as (pool, node):
            target = Target.parse(f"{node.url}/llm/v1")
            head = b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (target.path("models"), target.host_header)
            assert await whole(pool, head) == (200, b"ok")
            assert heads == [b"GET /llm/v1/models HTTP/1.1\r\nHost: [::1]:%d\r\n\r\n" % node.port]

    run(scenario())


def test_nagle_is_off(run):
    async def scenario():
        async with joined(answering(OK)) as (pool, _):
            await whole(pool)
            (connection,) = pool._open
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario())


def test_a_closed_pool_begins_nothing(run):
    async def scenario():
        async with joined(answering(OK)) as (pool, _):
            await whole(pool)
            await pool.close()
            assert (pool.open, pool.idle) == (0, 0)
            with pytest.raises(Stopped):
                await whole(pool)
            await settled()
            assert pool.open == 0
            await pool.close()

    run(scenario())


def test_a_retired_pool_ends_what_runs_and_keeps_nothing(run):
    """A node that was let go: what waits is closed now, what runs when it is over, and a late call is served too."""

    async def scenario():
        async with joined(answering(OK)) as (pool, _):
            async with pool.exchange(GET) as answer:
                await whole(pool)
                assert (pool.open, pool.idle) == (2, 1)
                pool.retire()
                await until(lambda: pool.open == 1)
                assert pool.idle == 0
                assert await answer.all(2**20) == b"ok"
            await until(lambda: pool.open == 0)
            assert await whole(pool) == (200, b"ok")
            await until(lambda: pool.open == 0)

    run(scenario())
