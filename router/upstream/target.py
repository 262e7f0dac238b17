"""Where a server is and how to be let in.

Rules: an operator's URL is read once, refused if it could mean two things, and never printed with its key.
If its path ends in a version segment (`/v1`, `/v1-openai`, `/v2` ...) that path is the API base as it stands and the
root base is what comes before; otherwise the API base is the path plus `/v1` and the root base is the path.
"""

import re
import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self
from urllib.parse import SplitResult, quote, urlsplit

from router.errors import SettingsError

__all__ = ["Target", "verified"]

_VERSION = re.compile(r"v\d{1,2}(?:\.\d+|[.-]?[a-z][\w.-]*)?")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")
_FIT = re.compile(r"[A-Za-z0-9/%:@!$&'()*+,;=~._-]*")
_SAFE = "/%:@!$&'()*+,;=~._-"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server. `api_base` and `root_base` are path prefixes without a trailing slash (`b""` for none)."""

    scheme: str
    host: str
    port: int
    api_base: bytes
    root_base: bytes
    host_header: bytes
    authorization: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> Self:
        """Read an operator's URL. `https` verifies by the system's authorities unless given another context.

        Raises SettingsError, which never quotes the key nor a password in the URL.
        """
        parts = _split(url)
        host, port = _address(parts)
        api_base, root_base = _bases(quote(parts.path, safe=_SAFE).rstrip("/"))
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port,
            api_base=api_base.encode(),
            root_base=root_base.encode(),
            host_header=_host_header(host, port, parts.scheme),
            authorization=None if api_key is None else _bearer(api_key),
            tls=(tls or verified()) if parts.scheme == "https" else None,
        )

    @property
    def place(self) -> tuple[object, ...]:
        """What a connection depends on: two targets with the same place may share connections."""
        return self.scheme, self.host, self.port, self.tls

    def path(self, path: str, *, rooted: bool = False) -> bytes:
        """The request target for a path below the API base, or below the root when `rooted`."""
        base = self.root_base if rooted else self.api_base
        if _FIT.fullmatch(path) is None:
            path = quote(path, safe=_SAFE, errors="replace")
        return base + b"/" + path.lstrip("/").encode()

    def url(self, path: str, *, rooted: bool = False) -> str:
        """The same as an absolute URL."""
        return f"{self.scheme}://{self.host_header.decode()}{self.path(path, rooted=rooted).decode()}"


def _split(url: str) -> SplitResult:
    # urlsplit drops tabs and line breaks without a word; a URL with them is a mistake to be told of.
    if not url.isprintable() or " " in url:
        raise SettingsError("the URL has spaces or control characters in it")
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise SettingsError(f"the URL cannot be read: {exc}") from None
    if parts.scheme not in _PORTS:
        raise SettingsError("the URL must begin with http:// or https://")
    if "@" in parts.netloc:
        raise SettingsError("the URL must not hold a user or password; use api_key")
    if parts.query or parts.fragment:
        raise SettingsError("the URL must not hold a query or a fragment")
    return parts


def _address(parts: SplitResult) -> tuple[str, int]:
    try:
        port = parts.port
        host = parts.hostname or ""
        host = host if ":" in host else host.encode("idna").decode()
    except ValueError as exc:
        raise SettingsError(f"the URL's host or port cannot be read: {exc}") from None
    if _HOST.fullmatch(host) is None or port == 0:
        raise SettingsError("the URL names no usable host, or port 0")
    return host, _PORTS[parts.scheme] if port is None else port


def _bases(path: str) -> tuple[str, str]:
    before, _, last = path.rpartition("/")
    if _VERSION.fullmatch(last):
        return path, before.rstrip("/")
    return f"{path}/v1", path


def _host_header(host: str, port: int, scheme: str) -> bytes:
    # A zone (fe80::1%eth0) means something on this machine only and is not sent.
    name = f"[{host.partition('%')[0]}]" if ":" in host else host
    return (name if port == _PORTS[scheme] else f"{name}:{port}").encode()


def _bearer(api_key: str) -> bytes:
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise SettingsError("the api_key is empty or has characters that no HTTP header can hold")
    return b"Bearer " + api_key.encode()


@lru_cache(maxsize=1)
def verified() -> ssl.SSLContext:
    """The process's one context that verifies by the system's authorities: reading them takes 0.1 s of CPU."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
