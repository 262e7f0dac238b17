"""What an operator says of how lines are run."""

import msgspec

from router.core.call import Call
from router.jobs.store import JobRow

__all__ = ["Terms", "never"]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How lines are run. `retries` is how many attempts a line has, `lines` and `bytes` of input are held at most."""

    lease_s: float = 30.0
    retries: int = 5
    lines: int = 1024
    bytes: int = 256 * 2**20


def never(job: JobRow, call: Call) -> bool:
    """No line goes to the relay."""
    return False
