"""Looks at a node: bounded, plain, and told apart."""

import asyncio
import time

import pytest

from router.errors import ProbeFailed
from router.upstream.client import Client
from tests.upstream.wire import Node, Peer, answering


def reply(body: bytes, status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, extra, len(body), body)


async def test_json_text_and_post():
    seen = []

    async def script(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.send(reply(b'{"a": [1]}'))

    async with Node(script).listening() as node, Client() as client:
        assert await client.get_json(node.url + "/x", headers={"authorization": "Bearer k"}) == {"a": [1]}
        assert await client.get_text(node.url) == '{"a": [1]}'
        assert await client.post_json(node.url, {"b": None}) == {"a": [1]}
        assert b"bearer k" in seen[0][0].lower()
        assert b"accept-encoding: identity" in seen[0][0].lower()
        assert seen[2][1] == b'{"b":null}'


async def test_an_empty_answer_to_a_post_is_none():
    async with Node(answering(reply(b"", b"204 No Content"))).listening() as node, Client() as client:
        assert await client.post_json(node.url, {}) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (reply(b"no", b"503 Busy"), 503),
        (reply(b"", b"302 Found", b"Location: http://127.0.0.1:9/\r\n"), 302),
        (reply(b"not json"), None),
        (reply(b'"' + b"x" * 200 + b'"'), 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + b"x" * 255 + b"\r\n", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: zz\r\n\r\n", None),
        (b"SSH-2.0\r\n\r\n", None),
        (reply(b"[" * 50_000), 200),
    ],
)
async def test_failures_are_told(answer, status):
    async with Node(answering(answer)).listening() as node, Client() as client:
        with pytest.raises(ProbeFailed) as caught:
            await client.get_json(node.url + "/?k=hunter2", headers={"authorization": "hunter2"}, max_bytes=100)
        assert caught.value.status == status
        assert "hunter2" not in str(caught.value)


async def test_deep_json_is_not_json():
    async with Node(answering(reply(b"[" * 50_000))).listening() as node, Client() as client:
        with pytest.raises(ProbeFailed, match="not JSON"):
            await client.get_json(node.url)


async def test_a_trickle_is_bounded_as_a_whole():
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            await peer.send(b"x")
            await asyncio.sleep(0.02)

    async with Node(script).listening() as node, Client() as client:
        began = time.monotonic()
        with pytest.raises(ProbeFailed, match=r"within 0\.2 s"):
            await client.get_text(node.url, timeout_s=0.2)
        assert time.monotonic() - began < 2


async def test_nobody_and_nonsense():
    async with Client() as client:
        for url in ("http://127.0.0.1:1/", "nonsense", "http://[", "ftp://127.0.0.1/"):
            with pytest.raises(ProbeFailed) as caught:
                await client.get_json(url)
            assert caught.value.status is None


async def test_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with Node(answering(reply(b"1"))).listening() as node, Client() as client:
        assert await client.get_json(node.url) == 1
