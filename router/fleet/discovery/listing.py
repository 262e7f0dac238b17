"""What a source of nodes tells, and how it is asked.

Rules for a source: it tells the whole list each time, never a difference; it tells again whenever that may have
changed; what it cannot read it tells as DiscoveryFailed, and never as an empty list. It keeps no nodes, and may be
cancelled at any moment.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from router.core.node import Spec
from router.errors import DiscoveryFailed
from router.upstream.target import Target


class Listed(msgspec.Struct, frozen=True):
    """One node as it is told of: what is said of it, how to reach it, and where an agent beside it tells its memory."""

    spec: Spec
    target: Target
    agent: str | None = None


Hear = Callable[[Sequence[Listed] | DiscoveryFailed], None]
"""Takes in what a source tells: all nodes there are now, or why it cannot say."""


class Source(Protocol):
    """Something that knows which nodes there are. `name` is short: it stands in logs and metrics."""

    @property
    def name(self) -> str: ...

    async def run(self, hear: Hear) -> None:
        """Tell what is known now, then whenever it changed, until cancelled."""
        ...
