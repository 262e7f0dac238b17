"""What an operator may say, read once and frozen.

`sections` holds the nouns, `values` the kinds of value, `fields` the list of all keys. `document` is what was written
where, `yamlfile` reads the file, `sources` are file, environment and command line as pydantic-settings asks them, and
`reading` puts it together. Everything that is wrong is told at once, with file, line, key and remedy.
"""

from router.settings.changes import Change, changes
from router.settings.discovery import Discovery, DnsEntry, GpustackEntry
from router.settings.fields import FIELDS, variable
from router.settings.reading import dump, load, load_nodes
from router.settings.relay import RelayEntry
from router.settings.sections import (
    BatchPool,
    Classify,
    InteractivePool,
    KeyEntry,
    Log,
    NodeEntry,
    Pools,
    Probe,
    Server,
    Settings,
    Store,
    Upstream,
)  # fmt: skip
from router.settings.values import agent_url

__all__ = [
    "FIELDS", "BatchPool", "Change", "Classify", "Discovery", "DnsEntry", "GpustackEntry", "InteractivePool",
    "KeyEntry", "Log", "NodeEntry", "Pools", "Probe",
    "RelayEntry", "Server", "Settings", "Store", "Upstream", "agent_url", "changes", "dump", "load",
    "load_nodes", "variable",
]  # fmt: skip
