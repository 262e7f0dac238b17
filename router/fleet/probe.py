"""One look at one node: which engine it is, what it tells of itself, how busy it is.

Rules: cheap GETs only, in parallel, each bounded in time (`timeout_s`) and bytes (`MAX_BYTES`); at most three rounds
(recognise, read, read what that asks for), so a look ends within three times the bound, and at once when nothing
answers. A look fails with ProbeFailed and nothing else. It fails when the node gives no answer at all, when a read it
cannot do without fails (`Read.must`), or when what came makes no sense; anything less leaves facts or load unknown.
"""

import asyncio
import errno
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from http import HTTPStatus

import msgspec

from router.core.node import Facts, Load, Spec
from router.core.signals import Counters
from router.errors import ProbeFailed
from router.fleet.engines import DIALECTS, SIGNS, Answers, Dialect, Read, recognise
from router.upstream.client import Client
from router.upstream.pool import STARVED
from router.upstream.target import Target

MAX_BYTES = 4 * 2**20
"""Most bytes of one answer; a busy vLLM with many adapters shows some 0.5 MiB of metrics."""
ABSENT = frozenset({404, 405, 501})
"""Statuses that mean "not here" and say nothing against the server."""
NO_PERMISSION = frozenset({401, 403})
NONSENSE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What an answer causes that came and cannot be decoded."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one look saw. `sure` is False when a sign of an engine was not answered, so that it may be another one.

    `counters` are there when facts were read.
    """

    facts: Facts
    load: Load
    sure: bool = True
    counters: Counters | None = None


def _nothing(name: str, look: Look) -> None:
    """Nobody wants to know."""


class Probe:
    """Looks at nodes. `targets` says by URL how to be let in there; `timeout_s` bounds one GET. Both may be changed.

    `looked` is told of every look that was answered.
    """

    def __init__(
        self,
        client: Client,
        targets: Mapping[str, Target],
        *,
        timeout_s: float = 2.0,
        looked: Callable[[str, Look], None] = _nothing,
    ) -> None:
        self._looked = looked
        self._client = client
        self._targets = targets
        self.timeout_s = timeout_s

    async def look(self, spec: Spec, *, engine: str | None = None, facts: Facts | None = None) -> Look:
        """Look at a node. `engine` and `facts` from an earlier look are taken as they are and not read again."""
        answers = Answers()
        target = self._targets[spec.url]
        if engine is None and spec.engine != "auto":
            engine = spec.engine
        dialect = DIALECTS[engine] if engine is not None else await self._recognise(target, answers)
        wanted = dialect.load_from if facts is not None else (*dialect.facts_from, *dialect.load_from)
        await self._read(target, wanted, answers)
        _check(answers, wanted)
        try:
            await self._read(target, dialect.more(answers), answers)
            counters = None
            if facts is None:
                facts, counters = dialect.facts(answers), dialect.counters(answers)
            load = dialect.load(answers, facts)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ProbeFailed(f"{dialect.name}: {error}") from error
        look = Look(facts=facts, load=load, sure=engine is not None or _sure(answers, dialect), counters=counters)
        self._looked(spec.name, look)
        return look

    async def _recognise(self, target: Target, answers: Answers) -> Dialect:
        await self._read(target, SIGNS, answers)
        _check_alive(answers, SIGNS)
        try:
            return recognise(answers)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ProbeFailed(f"not an engine's answer: {error}") from error

    async def _read(self, target: Target, reads: Iterable[Read], answers: Answers) -> None:
        async with asyncio.TaskGroup() as group:
            for read in dict.fromkeys(reads):
                if read not in answers:
                    group.create_task(self._get(target, read, answers))

    async def _get(self, target: Target, read: Read, answers: Answers) -> None:
        url = target.url(read.path, rooted=read.rooted)
        headers = {"authorization": target.authorization.decode()} if target.authorization else None
        get = self._client.get_text if read.text else self._client.get_json
        try:
            answers.values[read] = await get(url, headers=headers, timeout_s=self.timeout_s, max_bytes=MAX_BYTES)
        except ProbeFailed as error:
            status = HTTPStatus.OK if isinstance(error.__cause__, NONSENSE) else error.status
            failure = ProbeFailed(f"{target.path(read.path, rooted=read.rooted).decode()}: {error}", status)
            failure.__cause__ = error
            answers.failures[read] = failure


def refused(error: BaseException) -> bool:
    """Whether nobody listens there, which a server that is merely slow would not cause."""
    return _failed_by(error, (errno.ECONNREFUSED,))


def starved(error: BaseException) -> bool:
    """Whether this machine could not even look: it says nothing of the node."""
    return _failed_by(error, STARVED)


def _failed_by(error: BaseException, numbers: Container[int | None]) -> bool:
    return any(isinstance(cause, OSError) and cause.errno in numbers for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += (cause.__cause__, cause.__context__)
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions


def _check(answers: Answers, wanted: Iterable[Read]) -> None:
    """Raise when the look cannot go on."""
    _check_alive(answers, wanted)
    for read in wanted:
        failure = answers.failures.get(read)
        if failure is not None and read.must and _fatal(read, failure.status):
            raise failure


def _fatal(read: Read, status: int | None) -> bool:
    if status is None or status == HTTPStatus.OK:
        return True
    if status in NO_PERMISSION:
        return not read.rooted
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in ABSENT


def _check_alive(answers: Answers, reads: Iterable[Read]) -> None:
    failures = [answers.failures.get(read) for read in reads]
    silent = [failure for failure in failures if failure is not None and failure.status is None]
    if failures and len(silent) == len(failures):
        raise silent[0]


def _sure(answers: Answers, dialect: Dialect) -> bool:
    return dialect.name != "openai" or all(
        answers.failures[read].status is not None for read in SIGNS if read in answers.failures
    )
