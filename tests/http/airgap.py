"""Run inside a network namespace of its own: the router starts, counts and serves where nothing can be had."""

import asyncio
import fcntl
import json
import socket
import struct
from time import monotonic

import router.app  # noqa: F401 - reading the code is no part of starting
from router.core.body import read_body
from router.core.call import ENDPOINTS
from tests.fakes import FakeNode
from tests.rig import ask, chat, entry, running_app

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
PROMPT = "The harbour master writes down wind, water and boats. " * 400


async def main() -> None:
    """Print what was seen, as JSON."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))
    with socket.socket() as outside:
        outside.settimeout(1)
        reached = outside.connect_ex(("192.0.2.1", 443)) == 0
    began = monotonic()
    async with FakeNode() as node, running_app({"nodes": [entry(node)]}) as app:
        ready_s = monotonic() - began
        body = chat(PROMPT)
        status = (await ask(app.port, body)).status
        read = read_body(ENDPOINTS["chat/completions"], json.dumps(body).encode())
        counted = await app.inside.tokens.count(read, decide_at=1)
    print(json.dumps({"reached": reached, "ready_s": ready_s, "status": status, "counted": counted}))


if __name__ == "__main__":
    asyncio.run(main())
