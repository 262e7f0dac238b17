"""The models there are: those of the nodes and those the relay may answer for.

Names of models are no secret, and load balancers and readiness checks ask for them without a key: a list is shown to
who shows no key at all. A key that is shown must be right, because clients test theirs this way.
"""

from starlette.requests import Request
from starlette.responses import Response

from router.api.auth import presented
from router.api.house import House
from router.api.ops import json_response
from router.errors import ModelNotFound


class Models:
    """`/models` and `/models/{id}`; an id may hold slashes, written plainly or as %2F."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def listed(self, request: Request) -> Response:
        """Every model, in one page."""
        return json_response({"object": "list", "data": self._cards(request)})

    async def one(self, request: Request) -> Response:
        """One model, by its public name."""
        wanted: str = request.path_params["id"]
        for card in self._cards(request):
            if card["id"] == wanted:
                return json_response(card)
        message = f"The model '{wanted[:512]}' does not exist or you do not have access to it."
        raise ModelNotFound(message, param="model")

    def _cards(self, request: Request) -> list[dict[str, object]]:
        if presented(request.headers.raw) is not None:
            self._house.keyring.caller(request.headers.raw)
        return self._house.fleet.model_cards(self._house.relay_models)
