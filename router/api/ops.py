"""What operators and their tools ask: is it alive, can it serve, how is it doing.

None of it needs a key, and none of it tells a secret: models, nodes and counts, never a prompt, a key or a caller.
"""

from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.house import House


def json_response(told: object, status: int = 200) -> Response:
    """`told` as JSON."""
    return Response(msgspec.json.encode(told), status, media_type="application/json")


class Ops:
    """The small pages beside the API."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._index = {
            "service": "ebbtide",
            "version": version("ebbtide"),
            "links": {
                "dashboard": "/dashboard",
                "models": "/v1/models",
                "alive": "/healthz",
                "ready": "/readyz",
                "metrics": "/metrics",
            },
        }

    async def index(self, _: Request) -> Response:
        """What this is."""
        return json_response(self._index)

    async def alive(self, _: Request) -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """A call could be served: a node is usable or there is a relay, and we are not shutting down."""
        ready = self._house.ready()
        told: dict[str, object] = {"status": "ready" if ready else "not ready"}
        if stale := self._house.stale():
            told["stale_discovery"] = stale
        return json_response(told, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """All series, in the text form a scraper asks for."""
        told, kind = self._house.metrics.render(request.headers.get("accept", ""))
        return Response(told, headers={"content-type": kind})
