"""Exchanges that go wrong: what is raised, and that nothing is left behind."""

import asyncio
import socket

import pytest

from router.errors import BadAnswer, ConnectFailed, FirstByteTimeout, IdleTimeout, NodeFailed, Stopped, Truncated
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target
from tests.upstream.wire import GET, OK, Peer, answering, joined, once, post, settled, until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SECRET = b"tell-nobody"


async def whole(pool: Pool, body: bytes = b"") -> bytes:
    async with pool.exchange(post(body), body) as answer:
        return await answer.all(2**24)


async def refused(pool: Pool, kind: type[NodeFailed]) -> NodeFailed:
    with pytest.raises(kind) as caught:
        await whole(pool, SECRET)
    assert SECRET.decode() not in str(caught.value) + repr(caught.value.__cause__)
    await settled()
    assert (pool.open, pool.idle) == (0, 0)
    return caught.value


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"HTTP/1.1 200 OK\r\nConte",),
        (b"HTTP/1.1 100 Continue\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",),
        (CHUNKED, b"5\r\nhello\r\n"),
        (CHUNKED, b"5\r\nhel"),
        (CHUNKED, b"5\r\nhello\r\n0\r\n"),
    ],
)
def test_an_answer_cut_short_is_truncated(run, pieces, reset):
    async def scenario():
        async with joined(once(*pieces, reset=reset)) as (pool, node):
            await refused(pool, Truncated)
            assert node.accepted == 1

    run(scenario())


def test_a_close_delimited_body_cut_by_reset_is_truncated(run):
    got = []

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await until(lambda: got == [b"some"])
        peer.reset()

    async def scenario():
        async with joined(script) as (pool, _), pool.exchange(GET) as answer:
            got.append(await answer.read())
            with pytest.raises(Truncated):
                await answer.read()

    run(scenario())


def test_what_came_before_the_cut_is_read_first(run):
    async def scenario():
        cut = once(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
        async with joined(cut) as (pool, node), pool.exchange(GET) as answer:
            await until(lambda: not node.live)
            assert await answer.read() == b"abc"
            for _ in range(2):
                with pytest.raises(Truncated):
                    await answer.read()

    run(scenario())


@pytest.mark.parametrize(
    "piece",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50 + OK,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 9000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 3000 + b"Content-Length: 2\r\n\r\nok",
        CHUNKED + b"1;" + b"e" * 9000,
        CHUNKED + b"0\r\nTrailer: " + b"t" * 20000,
    ],
)
def test_what_is_not_http_or_over_a_bound_is_a_bad_answer(run, piece):
    async def script(peer: Peer) -> None:
        await peer.request()
        for start in range(0, len(piece), 1000):
            await peer.send(piece[start : start + 1000])
        await peer.gone()

    async def scenario():
        async with joined(script, Bounds(head_bytes=8192)) as (pool, _):
            await refused(pool, BadAnswer)

    run(scenario())


def test_a_large_body_is_not_taken_for_a_large_head(run):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n"

    async def scenario():
        async with joined(answering(head + b"x" * 200_000), Bounds(head_bytes=1024)) as (pool, _):
            assert len(await whole(pool)) == 200_000

    run(scenario())


def test_no_answer_within_the_first_byte_bound(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200")
        await peer.gone()

    async def scenario():
        async with joined(script, Bounds(first_byte_s=0.1)) as (pool, node):
            await refused(pool, FirstByteTimeout)
            await until(lambda: not node.live)

    run(scenario())


def test_the_first_byte_bound_of_one_exchange(run):
    async def scenario():
        async with joined(lambda peer: peer.gone()) as (pool, _):
            began = asyncio.get_running_loop().time()
            with pytest.raises(FirstByteTimeout):
                await pool.exchange(GET, first_byte_s=0.1).__aenter__()
            with pytest.raises(FirstByteTimeout):
                await pool.exchange(post(b"x" * 50_000_000), b"x" * 50_000_000, first_byte_s=0.2).__aenter__()
            assert 0.25 < asyncio.get_running_loop().time() - began < 3

    run(scenario())


def test_silence_inside_the_answer(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED, b"1\r\na\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script, Bounds(idle_s=0.1)) as (pool, node):
            await refused(pool, IdleTimeout)
            await until(lambda: not node.live)

    run(scenario())


def test_a_long_answer_has_no_total_bound_and_a_slow_reader_no_idle_one(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.03)
            await peer.send(b"1\r\na\r\n")
        await peer.send(b"0\r\n\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script, Bounds(idle_s=0.15, first_byte_s=0.15, keepalive_s=0.05)) as (pool, _):
            async with pool.exchange(GET) as answer:
                read = await answer.read()
                await asyncio.sleep(0.25)
                while piece := await answer.read():
                    read += piece
            assert read == b"a" * 12
            assert pool.idle == 1

    run(scenario())


def test_nobody_listens(run):
    async def scenario():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            pool = Pool(Target.parse(f"http://127.0.0.1:{free.getsockname()[1]}"), Bounds())
            with pytest.raises(ConnectFailed):
                await whole(pool, SECRET)
            assert (pool.open, pool.idle) == (0, 0)
            await pool.close()

    run(scenario())


def test_a_full_backlog_is_bounded_by_connect_s(run):
    async def scenario():
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            fillers = [socket.socket() for _ in range(4)]
            try:
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(("127.0.0.1", port))
                pool = Pool(Target.parse(f"http://127.0.0.1:{port}"), Bounds(connect_s=0.1))
                with pytest.raises(ConnectFailed, match=r"nothing within 0\.1 s"):
                    await whole(pool)
                assert pool.open == 0
                await pool.close()
            finally:
                for filler in fillers:
                    filler.close()

    run(scenario())


def test_a_server_that_hangs_up_at_once(run):
    async def script(peer: Peer) -> None:
        peer.reset()

    async def scenario():
        async with joined(script) as (pool, _):
            for _ in range(20):
                with pytest.raises((Truncated, ConnectFailed)):
                    await whole(pool)
            await settled()
            assert pool.open == 0

    run(scenario())


def test_leaving_early_aborts_at_once(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED, b"1\r\na\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, node):
            for _ in range(5):
                async with pool.exchange(GET) as answer:
                    assert await answer.read() == b"a"
                await settled()
                assert (pool.open, pool.idle) == (0, 0)
                await until(lambda: not node.live)

    run(scenario())


def test_closing_the_pool_ends_exchanges_in_progress(run):
    async def scenario():
        async with joined(lambda peer: peer.gone()) as (pool, _):
            waiting = asyncio.ensure_future(whole(pool))
            await until(lambda: pool.open == 1)
            await pool.close()
            with pytest.raises(Stopped, match="shutting down"):
                await waiting

    run(scenario())
