"""The same over TLS, with an authority made for the test."""

import asyncio
import ssl
from pathlib import Path

import pytest

from router.errors import ConnectFailed, Truncated
from router.upstream.client import Client
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target, verified
from tests.rig.tls import authority
from tests.upstream.wire import GET, OK, Peer, answering, joined, once, post, settled, until

BIG = b"x" * 2_000_000


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A CA, and a certificate it signed for 127.0.0.1."""
    return authority(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def node_tls(house) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(house / "node.pem", house / "node.key")
    return context


@pytest.fixture
def our_tls(house) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=house / "ca.pem")


async def whole(pool: Pool, body: bytes = b"") -> bytes:
    async with pool.exchange(post(body), body) as answer:
        return await answer.all(2**24)


def test_exchanges_and_reuse(run, node_tls, our_tls):
    async def script(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    async def scenario():
        async with joined(script, server_tls=node_tls, client_tls=our_tls) as (pool, node):
            for body in (b"small", BIG, b""):
                assert await whole(pool, body) == body
            assert node.accepted == 1
            assert (pool.open, pool.idle) == (1, 1)

    run(scenario())


def test_looks_and_calls_trust_the_authorities_of_the_system(run, node_tls, house, monkeypatch):
    """One that an operator adds to them is known to both."""
    monkeypatch.setenv("SSL_CERT_FILE", str(house / "ca.pem"))
    verified.cache_clear()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    async def scenario():
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=node_tls) as server, Client() as client:
            target = Target.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            assert await client.get_json(target.url("models")) == {}
            pool = Pool(target, Bounds(connect_s=2, first_byte_s=2, idle_s=2))
            assert await whole(pool) == b"{}"
            await pool.close()

    try:
        run(scenario())
    finally:
        verified.cache_clear()


def test_an_unknown_authority_is_refused(run, node_tls):
    async def scenario():
        async with joined(answering(OK), server_tls=node_tls) as (pool, _):
            with pytest.raises(ConnectFailed, match="certificate"):
                await whole(pool)
            await settled()
            assert pool.open == 0

    run(scenario())


def test_a_plain_server_is_refused(run, our_tls):
    async def script(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    async def scenario():
        async with joined(script) as (_, node):
            pool = Pool(Target.parse(f"https://127.0.0.1:{node.port}", tls=our_tls), Bounds())
            with pytest.raises(ConnectFailed):
                await whole(pool)
            assert pool.open == 0
            await pool.close()

    run(scenario())


def test_a_silent_handshake_is_bounded(run, our_tls):
    async def scenario():
        async with joined(lambda peer: peer.gone()) as (_, node):
            pool = Pool(Target.parse(f"https://127.0.0.1:{node.port}", tls=our_tls), Bounds(connect_s=0.1))
            with pytest.raises(ConnectFailed):
                await whole(pool)
            await until(lambda: not node.live)
            assert pool.open == 0
            await pool.close()

    run(scenario())


def test_a_cut_is_truncated(run, node_tls, our_tls):
    async def scenario():
        cut = once(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
        async with joined(cut, server_tls=node_tls, client_tls=our_tls) as (pool, _):
            with pytest.raises(Truncated):
                await whole(pool)
            await settled()
            assert pool.open == 0

    run(scenario())


def test_leaving_early_aborts(run, node_tls, our_tls):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n", b"a")
        await peer.gone()

    async def scenario():
        async with joined(script, server_tls=node_tls, client_tls=our_tls) as (pool, node):
            async with pool.exchange(GET) as answer:
                assert await answer.read() == b"a"
            await until(lambda: pool.open == 0 and not node.live)

    run(scenario())


def test_cancelled_after_any_number_of_turns(run, node_tls, our_tls):
    async def scenario():
        async with joined(answering(OK), server_tls=node_tls, client_tls=our_tls) as (pool, node):
            for turns in range(40):
                task = asyncio.ensure_future(whole(pool, BIG))
                await settled(turns)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda: pool.open == pool.idle == len(node.live))
            assert await whole(pool) == b"ok"

    run(scenario())
