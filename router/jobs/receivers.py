"""Who may be told that a batch has ended, and how what they are told is signed.

Rules: a receiver is a URL of a host the operator named; https, unless private addresses are allowed; no user, password
or fragment. Its path and query are the caller's secret and stand in no message and no log. The signature is that of
Standard Webhooks: base64(HMAC-SHA256(secret, id "." timestamp "." body)), one for each secret in force.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

from standardwebhooks.webhooks import Webhook

from router.errors import BadRequest, HookRefused

__all__ = ["Receiver", "Receivers", "secret_bytes"]

MOST_CHARACTERS = 2048
_PORTS = {"http": 80, "https": 443}
PREFIX = "whsec_"
SECRET_BYTES = (24, 64)
"""Least and most bytes of a secret, as Standard Webhooks has it."""


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """A URL taken apart. `target` is path and query as they go into the request line."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)

    @property
    def host_header(self) -> str:
        """Host, and port where it is not the scheme's own."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"

    def at(self, address: str) -> str:
        """The URL with an address in the host's place."""
        name = f"[{address}]" if ":" in address else address
        return f"{self.scheme}://{name}:{self.port}{self.target}"


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """What the operator allows. `allowed` holds host names, or `*.` and a domain for every name below it.

    `secrets` are in force for callers that have none of their own in `own`; `defaults` are the URLs told when a batch
    of that caller names none.
    """

    allowed: Sequence[str] = ()
    allow_private: bool = False
    secrets: Sequence[bytes] = field(default=(), repr=False)
    own: Mapping[str, Sequence[bytes]] = field(default_factory=dict, repr=False)
    defaults: Mapping[str, str] = field(default_factory=dict, repr=False)

    def asked(self, caller: str, url: str | None) -> str | None:
        """The URL to tell for a batch that names `url`, or none. Raises BadRequest."""
        if url is None:
            return self.defaults.get(caller)
        if not self.allowed:
            raise BadRequest("This router sends no webhooks.", param="webhook", code="invalid_value")
        try:
            self.read(url)
        except HookRefused as error:
            raise BadRequest(f"Invalid 'webhook': {error}.", param="webhook", code="invalid_value") from None
        return url

    def read(self, url: str) -> Receiver:
        """The receiver a URL names. Raises HookRefused."""
        receiver = _parsed(url)
        if receiver.scheme != "https" and not self.allow_private:
            raise HookRefused("the URL must begin with https://")
        if not any(_matches(receiver.host, rule) for rule in self.allowed):
            raise HookRefused("the operator does not allow this host")
        return receiver

    def host(self, url: str) -> str:
        """What may be said of a URL in a log."""
        try:
            return _parsed(url).host
        except HookRefused:
            return "unreadable"

    def signature(self, caller: str | None, event_id: str, timestamp: int, body: str) -> str:
        """The value of `webhook-signature`."""
        at = datetime.fromtimestamp(timestamp, UTC)
        secrets = self.own.get(caller or "", self.secrets)
        return " ".join(Webhook(secret).sign(event_id, at, body) for secret in secrets)


def secret_bytes(text: str) -> bytes:
    """The key that `whsec_...` stands for. Raises ValueError."""
    encoded = text.removeprefix(PREFIX)
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if encoded == text or not SECRET_BYTES[0] <= len(key) <= SECRET_BYTES[1]:
        raise ValueError(f"must be {PREFIX} and the base64 of {SECRET_BYTES[0]} to {SECRET_BYTES[1]} random bytes")
    return key


def _parsed(url: str) -> Receiver:
    if len(url) > MOST_CHARACTERS or not url.isascii() or not all("!" <= char <= "~" for char in url) or "\\" in url:
        raise HookRefused(f"the URL must be up to {MOST_CHARACTERS} printable ASCII characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise HookRefused("the URL cannot be read") from None
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise HookRefused("the URL must begin with https:// and a host")
    if "@" in parts.netloc or "#" in url:
        raise HookRefused("the URL must hold no user, password or fragment")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.hostname.removesuffix(".")
    return Receiver(scheme=parts.scheme, host=host, port=_PORTS[parts.scheme] if port is None else port, target=target)


def _matches(host: str, rule: str) -> bool:
    return host.endswith(rule[1:]) if rule.startswith("*.") else host == rule
