"""A cancelled exchange leaves nothing open, wherever it was."""

import asyncio

import pytest

from router.upstream.pool import Bounds, Pool
from tests.upstream.wire import Peer, joined, post, settled, until

BODY = b"x" * 600_000


async def slow(peer: Peer) -> None:
    """Answer in small steps, so that every await of the exchange is met."""
    while True:
        await peer.request()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await settled(3)
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            await settled(3)
            await peer.send(b"1\r\na\r\n")
        await peer.send(b"0\r\n\r\n")


async def exchange(pool: Pool) -> bytes:
    async with pool.exchange(post(BODY), BODY) as answer:
        return await answer.all(100)


async def cancelled_after(pool: Pool, turns: int) -> bool:
    task = asyncio.ensure_future(exchange(pool))
    await settled(turns)
    finished = not task.cancel()
    try:
        assert await task == b"aaaaa"
    except asyncio.CancelledError:
        pass
    else:
        finished = True
    return finished


def test_cancelled_after_any_number_of_turns(run):
    async def scenario():
        async with joined(slow, Bounds(keepalive_s=60)) as (pool, node):
            ends = set()
            for turns in range(120):
                finished = await cancelled_after(pool, turns)
                ends.add(finished)
                await settled()
                assert pool.open == pool.idle <= 1
            await until(lambda: len(node.live) == pool.idle)
            assert False in ends
            assert await exchange(pool) == b"aaaaa"

    run(scenario())


@pytest.mark.parametrize("when", ["head", "body"])
def test_cancelled_while_the_node_is_silent(run, when):
    async def script(peer: Peer) -> None:
        await peer.request()
        if when == "body":
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, node):
            tasks = [asyncio.ensure_future(exchange(pool)) for _ in range(20)]
            await until(lambda: node.accepted == 20 and pool.open == 20)
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await settled()
            assert (pool.open, pool.idle) == (0, 0)
            await until(lambda: not node.live)
            assert len(asyncio.all_tasks()) <= 2

    run(scenario())


def test_a_read_that_is_given_up_loses_no_bytes(run):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n")
        for _ in range(50):
            await asyncio.sleep(0.003)
            await peer.send(b"a")
        await peer.gone()

    async def scenario():
        async with joined(script) as (pool, _), pool.exchange(post(b""), b"") as answer:
            read = b""
            while len(read) < 50:
                try:
                    async with asyncio.timeout(0.002):
                        read += await answer.read()
                except TimeoutError:
                    continue
            assert read == b"a" * 50
            assert await answer.read() == b""

    run(scenario())
