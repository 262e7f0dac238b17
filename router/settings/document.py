"""What was written, and where: a plain tree, the place of everything in it, and what could not be read.

Three hands write into one document, later over earlier: a file, the environment, the command line. Problems are
collected, never raised, so that an operator sees all of them at once. Neither places nor problems hold values.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from router.settings.values import Loc, Tree


class Place(NamedTuple):
    """Where something was written: a file and line (from 1), an environment variable, or the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """One thing to put right."""

    place: Place
    loc: Loc
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), dotted(self.loc), self.text) if part)


class Document:
    """The tree and what is known of it. `tree` holds mappings, lists and scalars only."""

    def __init__(self, source: str) -> None:
        self.tree: Tree = {}
        self.places: dict[Loc, Place] = {(): Place(source)}
        self.problems: list[Problem] = []

    def place(self, loc: Loc) -> Place:
        """Where `loc` was written, or the nearest thing around it."""
        while loc not in self.places:
            loc = loc[:-1]
        return self.places[loc]

    def refuse(self, place: Place, loc: Loc, text: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(place, loc, text))

    def put(self, loc: Loc, value: Tree, place: Place) -> None:
        """Write over what is at `loc`. A number in it is an item of a list; one past the end adds an item."""
        try:
            self.tree = _written(self.tree, loc, value)
        except LookupError:
            self.refuse(place, loc, "there is nothing here that this could be written into")
            return
        for inner in [known for known in self.places if known[: len(loc)] == loc]:
            del self.places[inner]
        self.places[loc] = place
        for depth in range(1, len(loc)):
            self.places.setdefault(loc[:depth], place)

    def merge(self, values: Mapping[str, Any], place: Place, at: Loc = ()) -> None:
        """Write a mapping over what is there: mappings within it are merged, everything else is replaced."""
        for key, value in values.items():
            if isinstance(value, dict) and value:
                self.merge(value, place, (*at, key))
            else:
                self.put((*at, key), value, place)


def dotted(loc: Loc) -> str:
    """A place in the tree as people write it: `nodes.0.url`. Control characters are shown, long keys are cut."""
    return ".".join(ascii(part)[1:-1][:60] if isinstance(part, str) else str(part) for part in loc)


def _written(tree: Tree, loc: Loc, value: Tree) -> Tree:
    if not loc:
        return value
    part, rest = loc[0], loc[1:]
    match part, tree:
        case str(), dict() | None:
            known = tree or {}
            return {**known, part: _written(known.get(part), rest, value)}
        case int(), list() | None:
            items = [*(tree or ()), None]
            items[part] = _written(items[part], rest, value)
            return items if items[-1] is not None else items[:-1]
    raise LookupError(part)
