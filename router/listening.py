"""Where clients come in: the socket, and uvicorn with a connection of ours."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from router.api.front import Front
from router.api.protocol import FrontProtocol
from router.errors import SettingsError
from router.settings import Settings
from router.settings.sections import Server as ServerSettings

__all__ = ["Server", "config", "listen"]


class Server(uvicorn.Server):
    """uvicorn without its own signals; `listening` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The composition root decides what signals mean."""
        yield


def listen(settings: Settings) -> socket.socket:
    """The socket clients come to. Raises SettingsError."""
    host, port = settings.server.host.strip("[]"), settings.server.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(f"server: cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def config(front: Front, server: ServerSettings) -> uvicorn.Config:
    """How uvicorn serves it."""

    class Bounded(FrontProtocol):
        head_limit = server.header_bytes

    return uvicorn.Config(
        front,
        http=Bounded,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=server.keepalive_s,
    )
