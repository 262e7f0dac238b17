"""Everything that speaks HTTP and is not a call: probes, scrapes, hooks. The only module that knows httpx2.

Looks (`get_*`, `post_json`, `lines`) want a 2xx answer; talks (`ask`, `send_file`, `save`) take any and let the caller
judge; `Hooks` tell a stranger something and want to hear a status only.

Rules: one shared client; no redirects, no proxies from the environment; every look is bounded in time and bytes, and
asks for plain bytes so that a small answer cannot unfold into a large one; files are sent and saved in pieces, and only
silence ends that. Failures are told as ProbeFailed, without URL or headers.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import httpx2
import msgspec

from router.errors import HookUnreached, ProbeFailed
from router.upstream.target import verified

__all__ = ["Client", "Hooks", "Said"]

ERROR_BYTES = 2**16
"""So much of an error's body is read where a file was wanted."""
_FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ValueError)
"""What httpx2 raises for a peer; an OSError beside these is of a file of ours."""

#: Whatever JSON can hold.
Json: TypeAlias = Any


class _Bounds(NamedTuple):
    timeout_s: float
    max_bytes: int


class Said(NamedTuple):
    """An answer, whatever its status."""

    status: int
    body: bytes

    @property
    def good(self) -> bool:
        """Whether it is what was asked for."""
        return 200 <= self.status < 300

    @property
    def json(self) -> Json:
        """The body, decoded. Raises ProbeFailed."""
        return _decoded(self.body)


class Client:
    """Bounded GETs and POSTs. Use as an async context manager, or `close` it."""

    __slots__ = ("_http",)

    def __init__(self, *, tls: ssl.SSLContext | None = None, connections: int = 64) -> None:
        self._http = httpx2.AsyncClient(
            verify=tls or verified(),
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

    async def lines(
        self, url: str, *, headers: Mapping[str, str] | None = None, silence_s: float = 60.0, max_bytes: int = 2**20
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a 2xx answer that does not end, as they come; an empty one first, once the answer has begun.

        A line that is cut off at the end is not told. `silence_s` bounds each wait for bytes, `max_bytes` one line.
        Raises ProbeFailed. Close it, or run it to its end.
        """
        with _told():
            async with self._http.stream("GET", url, headers=dict(headers or {}), timeout=silence_s) as response:
                if not response.is_success:
                    raise ProbeFailed(f"status {response.status_code}", response.status_code)
                yield b""
                rest = b""
                async for piece in response.aiter_bytes():
                    *whole, rest = (rest + piece).split(b"\n")
                    if len(rest) > max_bytes or any(len(line) > max_bytes for line in whole):
                        raise ProbeFailed(f"a line is over {max_bytes} bytes", response.status_code)
                    for line in whole:
                        yield line

    async def ask(
        self,
        method: str,
        url: str,
        payload: Json = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> Said:
        """Send JSON, or nothing, and return the whole answer, of any status. Raises ProbeFailed when there is none."""
        options = {} if payload is None else {"json": payload}
        with _told():
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, url, headers=dict(headers or {}), timeout=timeout_s, **options) as response,
            ):
                return Said(response.status_code, await _bounded(response, 2**24))

    async def send_file(
        self,
        url: str,
        file: Path,
        fields: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        silence_s: float = 60.0,
    ) -> Said:
        """Send a file, piece by piece, as the `file` of a form. The answer may have any status. Raises ProbeFailed."""
        with file.open("rb") as source, _told(failures=_FAILURES):
            form = {"file": (file.name, source, "application/octet-stream")}
            async with self._http.stream(
                "POST", url, headers=dict(headers or {}), data=dict(fields), files=form, timeout=silence_s
            ) as response:
                return Said(response.status_code, await _bounded(response, 2**24))

    async def save(
        self, url: str, sink: BinaryIO, *, headers: Mapping[str, str] | None = None, silence_s: float = 60.0
    ) -> Said:
        """Write the body of a 2xx answer into `sink` as it comes (and leave it empty in what is returned).

        Any other answer is returned whole. Raises ProbeFailed.
        """
        with _told(failures=_FAILURES):
            async with self._http.stream("GET", url, headers=dict(headers or {}), timeout=silence_s) as response:
                if not response.is_success:
                    return Said(response.status_code, await _bounded(response, ERROR_BYTES))
                async for piece in response.aiter_bytes():
                    sink.write(piece)
                return Said(response.status_code, b"")

    async def _fetch(
        self, method: str, url: str, headers: Mapping[str, str] | None, content: bytes | None, bounds: _Bounds
    ) -> bytes:
        fields = dict(headers or {})
        if content is not None:
            fields.setdefault("content-type", "application/json")
        with _told(bounds.timeout_s):
            # httpx2 bounds each read; a server that trickles would hold us for ever.
            async with (
                asyncio.timeout(bounds.timeout_s),
                self._http.stream(method, url, headers=fields, content=content, timeout=bounds.timeout_s) as response,
            ):
                if not response.is_success:
                    raise ProbeFailed(f"status {response.status_code}", response.status_code)
                return await _bounded(response, bounds.max_bytes)


class Hooks:
    """POSTs to addresses somebody else has judged. `close` it at the end.

    No connection is used twice: what is open to an address was opened for one host's certificate and not for another's.
    """

    __slots__ = ("_http",)

    def __init__(self, *, tls: ssl.SSLContext | None = None, connections: int = 64) -> None:
        self._http = httpx2.AsyncClient(
            verify=tls or verified(),
            trust_env=False,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=0),
            headers={"accept-encoding": "identity", "user-agent": "ebbtide", "connection": "close"},
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def post(
        self, url: str, name: str, content: bytes, *, headers: Mapping[str, str], bounds_s: tuple[float, float]
    ) -> int:
        """Send `content` to the address in `url` and return the status; the answer's body is left unread.

        `name` is whom a certificate must be for. `bounds_s`: for the connection, for all.
        Raises ProbeFailed, as HookUnreached while nothing was sent.
        """
        connect_s, whole_s = bounds_s
        with _told(whole_s):
            try:
                async with (
                    asyncio.timeout(whole_s),
                    self._http.stream(
                        "POST",
                        url,
                        content=content,
                        headers=dict(headers),
                        timeout=httpx2.Timeout(whole_s, connect=connect_s),
                        extensions={"sni_hostname": name},
                    ) as response,
                ):
                    return response.status_code
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
                raise HookUnreached(f"no connection: {type(exc).__name__}") from exc


@contextmanager
def _told(
    within_s: float | None = None, failures: tuple[type[Exception], ...] = (*_FAILURES, OSError)
) -> Iterator[None]:
    """Failures in our words. `within_s` is the bound of the whole answer."""
    try:
        yield
    except TimeoutError as exc:
        bound = "in time" if within_s is None else f"within {within_s:g} s"
        raise ProbeFailed(f"no whole answer {bound}") from exc
    except failures as exc:
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
