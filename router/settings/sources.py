"""The three hands that write settings, as sources of pydantic-settings: a file, the environment, the command line.

Rules:
- Each source is given what it reads. The process's own environment is never looked at.
- All write into one document, the weaker first: a variable may write over one item of a list in the file, and may
  replace a whole mapping, which merging mappings would not do.
- `EBBTIDE_SERVER__PORT` is `server.port`, `EBBTIDE_NODES__0__URL` the first node's `url`; where a list or mapping
  belongs, `[...]` is YAML. Empty variables are not there.
- A source tells the sections it wrote in, as they stand. pydantic-settings asks the strongest first; what it has told
  is not told again.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from router.settings.document import Document, Place
from router.settings.fields import FIELDS, PREFIX, holds_more
from router.settings.sections import Settings
from router.settings.values import Loc, Tree
from router.settings.yamlfile import read_value


class Hand(PydanticBaseSettingsSource):
    """One that wrote into a document. `sections` names those it wrote in."""

    def __init__(self, document: Document, sections: set[str]) -> None:
        super().__init__(Settings)
        self._document = document
        self._sections = sections

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """A section as it stands, its key, and that it is a plain tree already."""
        return self._tree().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        told = self.current_state
        return {name: tree for name, tree in self._tree().items() if name in self._sections and name not in told}

    def _tree(self) -> dict[str, Tree]:
        tree = self._document.tree
        return tree if isinstance(tree, dict) else {}


class File(Hand):
    """A file, read already: what a document holds before any other hand."""

    def __init__(self, document: Document) -> None:
        super().__init__(document, set(document.tree) if isinstance(document.tree, dict) else set())


class Environment(Hand):
    """`EBBTIDE_*` variables. Parents are written before what is in them."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        found = {_loc(name): name for name, value in environ.items() if name.startswith(PREFIX) and value}
        # Kubernetes sets EBBTIDE_PORT and its like for any service called ebbtide: one part that names no section.
        said = [loc for loc in found if len(loc) > 1 or loc in FIELDS]
        for loc in sorted(said, key=lambda loc: [(str(type(part)), part) for part in loc]):
            name, place = found[loc], Place(found[loc])
            value = environ[name]
            written = value[0] in "[{" and holds_more(loc)
            document.put(loc, read_value(value, document, place, loc) if written else value, place)
        super().__init__(document, {str(loc[0]) for loc in said})


class CommandLine(Hand):
    """Options, nested as in the file. Mappings are merged, everything else is replaced."""

    def __init__(self, document: Document, options: Mapping[str, Any]) -> None:
        document.merge(options, Place("command line"))
        super().__init__(document, set(options))


def hands(document: Document, environ: Mapping[str, str], options: Mapping[str, Any]) -> Iterator[Hand]:
    """All hands that wrote into a document, in the order they write. What a broken file hides is not written over."""
    yield File(document)
    if document.tree or not document.problems:
        yield Environment(document, environ)
        yield CommandLine(document, options)


def _loc(name: str) -> Loc:
    return tuple(int(part) if part.isdecimal() else part for part in name.removeprefix(PREFIX).lower().split("__"))
