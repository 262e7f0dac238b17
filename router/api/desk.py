"""Where files and batches are asked for: what the desk needs, who stands at it, and how what goes wrong is told.

Rules: who calls is judged before a byte of the body is read; a body is read with a bound on its size and on every wait
for it; another caller's id is an unknown id; trouble of the store is 503 or 507, never 500.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.api import errors, headers
from router.api.auth import Keyring
from router.api.headers import Heading
from router.api.terms import Terms
from router.core.job import BatchState
from router.core.wellformed import not_json
from router.errors import (
    Answer,
    BadRequest,
    ClientLeft,
    Conflict,
    InsufficientStorage,
    Overloaded,
    RequestTimeout,
    StoreError,
    StoreFull,
    TooLarge,
    UnsupportedContentType,
)
from router.jobs.store import BatchRow, Store

JSON_BYTES = 2**20
"""Most bytes of a JSON body here; an upload of 20,000 parts stays under it."""
LINGER_S, LINGER_BYTES = 5.0, 512 * 2**20
"""How long and how much is read of a body that was refused, so that its sender sees the refusal."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What one caller may hold. None is without limit."""

    files: int | None = None
    bytes: int | None = None
    batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Sizes in bytes; `batch_file_s` is how long a batch's input, `output_s` how long its result files are kept when
    nobody says.
    """

    file_bytes: int = 512 * 2**20
    batch_file_bytes: int = 200 * 2**20
    part_bytes: int = 64 * 2**20
    batch_file_s: int | None = 2_592_000
    output_s: int | None = 2_592_000


def no_webhooks(_caller: str, url: str | None) -> None:
    """Nobody is told when a batch ends, and who asks for it hears so."""
    if url is not None:
        raise BadRequest("This router sends no webhooks.", param="webhook", code="invalid_value")


def waits(batch: BatchRow, running: int) -> str | None:
    """Why a batch waits of which `running` lines run, as far as its row tells; None when it does not."""
    if batch.state is BatchState.VALIDATING:
        return "Its lines are being checked."
    return batch.waiting if batch.state is BatchState.IN_PROGRESS and not running else None


@dataclass(kw_only=True, eq=False)
class Desk:
    """What files, uploads and batches need. `terms` may be replaced; requests that come after see it.

    `quota` is asked by caller; `webhook` with a caller and the URL a batch names (or None): the URL to tell, or None;
    it raises BadRequest for one that is not allowed; `waits` with a batch and how many of its lines run: why it waits.
    `clock` is unix seconds.
    """

    store: Store
    keyring: Keyring
    terms: Terms
    clock: Callable[[], float]
    bounds: Bounds = Bounds()
    quota: Callable[[str], Quota] = lambda _: Quota()
    webhook: Callable[[str, str | None], str | None] = no_webhooks
    waits: Callable[[BatchRow, int], str | None] = waits

    def route(self, path: str, **answers: "Serving") -> Route:
        """A path (without version) and what answers each method."""
        return Route(path, partial(_serve, self, answers), methods=list(answers))


class Visit:
    """One request at the desk. `caller` is the name of who was let in; `id` is the id in the path."""

    caller = ""

    def __init__(self, request: Request, body_s: float) -> None:
        self._request, self._body_s = request, body_s
        self.id: str = request.path_params.get("id", "")
        self.heading: Heading = headers.read(request.headers.raw)
        self.unread = self.heading.content_length != 0 and request.method == "POST"

    @property
    def query(self) -> dict[str, str]:
        """The query's fields, the last of each name."""
        return dict(parse_qsl(self._request.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def header(self, name: str) -> str | None:
        """One header, as text."""
        return self._request.headers.get(name)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UnsupportedContentType, RequestTimeout, ClientLeft."""
        if self.heading.encoded:
            raise UnsupportedContentType("Compressed request bodies are not read. Send it without Content-Encoding.")
        while self.unread:
            try:
                async with asyncio.timeout(self._body_s):
                    message = await self._request.receive()
            except TimeoutError:
                late = f"No part of the request body came for {self._body_s:g} seconds."
                raise RequestTimeout(late) from None
            if message["type"] == "http.disconnect":
                raise ClientLeft
            self.unread = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    async def told(self) -> Mapping[str, Any]:
        """The body as a JSON object. Raises BadRequest, TooLarge, UnsupportedContentType."""
        kind = self.heading.content_type.partition(b";")[0].strip().lower()
        if kind != b"application/json" and self.unread:
            raise UnsupportedContentType("Unsupported content type. This path reads 'application/json'.")
        body = await self.body()
        try:
            told = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise not_json("it is not valid JSON" if body else "it is empty") from None
        if type(told) is not dict:
            raise BadRequest("The body must be a JSON object.")
        return told

    async def body(self) -> bytes:
        """The whole of a short body. Raises TooLarge."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > JSON_BYTES:
                raise TooLarge(f"The request body is larger than {JSON_BYTES} bytes.")
        return bytes(body)


class Serving(Protocol):
    """Answers one visit."""

    async def __call__(self, visit: Visit) -> Response:
        """The answer."""


class _Silence(Response):
    """Nobody is there to be told anything."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class Refusal(Response):
    """An error, told before the body has come: what still comes is thrown away, and the connection ends."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(errors.body(answer, anthropic=False), answer.status)
        self.raw_headers = [*errors.headers(answer, len(self.body)), (b"connection", b"close")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            size = 0
            while size < LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return


async def _serve(desk: Desk, answers: Mapping[str, Serving], request: Request) -> Response:
    visit = Visit(request, desk.terms.body_s)
    try:
        visit.caller = desk.keyring.caller(request.headers.raw).name
        return await answers["GET" if request.method == "HEAD" else request.method](visit)
    except ClientLeft:
        return _Silence()
    except (Answer, StoreError) as trouble:
        refusal = _meaning(trouble)
        if visit.unread:
            return Refusal(refusal)
        raise refusal from trouble


def _meaning(trouble: Answer | StoreError) -> Answer:
    """What a caller is told of it."""
    match trouble:
        case Conflict():
            return Conflict(trouble.message, param=trouble.param, code=trouble.code, retry=False)
        case Answer():
            return trouble
        case StoreFull():
            full = "The router's disk is full. Delete files you no longer need, or tell its operator."
            return InsufficientStorage(full, retry=False)
        case _:
            return Overloaded("The router's database does not answer. Try again.", retry_after_s=2)
