"""What admission gives: room on a node, or leave to ask the relay."""

import msgspec

from router.core.budget import Permit
from router.core.node import Node
from router.core.placement import RelayCause


class Grant(msgspec.Struct, frozen=True):
    """Room on a node, to be held for a block."""

    node: Node
    permit: Permit


class RelayGrant(msgspec.Struct, frozen=True):
    """The relay is to answer."""

    cause: RelayCause
