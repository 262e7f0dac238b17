"""The bounds kept towards clients.

Settings stand above this room, so the composition root says here what it read there.
"""

from dataclasses import dataclass
from functools import cached_property

TURN = "ebbtide.turn"
"""Name of the ASGI extension that is the `Turn` beneath a request."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Bounds of one request, in seconds and bytes, and the size from which a prompt is batch.

    `head_s`: longest wait for the head of an answer; Node's fetch gives up at 300. `heartbeat_s`: a streaming caller
    that waits gets a comment this often. `write_stall_s`: how long a client may read nothing. `body_s`: how long it may
    send nothing of a body it announced.
    """

    request_body_bytes: int = 64 * 2**20
    head_s: float = 290.0
    heartbeat_s: float = 15.0
    write_stall_s: float = 60.0
    body_s: float = 30.0
    long_prompt_tokens: int = 8192
    cors_origins: tuple[str, ...] = ()

    @cached_property
    def pace_s(self) -> float:
        """How often a slow call is looked at: often enough that each bound is kept within a quarter."""
        return max(0.02, min(5.0, self.head_s / 4, self.heartbeat_s / 3, self.write_stall_s / 4, self.body_s / 4))
