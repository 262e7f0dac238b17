"""What an operator may do to nodes over HTTP, and see of them beyond what metrics tell.

Rules: with keys set, only a key with `admin` is let in. Without keys, only a router that others cannot reach lets
anybody, and no web page: a browser on the operator's own machine sends an Origin, and is refused for it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.api.auth import Keyring
from router.api.ops import json_response
from router.core.node import Node
from router.errors import BadRequest, Forbidden, NotFound
from router.fleet.fleet import Fleet

__all__ = ["Admin", "Operator"]

BODY_BYTES = 4096


class Operator(Protocol):
    """What may be done to a node, by name. Each raises an Answer where it cannot be."""

    async def drain(self, name: str) -> None: ...
    async def resume(self, name: str) -> None: ...
    async def recycle(self, name: str, *, force: bool = False) -> None: ...


class Ask(msgspec.Struct):
    """The body of a recycle, which may be empty."""

    force: bool = False


class Admin:
    """`/admin/nodes`. `alone` says whether only this machine can reach the router; `clock` is that of the nodes.

    `held` tells what is held of a node beside its state: a diagnosis, why it is due, its last recycle.
    """

    def __init__(
        self,
        fleet: Fleet,
        operator: Operator,
        keyring: Keyring,
        *,
        alone: bool,
        clock: Callable[[], float],
        held: Callable[[Node], Mapping[str, object]],
    ) -> None:
        self._fleet, self._operator, self._keyring = fleet, operator, keyring
        self._alone, self._clock, self._held = alone, clock, held

    def routes(self) -> list[BaseRoute]:
        """Where it answers."""
        return [
            Route("/admin/nodes", self.nodes),
            Route("/admin/nodes/{name}", self.node),
            Route("/admin/nodes/{name}/drain", self.drain, methods=["POST"]),
            Route("/admin/nodes/{name}/resume", self.resume, methods=["POST"]),
            Route("/admin/nodes/{name}/recycle", self.recycle, methods=["POST"]),
        ]

    async def nodes(self, request: Request) -> Response:
        """All nodes."""
        self._let_in(request)
        return json_response({"object": "list", "data": [self._row(node) for node in self._fleet.nodes]})

    async def node(self, request: Request) -> Response:
        """One node."""
        self._let_in(request)
        return self._told(request.path_params["name"])

    async def drain(self, request: Request) -> Response:
        """No new calls for a node."""
        self._let_in(request)
        name = request.path_params["name"]
        await self._operator.drain(name)
        return self._told(name)

    async def resume(self, request: Request) -> Response:
        """A drained node is used again."""
        self._let_in(request)
        name = request.path_params["name"]
        await self._operator.resume(name)
        return self._told(name)

    async def recycle(self, request: Request) -> Response:
        """A node is drained and restarted; 202, because that takes its time."""
        self._let_in(request)
        name = request.path_params["name"]
        await self._operator.recycle(name, force=(await _asked(request)).force)
        return self._told(name, 202)

    def _let_in(self, request: Request) -> None:
        caller = self._keyring.caller(request.scope["headers"])
        if caller.admin:
            return
        if caller.name:
            raise Forbidden("This key may not do that: it needs admin: true in the settings.")
        if not self._alone:
            raise Forbidden("Others can reach this router, and no keys are set: nobody may do that.")
        if "origin" in request.headers:
            raise Forbidden("Without keys no web page may do that.")

    def _told(self, name: str, status: int = 200) -> Response:
        node = self._fleet.by_name.get(name)
        if node is None:
            raise NotFound(f"There is no node {name!r}.", param="name", code="node_not_found")
        return json_response(self._row(node), status)

    def _row(self, node: Node) -> dict[str, object]:
        budget = node.budget
        return {
            "object": "node",
            "name": node.name,
            "url": node.spec.url,
            "pools": sorted(node.spec.pools),
            "engine": node.facts.engine,
            "models": node.models(),
            "state": node.state,
            "cause": node.cause,
            "state_s": max(0.0, round(self._clock() - node.since, 1)) if node.since > 0 else None,
            "running": budget.held().sequences,
            "running_batch": len(budget.batch),
            "trouble": self._fleet.trouble.get(node.name),
            **self._held(node),
        }


async def _asked(request: Request) -> Ask:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES:
            raise BadRequest("The body is over 4096 bytes.")
    if not body.strip():
        return Ask()
    try:
        return msgspec.json.decode(body, type=Ask)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body cannot be read: {error}") from error
