"""A call of our own to the relay: the control that nodes are compared with.

It goes through the corridor, so the relay's spend cap counts it and refuses it, and it ends in the log and the metrics
like any other call, under a caller's name that no key can have.
"""

import time
from collections.abc import Callable

import msgspec

from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.trip import RELAY
from router.errors import Answer, NodeFailed
from router.fleet.canary import PROMPT_TOKENS, TOOK_S, payload

CALLER = "(canary)"


class Control:
    """Asks the relay for one token. `clock` is seconds of a steady clock."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    async def ask(self) -> float | None:
        """Seconds until the token was here; None when there is no relay, no money left for it, or no answer."""
        relay = self._dispatcher.relay
        if relay is None or not relay.models:
            return None
        call = _call(next(iter(relay.models)))
        began = self._clock()
        try:
            async with self._dispatcher.open(call) as reply:
                if reply.status != 200:
                    return None
                seconds = self._clock() - began
                async for _ in reply:
                    pass
        except (Answer, NodeFailed):
            return None
        return seconds


def _call(model: str) -> Call:
    return Call(
        id=CALLER,
        endpoint=ENDPOINTS["chat/completions"],
        model=model,
        body=msgspec.json.encode(payload(model)),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=1,
        workload=Workload.INTERACTIVE,
        reason=Reason.DEFAULT,
        caller=CALLER,
        deadline_s=TOOK_S,
        bound_to=RELAY,
    )
