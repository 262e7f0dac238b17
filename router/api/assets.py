"""The dashboard's own files: read once, served from memory, compressed once.

Their address holds a hash of them all, so a browser may keep them for ever and never mixes two versions.
"""

import gzip
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from router.errors import UnknownUrl

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""What the page may load and run: files of this router, nothing written inline, nothing from another host."""
GUARDED = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
PAGE = "index.html"
FOREVER = "public, max-age=31536000, immutable"
_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}


class Asset(NamedTuple):
    """One file, as it is and compressed."""

    kind: str
    body: bytes
    packed: bytes
    tag: str


class Assets:
    """All of them. `version` is their hash; the page names the others under it."""

    def __init__(self) -> None:
        found: dict[str, bytes] = dict(_files(files("router.api").joinpath("static"), ""))
        whole = sha256()
        for name in sorted(found):
            whole.update(name.encode() + b"\0" + found[name])
        self.version = whole.hexdigest()[:16]
        found[PAGE] = found[PAGE].replace(b"{{static}}", f"/dashboard/static/{self.version}".encode())
        self._assets = {name: _asset(name, data) for name, data in found.items()}

    def page(self, request: Request) -> Response:
        """The page itself; asked for anew each time, answered 304 while it is the same."""
        return self._answer(request, self._assets[PAGE], {**GUARDED, "cache-control": "no-cache"})

    def file(self, request: Request, version: str, name: str) -> Response:
        """One file. Raises UnknownUrl; so it does for another version, whose page is to be loaded anew."""
        asset = self._assets.get(name)
        if asset is None or version != self.version:
            raise UnknownUrl("Invalid URL: the dashboard has no such file. Load the page again.")
        return self._answer(request, asset, {**GUARDED, "cache-control": FOREVER})

    def wire_bytes(self) -> int:
        """What all of it takes, compressed."""
        return sum(len(asset.packed) for asset in self._assets.values())

    def _answer(self, request: Request, asset: Asset, headers: dict[str, str]) -> Response:
        told = {**headers, "content-type": asset.kind, "etag": asset.tag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(None, 304, told)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, 200, {**told, "content-encoding": "gzip"})
        return Response(asset.body, 200, told)


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _KINDS:
            yield prefix + entry.name, entry.read_bytes()


def _asset(name: str, body: bytes) -> Asset:
    kind = _KINDS[name.rpartition(".")[2]]
    return Asset(kind, body, gzip.compress(body, 9, mtime=0), f'"{sha256(body).hexdigest()[:20]}"')
