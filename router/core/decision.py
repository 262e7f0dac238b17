"""What may be decided of a call, and what is known of it when it is."""

from collections.abc import Collection
from enum import StrEnum

import msgspec

from router.core.budget import Permit
from router.core.node import Node
from router.core.pace import Past
from router.core.yielding import Policy, WaitReason

__all__ = ["Decision", "Refuse", "RefuseReason", "Relay", "RelayCause", "Run", "Situation", "TakeBack", "Wait"]


class RelayCause(StrEnum):
    """Why a call goes to the relay. Metric label."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT = "context"
    NODES_DOWN = "nodes_down"
    DEGRADED = "degraded"
    NO_ROOM = "no_room"
    NODE_FAILED = "node_failed"
    OWNER = "owner"


class RefuseReason(StrEnum):
    """Why a call is refused."""

    UNKNOWN_MODEL = "unknown_model"
    CONTEXT = "context"
    NO_ROOM = "no_room"
    NODES_DOWN = "nodes_down"
    NODE_FAILED = "node_failed"
    OWNER_GONE = "owner_gone"
    DEADLINE = "deadline"


class Run(msgspec.Struct, frozen=True):
    """Send it to this node now. A batch call that is `firm` is not taken back."""

    node: Node
    firm: bool = False


class TakeBack(msgspec.Struct, frozen=True):
    """Take the room of these batch calls back, then send it to this node."""

    node: Node
    victims: tuple[Permit, ...]


class Wait(msgspec.Struct, frozen=True):
    """Ask again when something changes, or at `until`. `node` is the one whose chat is waited for, if that is why."""

    reason: WaitReason
    until: float | None = None
    node: Node | None = None


class Relay(msgspec.Struct, frozen=True):
    """Send it to the relay now."""

    cause: RelayCause


class Refuse(msgspec.Struct, frozen=True):
    """Nobody will answer it. `context` is the longest there is, in tokens."""

    reason: RefuseReason
    context: int | None = None


Decision = Run | TakeBack | Wait | Relay | Refuse


class Situation(msgspec.Struct, kw_only=True):
    """What is known of one call beside the nodes.

    `waited` and `patience` in seconds; `tried` names nodes that failed this call; `relay` says whether a relay is
    mapped for it; `chat_waits` whether interactive calls for the same model wait for room; `others` whether batch
    waits that was never taken back and has use for what room this call leaves; `turn` breaks ties; `past` is what
    take-backs cost it so far; `packed` on how many nodes chat is placed, None to spread it over all.
    """

    waited: float = 0.0
    patience: float = 2.0
    tried: Collection[str] = ()
    relay: bool = False
    chat_waits: bool = False
    others: bool = False
    turn: int = 0
    past: Past | None = None
    packed: int | None = None
    policy: Policy = Policy()

    @property
    def returned(self) -> bool:
        """Whether it had room that was taken back."""
        return self.past is not None and self.past.times > 0
