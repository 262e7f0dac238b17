"""What a fake does with one request: the knobs of a node that misbehaves exactly.

Rules: the default script is a healthy, quick node; every knob changes one thing; a script is frozen, so that several
requests may share it; times are seconds, counts are tokens.
A script reaches a request from the first of: `FakeNode.on_request`, the next of `FakeNode.upcoming`,
`FakeNode.scripts[model]`, `FakeNode.script`; a suffix of the model name (`tiny;ttft=1;n=3`) turns its knobs.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

PING = b": ping\n\n"
#: Header pairs as they go on the wire.
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Script:
    """One request's part. See the module for where it comes from."""

    # pace
    ttft: float = 0.0  # to the first token (or to the whole answer), after a place in a slot
    gap: float = 0.0  # between tokens
    n: int | None = None  # tokens; None: what the request asks, at most 5
    nohead: float = 0.0  # silence before the response head
    head_first: bool = True  # streams: the head goes out before the first token, as vLLM does
    stall: tuple[int, float] | None = None  # (k, s): after k tokens silent for s, the socket open
    linger: float = 0.0  # the socket stays open and silent so long after the last byte

    # ends
    cut: int | None = None  # after k tokens: RST
    cut_clean: int | None = None  # after k tokens: orderly close, no terminating chunk
    cut_inside: int | None = None  # after k tokens and half an event: orderly close
    eof_chunked: int | None = None  # after k tokens: correct terminating chunk, no finish, no [DONE]
    finish: bool = True  # the last token carries finish_reason
    done: bool = True  # data: [DONE]

    # refusals
    status: int | None = None
    body: bytes | str | dict[str, Any] | None = None  # error body; None: the dialect's own
    shape: str | None = None  # openai | vllm | sglang | detail | string | html | llamacpp | anthropic | empty
    message: str = "scripted failure"
    ra: str | None = None  # Retry-After
    errframe: int | None = None  # 200, and at token k an event with an error, then the end
    prelude: tuple[bytes, ...] = ()  # exact events before the first of ours
    role_event: bool = True  # chat: a role-only event first

    # bytes
    raw: tuple[bytes, ...] | None = None  # exact wire pieces of the whole response; then close
    pieces: tuple[bytes, ...] | None = None  # exact pieces of the body, each one chunk and one segment
    piece_gap: float = 0.002  # between raw pieces, so that they are read one by one
    events: tuple[bytes, ...] | None = None  # whole events instead of ours; pace and ends still hold
    answer: bytes | dict[str, Any] | None = None  # exact body of an unstreamed answer
    headers: Headers = ()  # extra response headers
    trailers: Headers = ()  # after the last chunk
    content_type: str | None = None
    crlf: bool = False  # events end in CRLF
    gzip: bool = False
    flood: int = 0  # bytes of content pushed as fast as they are taken, after the tokens
    close: bool = False  # Connection: close after the answer

    # content
    word: str = "tok"  # token i reads " tok<i>"
    usage: tuple[int, int] | None = None  # (prompt, completion) as reported
    send_usage: bool = True  # whether include_usage is honoured

    def but(self, **changes: Any) -> "Script":
        """The same script with some knobs turned."""
        return replace(self, **changes)


_FLOATS = {"ttft", "gap", "nohead", "linger", "piece_gap"}
_KNOBS = {field.name for field in fields(Script)}


def split_suffix(model: str, base: Script) -> tuple[str, Script]:
    """`tiny;ttft=1;n=3;stall=2:5` -> (`tiny`, base with those knobs). Only plain numbers and words can be said so."""
    name, *knobs = model.split(";")
    return name, replace(base, **dict(_knob(knob) for knob in knobs)) if knobs else base


def _knob(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if key not in _KNOBS:
        raise ValueError(f"no such knob: {key}")
    if key in _FLOATS:
        return key, float(value)
    if key == "stall":
        after, _, seconds = value.partition(":")
        return key, (int(after), float(seconds or 3600))
    if value.lstrip("-").isdigit() and key != "ra":
        return key, int(value)
    return key, value or True
