"""From a file, the environment and the command line to `Settings`, or to one error that tells everything wrong.

`sources` reads for pydantic-settings what each of the three says; here the answer is checked, and put into words.
Refusals name place, key and remedy, never the value, which may be a secret in the wrong place.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from router.errors import SettingsError
from router.settings.document import Document, Problem
from router.settings.fields import FIELDS, variable, way
from router.settings.sections import NodeEntry, NodeList, Settings
from router.settings.sources import hands
from router.settings.values import Clash, Loc, Tree
from router.settings.yamlfile import read_file

T = TypeVar("T")
MOST_PROBLEMS = 100
RULES = {
    "missing": "is required",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text; quote it",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "greater_than": "must be over {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "frozen_set_type": "must be a list",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
    "enum": "must be one of {expected}",
    "literal_error": "must be one of {expected}",
}
"""Our words for pydantic's error types; braces are filled from the error's context."""


def load(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings in a file, with the environment and then `overrides` (nested, as in the file) written over them.

    Raises SettingsError with one line for each problem: `file:line: key: what is wrong; did you mean ...`.
    """
    document = read_file(path, environ) if path else Document("settings")
    sources = tuple(hands(document, environ, overrides or {}))
    return _checked(document, lambda: Settings.of(sources[::-1]))


def load_nodes(path: Path) -> tuple[NodeEntry, ...]:
    """The nodes in a file of nodes: a list, or a mapping with `nodes`. Variables are not filled in.

    Raises SettingsError as `load` does.
    """
    document = read_file(path, None, listed="nodes")
    return _checked(document, lambda: NodeList.model_validate(document.tree)).nodes


def dump(settings: Settings) -> dict[str, Tree]:
    """The settings as a tree that `load` reads back. Secrets are `${EBBTIDE_...}`; caller keys are their hashes."""
    return {name: _plain(value, (name,)) for name, value in settings.model_dump(by_alias=True).items()}


def _checked(document: Document, make: Callable[[], T]) -> T:
    """What `make` makes of a document. Raises SettingsError with everything that is wrong."""
    made: T | None = None
    problems = list(document.problems)
    unreadable = [problem.loc for problem in problems]
    if () not in unreadable:
        try:
            made = make()
        except ValidationError as error:
            problems += [
                Problem(document.place(loc), loc, text)
                for detail in error.errors(include_url=False)
                for loc, text in _explained(detail)
                if not any(loc[: len(known)] == known for known in unreadable)
            ]
    if problems or made is None:
        lines = list(dict.fromkeys(map(str, sorted(problems))))
        more = [f"and {len(lines) - MOST_PROBLEMS} more"] if len(lines) > MOST_PROBLEMS else []
        raise SettingsError("\n".join(lines[:MOST_PROBLEMS] + more))
    return made


def _explained(error: ErrorDetails) -> Iterator[tuple[Loc, str]]:
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Clash):
        yield from cause.found
    elif kind == "extra_forbidden":
        yield loc, "unknown key" + _meant(str(loc[-1]), _siblings(loc), _elsewhere(str(loc[-1])))
    elif kind in ("enum", "literal_error"):
        yield loc, RULES[kind].format(**context) + _meant(str(error["input"]), _quoted(context["expected"]))
    elif loc[-1] == "[key]":
        yield loc[:-1], f"its key {RULES.get(kind, 'cannot be used').format(**context)}"
    else:
        yield loc, str(cause) if cause else RULES.get(kind, error["msg"]).format(**context)


def _meant(word: str, *choices: list[str]) -> str:
    for words in choices:
        others = [other for other in words if other != word]
        if close := difflib.get_close_matches(word.lower(), others, n=1):
            return f"; did you mean '{close[0]}'?"
    return ""


def _siblings(loc: Loc) -> list[str]:
    return [known[-1] for known in FIELDS if known[:-1] == way(loc[:-1])]


def _elsewhere(word: str) -> list[str]:
    return [word] and [".".join(known) for known in FIELDS if known[-1] == word]


def _quoted(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").replace("'", "").split(", ")


def _plain(value: object, loc: Loc) -> Tree:
    match value:
        case SecretStr():
            text = value.get_secret_value()
            return text if text.startswith("sqlite:") else f"${{{variable(loc)}}}"
        case StrEnum():
            return value.value
        case str():
            return value.replace("${", "$${")
        case dict():
            return {str(key): _plain(inner, (*loc, key)) for key, inner in value.items()}
        case frozenset():
            return [_plain(inner, loc) for inner in sorted(value)]
        case list() | tuple():
            return [_plain(inner, (*loc, index)) for index, inner in enumerate(value)]
        case int() | float() | None:
            return value
    raise TypeError(type(value).__name__)
