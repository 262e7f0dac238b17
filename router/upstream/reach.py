"""Which addresses a caller's URL may lead to: the public internet, and nothing of the house.

Rules: a name is resolved once, every address it has is judged, and the connection is made to an address that was
judged, so that a name cannot mean one thing when it is looked at and another when it is used. The tables are the IANA
special-purpose registries, written out, because what Python calls global differs between its versions. An address
inside another (IPv4-mapped, NAT64) is judged by the inner one. Link-local, multicast and cloud metadata addresses are
never reached, whatever is allowed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

from router.errors import HookRefused, ProbeFailed

__all__ = ["Reach", "private", "public"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses, the best first. Raises OSError."""

MOST_ADDRESSES = 3
"""So many addresses of one name are tried."""


def _networks(*texts: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


_PRIVATE = _networks(
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "::1/128", "fc00::/7"
)  # fmt: skip
"""Addresses of a house; an operator may allow them."""
_NEVER = _networks(
    "0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::254/128",
)  # fmt: skip
"""Link-local, multicast, reserved, tunnels; the last three are metadata services of clouds."""
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def public(text: str) -> bool:
    """Whether an address is one of the public internet."""
    address = _innermost(text)
    if address is None or _in(address, _PRIVATE) or _in(address, _NEVER):
        return False
    return address.version == 4 or address in _GLOBAL_6


def private(text: str) -> bool:
    """Whether it is one of a house: private or loopback, not link-local and no metadata service."""
    address = _innermost(text)
    return address is not None and _in(address, _PRIVATE) and not _in(address, _NEVER)


class Reach:
    """Resolves names to addresses that may be connected to. `allow_private`: those of the house as well."""

    def __init__(self, *, allow_private: bool = False, resolve: Resolve | None = None) -> None:
        self._allow_private = allow_private
        self._resolve = resolve or _resolved

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where a host may be connected to, the best first. Raises HookRefused, ProbeFailed."""
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise ProbeFailed("its name cannot be resolved") from error
        fit = [address for address in dict.fromkeys(found) if self._may(address)]
        if not fit:
            raise HookRefused("its address is not one of the public internet")
        return fit[:MOST_ADDRESSES]

    def _may(self, address: str) -> bool:
        return public(address) or (self._allow_private and private(address))


async def _resolved(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _innermost(text: str) -> Address | None:
    """An address, or the one inside it; None for what is none, or has a zone (which means one link only)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.scope_id is not None:
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address


def _in(address: Address, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)
