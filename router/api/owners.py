"""Responses live in the memory of the node that made them, so whatever names one goes to that node.

Rules: who made a response and for which caller is remembered for the last `KEPT` of them; an id that is unknown,
another caller's, or of a node that is gone is a 404. A call that continues an earlier response is bound to its node and
carries the earlier one's tokens as hidden context.
"""

import re
from collections import OrderedDict

import msgspec

from router.api.auth import Caller
from router.core.body import Body
from router.core.call import Call
from router.dispatch.reply import Reply
from router.errors import NotFound

KEPT = 100_000
"""Responses remembered: about 40 MB."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]')
_FASTER = frozenset(("fast", "ultrafast"))


class Owner(msgspec.Struct):
    """Where a response lives. `tokens` is what continuing it puts before the new prompt."""

    node: str
    model: str
    caller: str
    tokens: int = 0


class Owners:
    """The node of each response seen, oldest forgotten first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, call: Call, reply: Reply) -> None:
        """Remember the response a reply brings, and its tokens once they are known; forget one that was deleted."""
        if reply.response_id is None or reply.status >= 400:
            return
        if call.method == "DELETE":
            self._owners.pop(reply.response_id, None)
            return
        owner = self._owners.get(reply.response_id)
        if owner is None:
            owner = self._owners[reply.response_id] = Owner(reply.node, call.model, call.caller)
            if len(self._owners) > self._kept:
                self._owners.popitem(last=False)
        usage = reply.trip.counted()
        if usage is not None:
            owner.tokens = usage.prompt + usage.completion

    def forget(self, node: str) -> None:
        """A node is gone, and the responses in it."""
        for response_id in [known for known, owner in self._owners.items() if owner.node == node]:
            del self._owners[response_id]

    def find(self, caller: Caller, response_id: str) -> Owner | None:
        """The owner of a caller's own response."""
        owner = self._owners.get(response_id)
        if owner is None or owner.caller != caller.name:
            return None
        self._owners.move_to_end(response_id)
        return owner

    def earlier(self, caller: Caller, body: Body) -> Owner | None:
        """The owner of the response that `body` continues, None when it continues none. Raises NotFound."""
        previous = body.previous_response_id
        if previous is None:
            return None
        owner = self.find(caller, previous)
        if owner is None:
            raise NotFound(f"Previous response with id '{previous[:256]}' not found.", param="previous_response_id")
        return owner


def with_known_tier(raw: bytes, body: Body) -> bytes:
    """The same body with a `service_tier` that vLLM refuses on this path replaced by `priority`, and nothing else."""
    if body.service_tier not in _FASTER:
        return raw
    depth, key = 0, False
    for token in _TOKEN.finditer(raw):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif key and depth == 1:
            return raw[: token.start()] + b'"priority"' + raw[token.end() :]
        else:
            key = depth == 1 and text == b'"service_tier"' and raw[token.end() :].lstrip()[:1] == b":"
    return raw
