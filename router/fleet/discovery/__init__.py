"""Nodes that nobody wrote into the settings: who tells of them, and what was told last.

`listing` says what a source tells and how; `file`, `dns` and `gpustack` are sources, one class each; `discovery` keeps
what all of them told.
"""

from router.fleet.discovery.discovery import Discovery
from router.fleet.discovery.dns import MOST_ADDRESSES, Addresses, Resolve, resolved
from router.fleet.discovery.file import File
from router.fleet.discovery.gpustack import Instances
from router.fleet.discovery.listing import Hear, Listed, Source

__all__ = [
    "MOST_ADDRESSES",
    "Addresses",
    "Discovery",
    "File",
    "Hear",
    "Instances",
    "Listed",
    "Resolve",
    "Source",
    "resolved",
]
