"""Calls from web pages, for the origins an operator names.

A preflight is answered here, before any key is asked for: a browser cannot send one with it. Requested headers are
reflected, because `*` does not cover Authorization. Every answer of the app, errors and streams too, carries the
headers that let the page read it.
"""

from collections.abc import Collection
from secrets import token_hex

from router.api.turn import Turn, lines

EXPOSED = (
    b"x-request-id, retry-after, retry-after-ms, x-should-retry, openai-processing-ms, openai-version, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens, "
    b"x-ebbtide-workload, x-ebbtide-reason, x-ebbtide-node, x-ebbtide-queue-ms"
)
_VARY = (b"vary", b"origin")
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
    (b"access-control-max-age", b"600"),
]

Headers = list[tuple[bytes, bytes]]


class Cors:
    """What pages of `origins` may read; they are exact origins, or hold `*` for any."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def greets(self, turn: Turn) -> bool:
        """Give a request's answer its headers; whether it is a preflight, which `answer` answers."""
        asked = dict(turn.headers)
        origin = asked.get(b"origin")
        turn.also = lines([_VARY] if origin is None else self._allowed(origin))
        return origin is not None and turn.method == "OPTIONS" and b"access-control-request-method" in asked

    async def answer(self, turn: Turn) -> None:
        """Answer a preflight."""
        headers = [*_PREFLIGHT, *_reflected(dict(turn.headers)), (b"x-request-id", b"req_" + token_hex(16).encode())]
        turn.also, also = None, turn.also
        turn.begin(204, (also or b"") + lines(headers), None)
        turn.end()

    def _allowed(self, origin: bytes) -> Headers:
        headers = [_VARY]
        if b"*" in self._origins or origin in self._origins:
            headers += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
        return headers


def _reflected(asked: dict[bytes, bytes]) -> Headers:
    wanted = asked.get(b"access-control-request-headers")
    return [] if wanted is None else [(b"access-control-allow-headers", wanted)]
