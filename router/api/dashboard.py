"""`/dashboard`: the page an operator opens at night, the stream it lives on, and what may be done from it.

Rules:
- The page and its files are open: they tell nothing. Facts need a key when keys are set; who is not an administrator
  sees of batches and callers their own. Doing something needs an administrator's key, whatever is set.
- The key comes in a header, never in an address. There is no cookie, so no other page can act in a reader's name.
- What is done is told in the log and in the events, with who did it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.api.assets import Assets
from router.api.auth import ANYBODY, Caller, Keyring
from router.api.board import Board, Sources, Told, Wish
from router.api.feeds import EVERY_S, Feeds
from router.api.ops import json_response
from router.core.events import Topic
from router.errors import Answer, BadRequest, Forbidden, NotFound, Overloaded, StoreError

MOST_WORD = 256
"""Most characters of one word of a wish."""

T = TypeVar("T")

log = structlog.get_logger()


class Operator(Protocol):
    """Who can take a node out of service and bring it back. Each raises an Answer when it cannot be done now."""

    async def drain(self, name: str) -> None:
        """Send it no new calls; what runs ends."""

    async def resume(self, name: str) -> None:
        """Send it calls again."""

    async def recycle(self, name: str) -> None:
        """Drain it, start it anew, bring it back."""


class Dashboard:
    """The page, its stream, its actions. `run` it until cancelled; `close` ends the streams."""

    def __init__(self, sources: Sources, keyring: Keyring, operator: Operator) -> None:
        self._from, self._keyring, self._operator = sources, keyring, operator
        self._assets = Assets()
        self.feeds = Feeds(lambda wish: Board(sources, wish), sources.wall)
        if sources.lookout is not None:
            sources.lookout.watched = lambda: self.feeds.readers > 0

    def routes(self) -> list[BaseRoute]:
        """Paths without version."""
        asked: list[BaseRoute] = [
            Route("/dashboard", self._page),
            Route("/dashboard/static/{version}/{name:path}", self._file),
            Route("/dashboard/events", self._events),
            Route("/dashboard/snapshot", self._snapshot),
        ]
        if self._from.lookout is not None:
            asked.append(Route("/dashboard/batches/{id}", self._lines))
            asked.append(Route("/dashboard/batches/{id}/cancel", self._cancel, methods=["POST"]))
        return [*asked, Route("/dashboard/nodes/{name}/{act}", self._operate, methods=["POST"])]

    async def run(self) -> None:
        """Look once a second: at who waits, and for changes if somebody reads."""
        source = self._from
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                source.history.look(source.admission.waiters())
                await self.feeds.look()
            except Exception:
                log.error("the dashboard failed through a fault of ours", exc_info=True)

    def renew(self) -> None:
        """Keys have changed: whoever looks has to show theirs again."""
        self.feeds.renew()

    def close(self) -> None:
        """End every stream."""
        self.feeds.close()

    async def _page(self, request: Request) -> Response:
        return self._assets.page(request)

    async def _file(self, request: Request) -> Response:
        return self._assets.file(request, request.path_params["version"], request.path_params["name"])

    async def _events(self, request: Request) -> Response:
        caller = self._keyring.caller(request.headers.raw)
        if self._from.lookout is not None:
            self._from.lookout.wake()
        return await self.feeds.open(_wish(request, caller), self._hello(caller))

    async def _snapshot(self, request: Request) -> Response:
        caller = self._keyring.caller(request.headers.raw)
        if self._from.lookout is not None:
            self._from.lookout.wake()
        told = {**await self.feeds.once(_wish(request, caller)), **self._hello(caller)}
        response = json_response(told)
        response.headers["cache-control"] = "no-store"
        return response

    async def _lines(self, request: Request) -> Response:
        caller, lookout = self._keyring.caller(request.headers.raw), self._from.lookout
        assert lookout is not None
        batch = request.path_params["id"]
        only = _only(caller)
        lines = None
        if only is None or any(row.id == batch and row.caller == only for row in lookout.overview.batches):
            lines = await _ask(lookout.lines(batch))
        if lines is None:
            raise NotFound(f"No batch found with id '{batch[:128]}'.")
        return json_response(msgspec.to_builtins(lines))

    async def _cancel(self, request: Request) -> Response:
        caller, lookout = self._administrator(request), self._from.lookout
        assert lookout is not None
        batch = request.path_params["id"]
        if not await _ask(lookout.cancel(batch)):
            raise NotFound(f"No batch found with id '{batch[:128]}'.")
        self._done(caller, f"cancelled {batch}")
        return json_response({"done": True})

    async def _operate(self, request: Request) -> Response:
        caller, operator = self._administrator(request), self._operator
        name, act = request.path_params["name"], request.path_params["act"]
        acts: dict[str, Callable[[str], Awaitable[None]]] = {
            "drain": operator.drain,
            "resume": operator.resume,
            "recycle": operator.recycle,
        }
        if act not in acts or name not in self._from.fleet.by_name:
            raise NotFound(f"No node '{name[:128]}', or nothing that is called '{act[:32]}' can be done with it.")
        await acts[act](name)
        self._done(caller, f"asked to {act} node {name}", node=name)
        return json_response({"done": True})

    def _done(self, caller: Caller, what: str, *, node: str = "") -> None:
        log.info("done from the dashboard", caller=caller.name, what=what)
        self._from.events.add(Topic.OPERATOR, f"{caller.name} {what}", node=node)

    def _administrator(self, request: Request) -> Caller:
        caller = self._keyring.caller(request.headers.raw)
        if not caller.admin:
            raise Forbidden("This needs the key of an administrator: one with admin: true in the settings.")
        return caller

    def _hello(self, caller: Caller) -> Told:
        acts = ["drain", "resume", "recycle"]
        if self._from.lookout is not None:
            acts.insert(0, "cancel")
        you = {
            "name": caller.name,
            "keys": caller is not ANYBODY,
            "admin": caller.admin,
            "sees_all": _only(caller) is None,
            "acts": acts if caller.admin else [],
        }
        return {"you": you, "assets": self._assets.version}


def _only(caller: Caller) -> str | None:
    return None if caller.admin or caller is ANYBODY else caller.name


def _wish(request: Request, caller: Caller) -> Wish:
    said = {name: request.query_params.get(name, "") for name in ("model", "pool", "node", "key")}
    long = next((name for name, value in said.items() if len(value) > MOST_WORD), None)
    if long is not None:
        raise BadRequest(f"'{long}' has over {MOST_WORD} characters.", param=long, code="invalid_value")
    only = _only(caller)
    if only is not None and said["key"] not in ("", only):
        raise Forbidden("You may look at your own key's calls only.", param="key")
    return Wish(**said, only=only)


async def _ask(asked: Awaitable[T]) -> T:
    """What the store says. Raises Overloaded when it does not answer."""
    try:
        return await asked
    except Answer:
        raise
    except StoreError as error:
        raise Overloaded("The router's database does not answer. Try again.", retry_after_s=2) from error
