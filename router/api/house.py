"""What the door needs of the rooms behind it."""

from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field

from router.api.auth import Keyring
from router.api.owners import Owners
from router.api.terms import Terms
from router.core.estimate import Estimates
from router.dispatch.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.metrics import Metrics
from router.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class House:
    """The rooms behind the door.

    `relay_models` are public names the relay may answer for; `ready` says whether a call could be served now; `reader`
    has one thread, which reads long bodies in turn so that no more than one contends with the event loop; `owners` are
    the responses seen since the start.
    """

    dispatcher: Dispatcher
    fleet: Fleet
    tokens: Tokens
    estimates: Estimates
    metrics: Metrics
    keyring: Keyring
    terms: Terms
    relay_models: Collection[str]
    ready: Callable[[], bool]
    reader: Executor
    owners: Owners = field(default_factory=Owners)
