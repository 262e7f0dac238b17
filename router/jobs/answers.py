"""Reads the answer of one call to its end, streamed or not, for somebody who keeps it whole."""

from router.core.call import Call
from router.dispatch.reply import Reply
from router.errors import TooLarge
from router.jobs.assemble import Assembly

__all__ = ["read"]

ANSWER_BYTES = 64 * 2**20
"""Largest answer that is kept; a line with a larger one fails."""


async def read(reply: Reply, call: Call) -> Assembly | bytes:
    """The whole answer. Raises NodeFailed, and TooLarge when it is too long to keep."""
    size = 0
    assembly = Assembly(call.endpoint.protocol) if reply.stream and reply.status < 400 else None
    parts: list[bytes] = []
    async for chunk in reply:
        size += len(chunk)
        if assembly is not None:
            assembly.feed(chunk)
        else:
            parts.append(chunk)
        if size > ANSWER_BYTES:
            raise TooLarge(f"The answer is longer than {ANSWER_BYTES} bytes.", code="response_too_large")
    return assembly if assembly is not None else b"".join(parts)
