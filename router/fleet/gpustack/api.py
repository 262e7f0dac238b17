"""What is asked of a GPUStack 2.x server, and what it says.

Rules: only what a key of the scope `management` may do; rows are read for the fields used here and for nothing else;
every answer has bounds; a list that is not whole is no list; failures are ProbeFailed, in words an operator can act on.
The watch is not SSE, whatever its content type says: a record is a line of JSON, a sign of life an empty line.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from router.errors import ProbeFailed
from router.upstream.client import Client, Said
from router.upstream.target import Target

T = TypeVar("T")
INSTANCES = "v2/model-instances"
MODELS = "v2/models"
MOST_BYTES = 16 * 2**20
"""Most bytes of a list; a row takes some 1,400."""
RECORD_BYTES = 2**20
SERVING = frozenset({"running", "unreachable"})
"""`unreachable` says that the server cannot reach its agent there. The engine may be well, and our looks tell."""
HALVES = frozenset({"prefill", "decode"})
"""Roles in a disaggregated group whose members do not answer whole requests."""
TELLING = frozenset(
    {"state", "port", "worker_ip", "worker_advertise_address", "name", "model_name", "role", "draining_since"}
)
"""Fields of an instance that decide whether it is a node, and where."""
REPEATED = (
    "source", "huggingface_repo_id", "huggingface_filename", "model_scope_model_id", "model_scope_file_path",
    "local_path", "name", "model_name",
)  # fmt: skip
"""What a change of an instance must repeat to be taken. Anything else sent would be written over."""
NAME_LENGTH = 64
UPDATED = 2
"""A record's type, for a row that was there before. 1 is created (and every row at the beginning), 3 deleted."""

WORDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "refuses the key (401): it is wrong, revoked or expired",
    HTTPStatus.FORBIDDEN: "denies the key (403): it needs the scope `management`, of an administrator or an "
    "organisation's owner",
    HTTPStatus.NOT_FOUND: "has no such path (404): is it GPUStack 2, and its server?",
}


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One model instance. `port` and the addresses are None until it has them."""

    id: int
    name: str
    model_id: int
    model_name: str
    state: str
    port: int | None = None
    worker_ip: str | None = None
    worker_advertise_address: str | None = None
    role: str | None = None
    draining_since: str | None = None

    @property
    def address(self) -> str | None:
        """Where its engine is, in the order of GPUStack's own gateway."""
        return self.worker_advertise_address or self.worker_ip

    @property
    def placed(self) -> bool:
        """Whether it has a place where its engine is or will be, and answers whole requests there."""
        there = self.address is not None and self.port is not None
        return there and self.role not in HALVES and self.draining_since is None

    @property
    def serves(self) -> bool:
        """Whether calls may go there."""
        return self.placed and self.state in SERVING

    @property
    def host(self) -> str:
        """Its address as it stands in a URL."""
        address = self.address or ""
        return f"[{address}]" if ":" in address else address

    @property
    def url(self) -> str:
        """Its engine's URL. Engines that GPUStack starts speak http."""
        return f"http://{self.host}:{self.port}"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a model before one of its instances is restarted."""

    replicas: int
    ready_replicas: int
    restarting_since: str | None = None


class Record(msgspec.Struct, frozen=True):
    """One record of the watch. The row in it is not read: the list says what is so."""

    type: int
    changed_fields: dict[str, Any] | None = None

    @property
    def matters(self) -> bool:
        """Whether the nodes may have changed by it. An update that does not say what changed may have changed them."""
        return self.type != UPDATED or not self.changed_fields or not TELLING.isdisjoint(self.changed_fields)


class _Pages(msgspec.Struct):
    total: int


class _List(msgspec.Struct):
    items: list[Instance]
    pagination: _Pages


def node_name(instance: Instance) -> str:
    """The name of the node that an instance is: its own, where a node can have that."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", instance.name).lstrip("._-")
    if name == instance.name and len(name) <= NAME_LENGTH:
        return name
    mark = f"-{instance.id}"
    return (name[: NAME_LENGTH - len(mark)] + mark).lstrip("-")


class Gpustack:
    """A server. `target` says where it is and with which key; `timeout_s` bounds one answer.

    `restarting` are instances, by id, that the router itself has restarted right now.
    """

    def __init__(self, client: Client, target: Target, *, timeout_s: float = 10.0) -> None:
        self._client = client
        self._target = target
        self._timeout_s = timeout_s
        self.restarting: set[int] = set()
        key = target.authorization
        self._headers = {} if key is None else {"authorization": key.decode()}

    async def instances(self) -> list[Instance]:
        """All there are, whatever their state, oldest first. Raises ProbeFailed."""
        found = _as(await self._get(INSTANCES, "?page=-1"), _List)
        if len(found.items) != found.pagination.total:
            raise ProbeFailed(f"GPUStack told {len(found.items)} of {found.pagination.total} instances")
        return sorted(found.items, key=lambda instance: instance.id)

    async def watch(self, silence_s: float) -> AsyncGenerator[Record | None, None]:
        """Records as they come; None for a sign of life, of which the first says that the watch has begun.

        Raises ProbeFailed, after `silence_s` without a sign of life too. Close it, or run it to its end.
        """
        url = self._target.url(INSTANCES, rooted=True) + "?watch=true"
        try:
            async with aclosing(
                self._client.lines(url, headers=self._headers, silence_s=silence_s, max_bytes=RECORD_BYTES)
            ) as lines:
                async for line in lines:
                    yield _record(line) if line.strip() else None
        except ProbeFailed as error:
            raise _worded(error) from error

    async def row(self, number: int) -> Mapping[str, Any] | None:
        """An instance with all its fields, None if it is gone. Raises ProbeFailed."""
        said = await self._ask("GET", f"{INSTANCES}/{number}")
        if said.status == HTTPStatus.NOT_FOUND:
            return None
        row = _good(said).json
        if not isinstance(row, dict):
            raise ProbeFailed("GPUStack told an instance that is no object")
        return row

    async def model(self, number: int) -> Model:
        """A model. Raises ProbeFailed."""
        return _as(await self._get(f"{MODELS}/{number}"), Model)

    async def reschedule(self, row: Mapping[str, Any], message: str) -> None:
        """Have an instance stopped and started where it is: same id, name, worker and port. Raises ProbeFailed."""
        body = {field: row.get(field) for field in REPEATED}
        body |= {"state": "scheduled", "state_message": message}
        _good(await self._ask("PUT", f"{INSTANCES}/{row['id']}", body))

    async def delete(self, number: int) -> None:
        """Have an instance ended, and another one started wherever there is room. Raises ProbeFailed."""
        _good(await self._ask("DELETE", f"{INSTANCES}/{number}"))

    async def _get(self, path: str, query: str = "") -> object:
        url = self._target.url(path, rooted=True) + query
        try:
            return await self._client.get_json(
                url, headers=self._headers, timeout_s=self._timeout_s, max_bytes=MOST_BYTES
            )
        except ProbeFailed as error:
            raise _worded(error) from error

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Said:
        url = self._target.url(path, rooted=True)
        try:
            return await self._client.ask(method, url, body, headers=self._headers, timeout_s=self._timeout_s)
        except ProbeFailed as error:
            raise _worded(error) from error


def _good(said: Said) -> Said:
    if not said.good:
        raise _worded(ProbeFailed(f"status {said.status}", said.status))
    return said


def _worded(error: ProbeFailed) -> ProbeFailed:
    words = WORDS.get(error.status or 0)
    return ProbeFailed(f"GPUStack {words}" if words else f"GPUStack: {error}", error.status)


def _as(value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProbeFailed(f"GPUStack does not answer as GPUStack 2: {error}") from error


def _record(line: bytes) -> Record:
    try:
        return msgspec.json.decode(line, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProbeFailed("what the watch sends is no record") from error
