"""What an operator may say, read once and frozen.

`sections` holds the nouns, `values` the kinds of value, `document` what was written where, `yamlfile` the file, and
`reading` puts them together. Everything that is wrong is told at once, with file, line, key and remedy.
"""

from router.settings.reading import FIELDS, dump, load, variable
from router.settings.sections import (
    BatchPool,
    Classify,
    InteractivePool,
    KeyEntry,
    Log,
    NodeEntry,
    Pools,
    Probe,
    RelayEntry,
    Server,
    Settings,
    Store,
    Upstream,
)  # fmt: skip

__all__ = [
    "FIELDS", "BatchPool", "Classify", "InteractivePool", "KeyEntry", "Log", "NodeEntry", "Pools", "Probe",
    "RelayEntry", "Server", "Settings", "Store", "Upstream", "dump", "load", "variable",
]  # fmt: skip
