"""What the end of one try means for its line: an end, or another try. Pure.

Rules:
- An answer is the line's end, and so is what the line did wrong itself (4xx).
- A node that failed while it had the line costs the line one attempt; the last one ends it with what the node said.
- What the line cannot help costs nothing: no room, a refusal, nobody there, a model that is not served just now.
- An answer that stopped because its engine was stopped (`finish_reason` abort or error) is a failure of the node.
- What the relay refuses for reasons of ours (no money there, no such model) is no fault of the line's.
- A node that will not stream is asked again unstreamed.
"""

from typing import Any

import msgspec

from router.dispatch import normalise
from router.errors import (
    Answer,
    BadAnswer,
    BadStatus,
    ConnectFailed,
    ErrorInStream,
    ModelNotFound,
    NodeFailed,
    Overloaded,
    RateLimited,
    RelayMisconfigured,
    RequestTimeout,
    Stopped,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from router.jobs.store import NewResult, Tokens

__all__ = ["Back", "End", "Plain", "Verdict", "answered", "broken"]

_PASSING = frozenset((408, 409, 425, 429, 503))
"""Statuses that say "not now"."""
_OURS = frozenset((402, 403, 404))
"""Statuses of the relay that are about its owner's account or settings."""
_NO_STREAM = frozenset((400, 422, 501))
"""Statuses by which engines refuse to stream, with the word in the message."""
_STOPPED = frozenset(("abort", "error"))
_AWAY = (Overloaded, RateLimited, ModelNotFound, RequestTimeout, RelayMisconfigured)
_NODES = (UpstreamUnavailable, UpstreamError, UpstreamTimeout)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class End(msgspec.Struct, frozen=True):
    """The line has its end."""

    result: NewResult


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """The line waits for another try; `charged` counts against it. `last` is its end if there is no other try."""

    reason: str
    charged: bool = False
    after_s: float | None = None
    last: NewResult | None = None


class Plain(msgspec.Struct, frozen=True):
    """Ask again, without a stream."""


Verdict = End | Back | Plain


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Ended(msgspec.Struct):
    choices: list[_Choice] | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


def answered(status: int, body: bytes, *, request_id: str, streamed: bool, relayed: bool = False) -> Verdict:
    """What an answer with a status and a whole body means, from a node or, `relayed`, from outside."""
    if 200 <= status < 300:
        return _good(status, body, request_id)
    if streamed and status in _NO_STREAM and b"stream" in body.lower():
        return Plain()
    result = NewResult(status=status, request_id=request_id, body=_one_line(body) or _error(status, body))
    if status in _PASSING or (relayed and status in _OURS):
        return Back(reason=f"answered with status {status}", last=result)
    if status >= 500 and status != 501:
        return Back(reason=f"failed with status {status}", charged=True, last=result)
    return End(result)


def broken(error: Answer | NodeFailed, *, request_id: str | None) -> Verdict:
    """What it means that there was no whole answer."""
    if isinstance(error, ErrorInStream):
        return answered(error.status, _error(error.status, error.body), request_id=request_id or "", streamed=False)
    if isinstance(error, NodeFailed):
        last = _result(UpstreamUnavailable(str(error)), request_id)
        return Back(reason=str(error), charged=not isinstance(error, ConnectFailed | Stopped), last=last)
    if isinstance(error, _AWAY):
        return Back(reason=error.message, after_s=error.retry_after_s)
    result = _result(error, request_id)
    if isinstance(error, _NODES):
        return Back(reason=error.message, charged=_node_had_it(error.__cause__), last=result)
    return End(result)


def _node_had_it(cause: BaseException | None) -> bool:
    """Whether a node failed while it had the line, rather than before."""
    if isinstance(cause, BadStatus) and cause.status in (401, 403):
        return False
    return isinstance(cause, NodeFailed) and not isinstance(cause, ConnectFailed)


def _good(status: int, body: bytes, request_id: str) -> Verdict:
    line = _one_line(body)
    if line is None:
        return broken(BadAnswer("The node's answer is not JSON."), request_id=request_id)
    ended = _read(line, _Ended).choices or ()
    if any(type(choice.finish_reason) is str and choice.finish_reason in _STOPPED for choice in ended):
        return broken(BadAnswer("The node stopped before the answer did."), request_id=request_id)
    return End(NewResult(status=status, request_id=request_id, body=line, tokens=_tokens(line)))


def _one_line(body: bytes) -> bytes | None:
    """The JSON without line breaks, None if it is none."""
    try:
        body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
        return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body
    except _UNREADABLE:
        return None


def _read(body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401
    """The few fields of interest, empty where they have another shape."""
    try:
        return msgspec.json.decode(body, type=kind)
    except _UNREADABLE:
        return kind()


def _tokens(body: bytes) -> Tokens:
    usage = _read(body, _Counted).usage or _Usage()
    into = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    out = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return Tokens(
        input=_count(usage.prompt_tokens, usage.input_tokens),
        output=_count(usage.completion_tokens, usage.output_tokens),
        cached=_count(into.cached_tokens),
        reasoning=_count(out.reasoning_tokens),
    )


def _count(*told: int | None) -> int:
    return max(0, next((count for count in told if count is not None), 0))


def _error(status: int, body: bytes) -> bytes:
    return normalise.complaint(status, body, "input").encode()


def _result(answer: Answer, request_id: str | None) -> NewResult:
    error = {"message": answer.message, "type": answer.type, "param": answer.param, "code": answer.code}
    return NewResult(status=int(answer.status), request_id=request_id, body=msgspec.json.encode({"error": error}))
