"""Who calls. Keys are known by their SHA-256 digest only; a look-up by digest tells nothing through its timing.

A key comes as `Authorization: Bearer`, or as `x-api-key` (Anthropic clients) or `api-key` (Azure clients); the first of
these that is there decides. Two Authorization headers are refused: two readers could each believe another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec

from router.core.call import Workload
from router.errors import Unauthorized

Headers = Sequence[tuple[bytes, bytes]]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a key. `workload` is that of all its calls, if set; `fallback` allows the relay.

    An `admin` may act on nodes, and from the dashboard.
    """

    name: str = ""
    workload: Workload | None = None
    fallback: bool = True
    admin: bool = False


ANYBODY = Caller()
"""The caller when no keys are set."""

_MISSING = (
    "You didn't provide an API key. Send it in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)


class Keyring:
    """Callers by the digest of their key. An empty ring lets everybody in."""

    def __init__(self, callers: Iterable[tuple[bytes, Caller]] = ()) -> None:
        self._callers: Mapping[bytes, Caller] = dict(callers)

    def become(self, callers: Iterable[tuple[bytes, Caller]]) -> None:
        """These and no others are let in from now on."""
        self._callers = dict(callers)

    def caller(self, headers: Headers, said: Mapping[bytes, bytes] | None = None) -> Caller:
        """Who sent these headers (names in lower case; `said` as in `presented`). Raises Unauthorized."""
        if not self._callers:
            return ANYBODY
        key = presented(headers, said)
        if not key:
            raise Unauthorized(_MISSING)
        found = self._callers.get(sha256(key).digest())
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return found


def presented(headers: Headers, said: Mapping[bytes, bytes] | None = None) -> bytes | None:
    """The key these headers carry, or None. Raises Unauthorized when they carry it in a way that cannot be trusted.

    `said` is the last of each name, where that is known.
    """
    if said is None:
        said = dict(headers)
    bearer = said.get(b"authorization")
    if bearer is None:
        return said.get(b"x-api-key") or said.get(b"api-key")
    if len(said) < len(headers) and [name for name, _ in headers].count(b"authorization") > 1:
        raise Unauthorized("The request has more than one Authorization header.")
    scheme, _, key = bearer.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized("The Authorization header must use the Bearer scheme.")
    return key.strip()
