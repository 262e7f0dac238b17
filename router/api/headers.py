"""What a request's headers say to us, and which of them go on to a node.

Everything goes on but: what belongs to the connection (and what `Connection` names), credentials, cookies, what we set
ourselves, and what only we read. One pass, because it is made for every request.
"""

from collections.abc import Iterable

import msgspec

_KEPT_HERE = frozenset(
    (
        b"accept-encoding",
        b"api-key",
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"expect",
        b"host",
        b"keep-alive",
        b"openai-organization",
        b"openai-project",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-ebbtide-workload",
        b"x-request-id",
    )
)
_KEPT_PREFIXES = (b"proxy-", b"x-ebbtide-")
_READ_TOO = frozenset((b"x-stainless-retry-count", b"x-stainless-timeout", b"x-stainless-read-timeout"))


class Heading(msgspec.Struct, frozen=True):
    """A request's headers. `said` are those we read (the last of each name), `passed` those that go on."""

    said: dict[bytes, bytes]
    passed: tuple[tuple[bytes, bytes], ...]

    @property
    def content_type(self) -> bytes:
        """The body's type, empty when not said."""
        return self.said.get(b"content-type", b"")

    @property
    def content_length(self) -> int | None:
        """The body's size, or None when it is chunked."""
        told = self.said.get(b"content-length")
        return int(told) if told is not None and told.isdigit() else None

    @property
    def encoded(self) -> bool:
        """Whether the body is compressed."""
        return self.said.get(b"content-encoding", b"identity").lower() != b"identity"

    @property
    def workload(self) -> str | None:
        """What the caller says of the workload."""
        told = self.said.get(b"x-ebbtide-workload")
        return None if told is None else told.decode("latin-1").strip().lower()

    @property
    def retried(self) -> bool:
        """Whether this is a further try of a request made before."""
        return self.said.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which the client stops waiting, as its SDK says."""
        told = self.said.get(b"x-stainless-timeout") or self.said.get(b"x-stainless-read-timeout")
        try:
            seconds = float(told) if told else 0.0
        except ValueError:
            return None
        return seconds if 0 < seconds < 1e9 else None


def read(headers: Iterable[tuple[bytes, bytes]]) -> Heading:
    """Sort a request's headers (names in lower case)."""
    said: dict[bytes, bytes] = {}
    passed: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name in _KEPT_HERE:
            said[name] = value
        elif not name.startswith(_KEPT_PREFIXES):
            passed.append((name, value))
            if name in _READ_TOO:
                said[name] = value
    named = said.get(b"connection")
    if named is not None and named.lower() not in (b"keep-alive", b"close"):
        dropped = {part.strip().lower() for part in named.split(b",")}
        passed = [pair for pair in passed if pair[0] not in dropped]
    return Heading(said, tuple(passed))
