"""What a request's headers say to us, and which of them go on to a node.

Everything goes on but: what belongs to the connection (and what `Connection` names), credentials, cookies, what we set
ourselves, and what only we read. One pass, because it is made for every request.
"""

from collections.abc import Sequence

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
_SELDOM_SAID = frozenset(
    (
        b"connection",
        b"content-encoding",
        b"x-ebbtide-workload",
        b"x-stainless-read-timeout",
        b"x-stainless-retry-count",
        b"x-stainless-timeout",
    )
)


class Heading(msgspec.Struct, frozen=True):
    """A request's headers. `said` are all of them (the last of each name), `passed` those that go on.

    `content_type` is the body's type, empty when not said; `encoded`: the body is compressed; `workload` is what the
    caller says of it; `retried`: this is a further try of a request made before; `deadline_s` are the seconds after
    which the client stops waiting, as its SDK says.
    """

    said: dict[bytes, bytes]
    passed: tuple[tuple[bytes, bytes], ...]
    content_type: bytes
    encoded: bool = False
    workload: str | None = None
    retried: bool = False
    deadline_s: float | None = None

    @property
    def content_length(self) -> int | None:
        """The body's size, or None when it is chunked."""
        told = self.said.get(b"content-length")
        return int(told) if told is not None and told.isdigit() else None


def read(headers: Sequence[tuple[bytes, bytes]]) -> Heading:
    """Sort a request's headers (names in lower case)."""
    said = dict(headers)
    passed: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name not in _KEPT_HERE and not name.startswith(_KEPT_PREFIXES):
            passed.append((name, value))
    content_type = said.get(b"content-type", b"")
    if _SELDOM_SAID.isdisjoint(said):
        return Heading(said, tuple(passed), content_type)
    return Heading(
        said,
        tuple(_unnamed(passed, said.get(b"connection", b"close"))),
        content_type,
        encoded=said.get(b"content-encoding", b"identity").lower() != b"identity",
        workload=_workload(said),
        retried=said.get(b"x-stainless-retry-count", b"0") not in (b"0", b""),
        deadline_s=_deadline_s(said),
    )


def _unnamed(passed: list[tuple[bytes, bytes]], connection: bytes) -> list[tuple[bytes, bytes]]:
    """Without the headers that belong to the connection because it names them."""
    if connection.lower() in (b"keep-alive", b"close"):
        return passed
    dropped = {part.strip().lower() for part in connection.split(b",")}
    return [pair for pair in passed if pair[0] not in dropped]


def _workload(said: dict[bytes, bytes]) -> str | None:
    told = said.get(b"x-ebbtide-workload")
    return None if told is None else told.decode("latin-1").strip().lower()


def _deadline_s(said: dict[bytes, bytes]) -> float | None:
    told = said.get(b"x-stainless-timeout") or said.get(b"x-stainless-read-timeout")
    try:
        seconds = float(told) if told else 0.0
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None
