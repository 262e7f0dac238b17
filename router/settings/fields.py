"""Every setting there is, by its way down, and the environment variable that writes over it."""

from collections.abc import Iterator
from typing import TypeGuard, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.settings.sections import Settings
from router.settings.values import Loc

PREFIX = "EBBTIDE_"


def fields(model: type[BaseModel] = Settings, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting with its way down, parents first; `*` stands for any item of a list."""
    for name, field in model.model_fields.items():
        here = (*at, field.alias or name)
        yield here, field
        for inner in (field.annotation, *get_args(field.annotation)):
            if _is_section(inner):
                listed = Ellipsis in get_args(field.annotation)
                yield from fields(inner, (*here, "*") if listed else here)


def variable(loc: Loc) -> str:
    """The environment variable that writes over a setting."""
    return PREFIX + "__".join(str(part).upper() for part in loc)


def way(loc: Loc) -> tuple[str, ...]:
    """The way down to a place in the tree: `*` for every item of a list."""
    return tuple("*" if isinstance(part, int) else part for part in loc)


def holds_more(loc: Loc) -> bool:
    """Whether a list or a mapping belongs there; a secret may begin with a bracket, too."""
    field = FIELDS.get(way(loc))
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) in (dict, tuple, frozenset) or _is_section(kind) for kind in kinds)


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


FIELDS = dict(fields())
"""Every setting by its way down."""
