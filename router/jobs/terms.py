"""What an operator says of how lines are run."""

import msgspec

__all__ = ["Terms"]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How lines are run. `retries` is how many attempts a line has, `lines` and `bytes` of input are held at most."""

    lease_s: float = 30.0
    retries: int = 5
    lines: int = 1024
    bytes: int = 256 * 2**20
