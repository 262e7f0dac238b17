"""Backpressure both ways, and servers that answer before they have read."""

import asyncio

import pytest

from router.errors import Stopped, Truncated
from router.upstream.pool import Bounds
from tests.upstream.wire import GET, Peer, joined, post, settled, until

BIG = b"x" * 8_000_000
TOO_LARGE = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"


def test_a_slow_reader_stops_the_node(run):
    sent = [0]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(500):
            await peer.send(b"10000\r\n" + b"y" * 65536 + b"\r\n")
            sent[0] += 65536
        await peer.send(b"0\r\n\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script, Bounds(buffer_bytes=100_000)) as (pool, _):
            async with pool.exchange(GET) as answer:
                await asyncio.sleep(0.2)
                before = sent[0]
                await asyncio.sleep(0.1)
                assert before == sent[0] < 16_000_000
                (connection,) = pool._open
                assert sum(map(len, connection._chunks)) < 600_000
                read = 0
                while piece := await answer.read():
                    read += len(piece)
            assert read == 500 * 65536
            assert pool.idle == 1

    run(scenario())


def test_what_a_stopped_reader_holds_outlives_the_connection(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n", BIG)

    async def scenario():
        async with joined(script, Bounds(buffer_bytes=100_000)) as (pool, _), pool.exchange(GET) as answer:
            (connection,) = pool._open
            await until(lambda: connection._halted)
            await pool.close()
            assert len(await answer.read()) > 100_000
            with pytest.raises(Stopped):
                await answer.read()

    run(scenario())


def test_a_slow_node_stops_the_writer(run):
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await go.wait()
        _, body = await peer.request()
        assert body == BIG * 4
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, _):
            body = BIG * 4
            opening = asyncio.ensure_future(pool.exchange(post(body), body).__aenter__())
            await until(lambda: pool.open == 1)
            await asyncio.sleep(0.1)
            (connection,) = pool._open
            assert connection._transport.get_write_buffer_size() < 1_000_000
            go.set()
            assert (await opening).status == 200

    run(scenario())


@pytest.mark.parametrize("after", ["close", "stay", "read on"])
def test_an_answer_before_the_body_is_read(run, after):
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(TOO_LARGE)
        if after == "stay":
            peer.writer.transport.pause_reading()
            await asyncio.Event().wait()
        elif after == "read on":
            await peer.gone()

    async def scenario():
        async with joined(script) as (pool, _):
            for _ in range(20):
                async with pool.exchange(post(BIG), BIG) as answer:
                    assert answer.status == 413
                    assert await answer.all(10) == b"big"
                await settled()
                assert (pool.open, pool.idle) == (0, 0)

    run(scenario())


def test_an_answer_that_streams_while_the_body_goes_out(run):
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BIG))
        left = len(BIG)
        while left:
            piece = await peer.reader.read(100_000)
            left -= len(piece)
            await peer.send(piece)
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, _):
            async with pool.exchange(post(BIG), BIG) as answer:
                assert await answer.all(len(BIG)) == BIG
            assert pool.idle == 1

    run(scenario())


def test_who_takes_what_flows_and_stops_it_stops_the_node_and_misses_nothing(run):
    sent = [0]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(500):
            await peer.send(b"10000\r\n" + b"y" * 65536 + b"\r\n")
            sent[0] += 65536
        await peer.send(b"0\r\n\r\n")
        await peer.gone()

    async def scenario():
        taken = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) != 3

        async with joined(script, Bounds(buffer_bytes=100_000)) as (pool, _):
            async with pool.exchange(GET) as answer:
                assert await answer.flow(take)
                assert len(taken) == 3
                await asyncio.sleep(0.2)
                before = sent[0]
                await asyncio.sleep(0.1)
                assert before == sent[0] < 16_000_000
                assert len(taken) == 3
                assert not await answer.flow(take)
                assert answer.whole() == b""
            assert sum(map(len, taken)) == 500 * 65536
            assert pool.idle == 1

    run(scenario())


def test_what_flows_before_a_break_is_taken_before_the_break_is_told(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await peer.send(b"3\r\ntwo\r\n")

    async def scenario():
        taken = []
        async with joined(script) as (pool, _), pool.exchange(GET) as answer:
            with pytest.raises(Truncated):
                await answer.flow(lambda data: not taken.append(data))
        assert b"".join(taken) == b"onetwo"

    run(scenario())
