"""A YAML text as a document, with the line of every key.

YAML is read from its node graph rather than built by a constructor, because only nodes know their line. Duplicate keys,
tags and anything oversized are refused on the way. Keys are text as written (`on:` is not `True:`). In values that are
text, `${NAME}` is the environment variable NAME, `${NAME:-default}` has a default for when it is unset or empty, and
`$${` is a plain `${`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from router.settings.document import Document, Place
from router.settings.values import Loc, Tree

MAX_BYTES = 2**20
MAX_VALUES = 50_000
"""Keys and values after aliases are followed: nested aliases can turn a page into gigabytes."""
TOO_MANY = f"holds over {MAX_VALUES} values"
MAX_DEPTH = 16
TOO_DEEP = f"is nested over {MAX_DEPTH} levels deep"
MAX_DIGITS = 64
NO_NUMBER = "is not a number that can be read"
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}
TEXT_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "timestamp", "value")}
MERGE_TAG = "tag:yaml.org,2002:merge"
VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def read_file(path: Path, environ: Mapping[str, str] | None, *, listed: str = "") -> Document:
    """The document in a file. What stops it from being read becomes its only problem.

    A list is read as what stands under the key `listed`, if that is given; a file of that kind holds something.
    """
    document = Document(str(path))
    whole = Place(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        document.refuse(whole, (), f"cannot be read: {(error.strerror or type(error).__name__).lower()}")
    except UnicodeDecodeError as error:
        document.refuse(whole, (), f"is not UTF-8 text (byte {error.start})")
    else:
        if len(data) > MAX_BYTES:
            document.refuse(whole, (), f"is over {MAX_BYTES} bytes")
        else:
            # JSON may be indented by tabs, YAML may not; in JSON a bare tab is nothing but space.
            YamlText(document, environ).read(text.replace("\t", " ") if path.suffix == ".json" else text, listed)
    return document


def read_value(text: str, document: Document, place: Place, loc: Loc) -> Tree:
    """The value of a `[...]` or `{...}` text, without variables. Problems go to `document`."""
    scratch = Document(place.source)
    value = YamlText(scratch, None).value_of(text)
    for problem in scratch.problems:
        document.refuse(place, loc + problem.loc, problem.text)
    return value


class TooMuch(Exception):
    """The text expands to more than settings can need."""


class Loader(yaml.SafeLoader):
    """PyYAML's, stopped before it takes minutes: it needs them for a megabyte of brackets or of one-letter keys."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one node and what is in it."""
        self.composed += 1
        if self.composed > MAX_VALUES:
            raise TooMuch(TOO_MANY)
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """Begin a `[` or `{`."""
        if self.flow_level >= MAX_DEPTH:
            raise TooMuch(TOO_DEEP)
        super().fetch_flow_collection_start(TokenClass)


class YamlText:
    """One reading of one text into `document`. `environ` fills variables; None leaves them as they stand."""

    def __init__(self, document: Document, environ: Mapping[str, str] | None) -> None:
        self._document = document
        self._environ = environ
        self._source = document.places[()].source
        self._values = 0

    def read(self, text: str, listed: str = "") -> None:
        """Make the text the document's tree; a list as what stands under `listed`."""
        tree = self.value_of(text, (listed,) if listed else ())
        if isinstance(tree, dict):
            self._document.tree = tree
        elif listed and isinstance(tree, list):
            self._document.tree = {listed: tree}
        elif listed and not self._document.problems:
            self._document.refuse(Place(self._source), (), "holds no list; write [] for an empty one")
        elif tree is not None:
            self._document.refuse(Place(self._source, 1), (), "must be a mapping of sections, such as 'server:'")

    def value_of(self, text: str, at: Loc = ()) -> Tree:
        """The plain value of a text; None when it is empty or cannot be read. A list's place in the tree is `at`."""
        place = Place(self._source)
        try:
            self._loader = Loader(text)
            node = self._loader.get_single_node()
            return None if node is None else self._value(node, at if isinstance(node, yaml.SequenceNode) else ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = Place(self._source, mark.line + 1) if mark else place
            self._document.refuse(place, (), f"is not YAML: {error.problem or error.context}")
        except yaml.YAMLError:
            self._document.refuse(place, (), "is not YAML: it holds characters that are not text")
        except RecursionError:
            self._document.refuse(place, (), TOO_DEEP)
        except TooMuch as error:
            self._document.refuse(place, (), str(error))
        return None

    def _value(self, node: yaml.Node, loc: Loc) -> Tree:
        self._values += 1
        if self._values > MAX_VALUES:
            raise TooMuch(TOO_MANY)
        if len(loc) > MAX_DEPTH:
            raise TooMuch(TOO_DEEP)
        self._document.places.setdefault(loc, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*loc, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, loc) if isinstance(node, yaml.ScalarNode) else None

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                rule = (
                    "merge keys (<<) are not read; write the keys out" if key.tag == MERGE_TAG else "keys must be text"
                )
                self._document.refuse(self._place(key), loc, rule)
                continue
            here = (*loc, key.value)
            if key.value in found:
                first = self._document.places[here].line
                self._document.refuse(self._place(key), here, f"is written twice; first on line {first}")
                continue
            self._document.places[here] = self._place(key)
            found[key.value] = self._value(value, here)
        return found

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> Tree:
        if node.tag in TEXT_TAGS:
            return self._filled(node.value, loc)
        if node.tag not in PLAIN_TAGS:
            self._document.refuse(self._place(node), loc, "tags are not read")
            return None
        if len(node.value) > MAX_DIGITS:
            self._document.refuse(self._place(node), loc, NO_NUMBER)
            return None
        try:
            number: Tree = self._loader.construct_object(node)
        except ValueError:
            self._document.refuse(self._place(node), loc, NO_NUMBER)
            return None
        return number

    def _filled(self, text: str, loc: Loc) -> str:
        environ = self._environ
        if environ is None or "${" not in text:
            return text

        def fill(found: re.Match[str]) -> str:
            name, default = found["name"], found["default"]
            if found[0] == "$${":
                return "${"
            if name is None:
                self._document.refuse(
                    self._document.place(loc), loc, "holds '${' without a variable; write $${ for a plain one"
                )
            elif default is not None:
                return environ.get(name) or default
            elif name not in environ:
                rule = f"the environment variable {name} is not set; write ${{{name}:-default}} if it may be missing"
                self._document.refuse(self._document.place(loc), loc, rule)
            return environ.get(name or "", "")

        return VARIABLE.sub(fill, text)

    def _place(self, node: yaml.Node) -> Place:
        return Place(self._source, node.start_mark.line + 1)
