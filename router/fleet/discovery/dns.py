"""Nodes from a name with several addresses.

Rules: the name is looked up by the system, off the loop, one look-up at a time and each with a bound; a look-up that
finds nothing has failed, for an empty answer is what a broken resolver gives, too.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.errors import DiscoveryFailed
from router.fleet.discovery.listing import Hear, Listed

MOST_ADDRESSES = 256
"""A name with more is not the name of a service."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name, for a port. Raises OSError."""


async def resolved(name: str, port: int) -> list[str]:
    """What the system's resolver says, A and AAAA. An address that means something on this machine only is left out."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found if "%" not in str(address[0])]


@dataclass(kw_only=True, eq=False)
class Addresses:
    """The addresses of `host`. `listed` makes a node of one; `family` is any, ipv4 or ipv6."""

    host: str
    port: int
    listed: Callable[[str], Listed]
    family: str = "any"
    resolve: Resolve = resolved
    every_s: float = 10.0
    timeout_s: float = 5.0
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def __post_init__(self) -> None:
        self.name = f"{self.host}:{self.port}"
        self._asked: asyncio.Future[Sequence[str]] | None = None

    async def run(self, hear: Hear) -> None:
        """Tell a node for each address, again and again."""
        try:
            while True:
                try:
                    hear([self.listed(address) for address in await self._addresses()])
                except DiscoveryFailed as error:
                    hear(error)
                await self.sleep(self.every_s)
        finally:
            if self._asked is not None:
                self._asked.cancel()
                self._asked = None

    async def _addresses(self) -> list[str]:
        """Each address once, in an order that does not change. Raises DiscoveryFailed."""
        # One that does not come back is waited for again: a resolver that hangs must not take thread after thread.
        asked = self._asked = self._asked or asyncio.ensure_future(self.resolve(self.host, self.port))
        await asyncio.wait([asked], timeout=self.timeout_s)
        if not asked.done():
            raise DiscoveryFailed(f"{self.host}: not resolved within {self.timeout_s:g} s")
        self._asked = None
        try:
            found = sorted({address for address in asked.result() if self._wanted(address)})
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise DiscoveryFailed(f"{self.host}: cannot be resolved: {reason}") from error
        if not found:
            raise DiscoveryFailed(f"{self.host}: has no address")
        if len(found) > MOST_ADDRESSES:
            raise DiscoveryFailed(f"{self.host}: has over {MOST_ADDRESSES} addresses")
        return found

    def _wanted(self, address: str) -> bool:
        return self.family == "any" or (":" in address) == (self.family == "ipv6")
