"""A stream of events that came compressed, though we asked for none: unpacked as it comes, so that it is read, kept
alive and mended like any other."""

import zlib
from collections.abc import Callable

from router.errors import BadAnswer, Truncated
from router.upstream.pool import Exchange

_WBITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


class Unpacked:
    """An answer's bytes, unpacked. Raises BadAnswer for a coding that is not known."""

    __slots__ = ("_inflate", "_upstream")

    def __init__(self, upstream: Exchange, coding: bytes) -> None:
        wbits = _WBITS.get(coding.lower())
        if wbits is None:
            raise BadAnswer("The stream is compressed in a way that was not asked for.")
        self._upstream = upstream
        self._inflate = zlib.decompressobj(wbits)

    async def read(self, idle_s: float | None = None) -> bytes:
        """More bytes, as `Exchange.read`; raises what that raises, and BadAnswer for what cannot be unpacked."""
        while packed := await self._upstream.read(idle_s):
            try:
                data = self._inflate.decompress(packed)
            except zlib.error:
                raise BadAnswer("The compressed stream cannot be read.") from None
            if data:
                return data
        if not self._inflate.eof:
            raise Truncated("The compressed stream ended before it was whole.")
        return b""

    async def flow(self, take: Callable[[bytes], bool]) -> bool:
        """Give `take` what came, unpacked, until it returns False; whether more may come. Raises like `read`."""
        broken = False

        def unpack(packed: bytes) -> bool:
            nonlocal broken
            try:
                data = self._inflate.decompress(packed)
            except zlib.error:
                broken = True
                return False
            return not data or take(data)

        more = await self._upstream.flow(unpack)
        if broken:
            raise BadAnswer("The compressed stream cannot be read.")
        if not more and not self._inflate.eof:
            raise Truncated("The compressed stream ended before it was whole.")
        return more

    async def drain(self, within_s: float) -> None:
        """Read on to the end, so that the connection can be kept."""
        await self._upstream.drain(within_s)
