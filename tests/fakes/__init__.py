"""Fakes that speak the true protocol over real sockets, and misbehave on command.

async with FakeNode(models=["tiny"]) as node:
    node.script = Script(ttft=0.2, gap=0.05, n=10, cut=4)
    ...                                  # node.url, node.seen, node.inflight, node.aborted
"""

from tests.fakes.node import FakeNode
from tests.fakes.script import Script
from tests.fakes.seen import Seen

__all__ = ["FakeNode", "Script", "Seen"]
