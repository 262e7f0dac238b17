"""Calls from web pages, for the origins an operator names.

A preflight is answered here, before any key is asked for: a browser cannot send one with it. Requested headers are
reflected, because `*` does not cover Authorization. Every answer of the app, errors and streams too, carries the
headers that let the page read it.
"""

from collections.abc import Collection
from os import urandom

from starlette.types import ASGIApp, Message, Receive, Scope, Send

EXPOSED = (
    b"x-request-id, retry-after, retry-after-ms, x-should-retry, openai-processing-ms, openai-version, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens, "
    b"x-ebbtide-workload, x-ebbtide-reason, x-ebbtide-node, x-ebbtide-queue-ms"
)
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
    (b"access-control-max-age", b"600"),
]

Headers = list[tuple[bytes, bytes]]


class Cors:
    """ASGI app around another. `origins` are exact origins, or hold `*` for any."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])
        origin = asked.get(b"origin")
        if origin is not None and scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
            await _answer(send, 204, [*self._allowed(origin), *_PREFLIGHT, *_reflected(asked)])
            return
        told = [(b"vary", b"origin")] if origin is None else self._allowed(origin)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*_without_cors(message["headers"]), *told]
            await send(message)

        await self._app(scope, receive, tell)

    def _allowed(self, origin: bytes) -> Headers:
        headers = [(b"vary", b"origin")]
        if b"*" in self._origins or origin in self._origins:
            headers += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
        return headers


def _reflected(asked: dict[bytes, bytes]) -> Headers:
    wanted = asked.get(b"access-control-request-headers")
    return [] if wanted is None else [(b"access-control-allow-headers", wanted)]


def _without_cors(headers: Headers) -> Headers:
    """A node's or relay's own permission is not ours."""
    return [pair for pair in headers if not pair[0].startswith(b"access-control-")]


async def _answer(send: Send, status: int, headers: Headers) -> None:
    headers = [*headers, (b"x-request-id", b"req_" + urandom(16).hex().encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
