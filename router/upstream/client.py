"""Everything that speaks HTTP and is not a call: probes, scrapes, hooks. The only module that knows httpx2.

Rules: one shared client; no redirects, no proxies from the environment; every look is bounded in time and bytes, and
asks for plain bytes so that a small answer cannot unfold into a large one. Failures are told as ProbeFailed, without
URL or headers.
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import httpx2
import msgspec

from router.errors import ProbeFailed

__all__ = ["Client"]

#: Whatever JSON can hold.
Json: TypeAlias = Any


class _Bounds(NamedTuple):
    timeout_s: float
    max_bytes: int


class Client:
    """Bounded GETs and POSTs. Use as an async context manager, or `close` it."""

    __slots__ = ("_http",)

    def __init__(self, *, tls: ssl.SSLContext | None = None, connections: int = 64) -> None:
        self._http = httpx2.AsyncClient(
            verify=tls or True,
            trust_env=False,
            follow_redirects=False,
            limits=httpx2.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=4.0
            ),
            headers={"accept-encoding": "identity", "user-agent": "ebbtide"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def get_json(
        self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0, max_bytes: int = 2**20
    ) -> Json:
        """The decoded JSON of a 2xx answer. Raises ProbeFailed."""
        return _decoded(await self._fetch("GET", url, headers, None, _Bounds(timeout_s, max_bytes)))

    async def get_text(
        self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 2.0, max_bytes: int = 4 * 2**20
    ) -> str:
        """The text of a 2xx answer, read as UTF-8. Raises ProbeFailed."""
        return (await self._fetch("GET", url, headers, None, _Bounds(timeout_s, max_bytes))).decode("utf-8", "replace")

    async def post_json(
        self,
        url: str,
        payload: Json,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 2.0,
        max_bytes: int = 2**20,
    ) -> Json:
        """Send JSON and return the decoded JSON of a 2xx answer (None if it is empty). Raises ProbeFailed."""
        body = await self._fetch("POST", url, headers, msgspec.json.encode(payload), _Bounds(timeout_s, max_bytes))
        return _decoded(body) if body.strip() else None

    async def _fetch(
        self, method: str, url: str, headers: Mapping[str, str] | None, content: bytes | None, bounds: _Bounds
    ) -> bytes:
        fields = dict(headers or {})
        if content is not None:
            fields.setdefault("content-type", "application/json")
        try:
            # httpx2 bounds each read; a server that trickles would hold us for ever.
            async with (
                asyncio.timeout(bounds.timeout_s),
                self._http.stream(method, url, headers=fields, content=content, timeout=bounds.timeout_s) as response,
            ):
                if not response.is_success:
                    raise ProbeFailed(f"status {response.status_code}", response.status_code)
                return await _bounded(response, bounds.max_bytes)
        except TimeoutError as exc:
            raise ProbeFailed(f"no whole answer within {bounds.timeout_s:g} s") from exc
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError) as exc:
            raise ProbeFailed(f"no answer: {type(exc).__name__}") from exc


async def _bounded(response: httpx2.Response, limit: int) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > limit:
            raise ProbeFailed(f"the answer is over {limit} bytes", response.status_code)
    return bytes(body)


def _decoded(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProbeFailed("the answer is not JSON") from exc
