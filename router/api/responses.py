"""Looking at, stopping and deleting a response made before: sent to the node that has it, and to no other."""

import re
from functools import partial
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from router.api import headers
from router.api.completions import Completions
from router.api.house import House
from router.api.presence import Presence
from router.api.terms import TURN
from router.api.turn import Turn
from router.core.call import Call, Endpoint, Protocol, Reason, Workload
from router.errors import NotFound

BODY_BYTES = 65536
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_LOOKING = Endpoint(path="responses", protocol=Protocol.RESPONSES)


class Responses:
    """ASGI app of `/responses/{id}` (GET, DELETE) and, with `action`, of what follows it (POST)."""

    def __init__(self, house: House, completions: Completions, action: str = "") -> None:
        self._house = house
        self._completions = completions
        self._action = action

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn: Turn = scope["extensions"][TURN]
        await self._completions.serve(partial(self._call, scope), _LOOKING, turn)

    async def _call(self, scope: Scope, endpoint: Endpoint, _turn: Turn, request_id: str, presence: Presence) -> Call:
        house = self._house
        response_id: str = scope["path_params"]["id"]
        caller = house.keyring.caller(scope["headers"])
        body = presence.whole_body(BODY_BYTES)
        if body is None:
            body = await presence.body(BODY_BYTES)
        owner = house.owners.find(caller, response_id) if _ID.fullmatch(response_id) else None
        if owner is None or owner.node not in house.fleet.by_name:
            raise unknown(response_id)
        heading = headers.read(scope["headers"])
        method: str = scope["method"]
        return Call(
            id=request_id,
            endpoint=endpoint,
            model=owner.model,
            body=body,
            prompt_tokens=0,
            output_tokens=0,
            sequences=0,
            workload=Workload.INTERACTIVE,
            reason=Reason.DEFAULT,
            caller=caller.name,
            stream=_streams(scope["query_string"]),
            method="GET" if method == "HEAD" else method,
            path=f"responses/{response_id}{self._action}",
            query=scope["query_string"],
            content_type=heading.content_type or b"application/json",
            headers=heading.passed,
            bound_to=owner.node,
            fallback=False,
        )


def unknown(response_id: str) -> NotFound:
    """The answer for a response that nobody here has."""
    return NotFound(f"Response with id '{response_id[:256]}' not found.", param="response_id")


def _streams(query: bytes) -> bool:
    return parse_qs(query.decode("latin-1")).get("stream", [""])[-1].lower() in ("true", "1")
