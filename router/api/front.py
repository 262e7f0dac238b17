"""Where a request goes. The few paths that carry the load are found by one look-up; all else goes through Starlette.

Rules: every path works with and without `/v1` and with a trailing slash, and none redirects; every answer carries
exactly one `x-request-id`; every refusal has the one error shape.
"""

from collections.abc import Coroutine, Sequence
from os import urandom
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Scope

from router.api import errors
from router.api.completions import Completions
from router.api.cors import Cors
from router.api.house import House
from router.api.models import Models
from router.api.ops import Ops
from router.api.responses import Responses
from router.api.turn import Turn
from router.core.call import ENDPOINTS, Endpoint
from router.errors import Answer, BadRequest, Internal, MethodNotAllowed, UnknownUrl

_VERSION = "/v1"
log = structlog.get_logger()


class Front:
    """Everything a client can reach. `routes` are those of other rooms, without `/v1`."""

    def __init__(self, house: House, routes: Sequence[BaseRoute] = ()) -> None:
        self._completions = Completions(house)
        self._hot = _hot_paths()
        self._router = Router([*_routes(house, self._completions), *routes], redirect_slashes=False)
        origins = house.terms.cors_origins
        self._cors = Cors(origins) if origins else None

    def __call__(self, turn: Turn) -> Coroutine[Any, Any, None]:
        """What answers a request; await it."""
        if self._cors is not None and self._cors.greets(turn):
            return self._cors.answer(turn)
        endpoint = self._hot.get(turn.path)
        if endpoint is not None and turn.method == "POST":
            return self._completions.serve(self._completions.read, endpoint, turn)
        return self._rest(endpoint, turn)

    async def _rest(self, endpoint: Endpoint | None, turn: Turn) -> None:
        scope, send = turn.scope, Named(turn)
        try:
            if endpoint is not None:
                raise HTTPException(405, headers={"allow": "POST"})
            await self._router({**scope, "path": _plain(scope["path"]), "app": self}, turn.receive, send)
        except HTTPException as refusal:
            if refusal.status_code == 405 and scope["method"] == "OPTIONS":
                await send.answer(204, _allow(refusal), b"")
            else:
                await send.refuse(_answer(refusal, scope), _allow(refusal))
        except Answer as answer:
            await send.refuse(answer)
        except Exception:
            log.error("request failed through a fault of ours", exc_info=True)
            await send.refuse(Internal("The router failed to serve this request."))


class Named:
    """`send` that gives every answer its `x-request-id` and can tell refusals."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            if all(name != b"x-request-id" for name, _ in headers):
                message["headers"] = [*headers, (b"x-request-id", b"req_" + urandom(16).hex().encode())]
        await self._turn.send(message)

    async def answer(self, status: int, headers: errors.Headers, body: bytes) -> None:
        """A whole answer."""
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, answer: Answer, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Tell an error, unless an answer has begun: then the connection ends inside it."""
        if not self._turn.started:
            body = errors.body(answer, anthropic=False)
            await self.answer(answer.status, [*errors.headers(answer, len(body)), *headers], body)


def _hot_paths() -> dict[str, Endpoint]:
    """Each endpoint under every spelling of its path."""
    named = {**ENDPOINTS, "v2/rerank": ENDPOINTS["rerank"]}
    bare = {f"/{name}": endpoint for name, endpoint in named.items()}
    return {
        spelling: endpoint
        for path, endpoint in bare.items()
        for spelling in (path, f"{path}/", f"{_VERSION}{path}", f"{_VERSION}{path}/")
    }


def _plain(path: str) -> str:
    """A path without version and trailing slash."""
    path = path.rstrip("/")
    if path == _VERSION or path.startswith(f"{_VERSION}/"):
        path = path[len(_VERSION) :]
    return path or "/"


def _routes(house: House, completions: Completions) -> list[BaseRoute]:
    ops, models = Ops(house), Models(house)
    return [
        Route("/", ops.index),
        *(Route(path, ops.alive) for path in ("/healthz", "/health", "/livez")),
        Route("/readyz", ops.ready),
        Route("/metrics", ops.metrics),
        Route("/models", models.listed),
        Route("/models/{id:path}", models.one),
        Route("/responses/{id}", Responses(house, completions), methods=["GET", "DELETE"]),
        Route("/responses/{id}/cancel", Responses(house, completions, "/cancel"), methods=["POST"]),
    ]


def _answer(refusal: HTTPException, scope: Scope) -> Answer:
    method, path = scope["method"], scope["path"][:512]
    match refusal.status_code:
        case 404:
            return UnknownUrl(f"Invalid URL ({method} {path})")
        case 405:
            return MethodNotAllowed(f"Not allowed to {method} on {path}.")
        case _:
            return BadRequest(str(refusal.detail))


def _allow(refusal: HTTPException) -> errors.Headers:
    return [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
