"""A real nginx with its stock buffering in front of the router: streams pass as they come (B14)."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fakes import Script
from tests.rig import ask, chat, eventually, stream
from tests.rig.routers import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = """
daemon off; master_process off; worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{router}; }}
        location /1.1/ {{ proxy_pass http://127.0.0.1:{router}/; proxy_http_version 1.1; }}
    }}
}}
"""
GAP_S = 0.25
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@asynccontextmanager
async def nginx(router: int, home: Path) -> AsyncIterator[int]:
    """The port of an nginx that passes everything on to the router."""
    assert NGINX is not None
    port, config = free_port(), home / "nginx.conf"
    config.write_text(CONFIG.format(home=home, port=port, router=router))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(home), "-e", str(home / "error.log"), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually(lambda: _listens(port), within=10)
        yield port
    finally:
        process.terminate()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def gaps(reply) -> list[float]:
    times = [event.at for event in reply.events]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("before", ["", "/1.1"])
async def test_events_and_comments_pass_nginx_one_by_one(rig, tmp_path, before):
    """Its own HTTP/1.0 towards the router, and 1.1."""
    await rig.node(script=Script(ttft=0.7, gap=GAP_S, n=4))
    app = await rig.router(server={"heartbeat_s": 0.3})
    async with nginx(app.port, tmp_path) as port:
        reply = await ask(port, stream(), f"{before}/v1/chat/completions")
        assert (reply.status, reply.clean, reply.text) == (200, True, "tok0 tok1 tok2 tok3")
        assert reply.events[0].comment
        assert reply.ended_at - reply.events[0].at > 2 * GAP_S
        assert sum(gap > GAP_S / 2 for gap in gaps(reply)) >= 2
        assert (await ask(port, chat(), f"{before}/v1/chat/completions")).status == 200
