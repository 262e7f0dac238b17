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


@dataclass(kw_only=True, eq=False)
class House:
    """The rooms behind the door. `terms` and `relay_models` may be replaced; calls that come after see it.

    `relay_models` are public names the relay may answer for; `ready` says whether a call could be served now; `reader`
    has one thread, which reads long bodies in turn so that no more than one contends with the event loop; `owners` are
    the responses seen since the start; `stale` names sources of nodes whose list may be out of date.
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
    stale: Callable[[], Collection[str]] = tuple
    owners: Owners = field(default_factory=Owners)
