"""What differs between two settings, by name, and what of it takes effect without a restart.

Values are never told: any of them may be a secret.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import BaseModel

from router.settings.sections import Settings

LIVE = (
    "nodes", "discovery", "keys", "relay", "care", "classify", "pools", "upstream", "probe", "log", "server.drain_s",
    "server.head_s", "server.heartbeat_s", "server.request_body_bytes", "server.write_stall_s",
)  # fmt: skip
"""Keys that take effect at a reload, with all that is below them. Everything else needs a restart."""


class Change(NamedTuple):
    """One difference: a key, or a named item of a list (`nodes.gpu-1`), and what happened to it."""

    key: str
    what: str

    @property
    def live(self) -> bool:
        """Whether it takes effect without a restart."""
        return any(self.key == known or self.key.startswith(f"{known}.") for known in LIVE)

    def __str__(self) -> str:
        return f"{self.key} {self.what}"


def changes(before: Settings, after: Settings) -> list[Change]:
    """All differences, in the order of the sections."""
    return list(_of_section("", before, after))


def _of_section(at: str, before: BaseModel, after: BaseModel) -> Iterator[Change]:
    for name, field in type(after).model_fields.items():
        yield from _of_value(f"{at}{field.alias or name}", getattr(before, name), getattr(after, name))


def _of_value(key: str, before: object, after: object) -> Iterator[Change]:
    if before == after:
        return
    if isinstance(before, BaseModel) and isinstance(after, BaseModel):
        yield from _of_section(f"{key}.", before, after)
    elif (were := _named(before)) is not None and (are := _named(after)) is not None:
        yield from (Change(f"{key}.{name}", "removed") for name in were if name not in are)
        yield from (Change(f"{key}.{name}", "added") for name in are if name not in were)
        yield from (
            Change(f"{key}.{name}", f"changed ({', '.join(_fields(were[name], one))})")
            for name, one in are.items()
            if name in were and were[name] != one
        )
    else:
        yield Change(key, "added" if before is None else "removed" if after is None else "changed")


def _named(value: object) -> Mapping[str, BaseModel] | None:
    """The items of a list of sections by name; None if it is anything else."""
    if not isinstance(value, tuple) or not all(isinstance(item, BaseModel) for item in value):
        return None
    return {getattr(item, "source", None) or item.name: item for item in value}


def _fields(before: BaseModel, after: BaseModel) -> list[str]:
    return [change.key for change in _of_section("", before, after)]
