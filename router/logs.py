"""What is written to standard error: one event a line, as JSON or text, and never what people said.

Rules: a line holds names, numbers and closed words. Text is escaped, cut short, and loses whatever looks like a
credential; bytes, mappings and lists are shown as their type; fields named like a prompt, a body or a key are hidden.
Of an exception only its type and the places it passed are shown: its message may quote anything. Of records by other
libraries only the first line is. A log that cannot be written is lost; it never harms a call.

Everybody logs through `structlog.get_logger()`, or a standard logger below `ebbtide`; `configure` decides once where
and how that comes out. Loggers of other libraries are heard from warnings up.
"""

import logging
import re
import sys
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from router.core.account import Account
from router.core.call import Outcome, Reason, Workload

LONGEST = 300
"""Characters of one value that are shown."""
FRAMES = 8
"""Innermost places of an exception that are shown."""
HIDDEN = frozenset(
    {
        *("api_key", "authorization", "cookie", "headers", "key", "password", "secret", "token"),
        *("body", "chunk", "content", "data", "input", "messages", "output", "prompt", "query", "request", "response"),
        *("arguments", "answer", "exception", "text"),
    }
)
"""Names of fields whose value is shown only when it is a number."""
CREDENTIAL = re.compile(
    r"(?i)(?:\b(?:bearer|basic)\s+|\b(?:sk|pk|gpustack)[-_]|(?:key|token|secret|password|authorization)['\"]?\s*[:=]\s*)\S+"
    r"|(?<=://)[^/\s@]+(?=@)"
)
FOREIGN = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "httpx2", "py.warnings")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Fields = MutableMapping[str, Any]


class Lines:
    """Where lines go: a binary file that may fail. structlog calls the method named like the level."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def msg(self, line: bytes) -> None:
        """Write one line at once; what cannot be written is lost."""
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = exception = msg


def configure(*, level: str = "info", form: str = "json", calls: bool = True, file: BinaryIO | None = None) -> None:
    """Send everything logged to `file` (default: standard error) as `form` (json or text), from `level` up.

    `calls` turns the line of every finished call on or off. May be called again.
    """
    lines = Lines(file if file is not None else sys.stderr.buffer)
    render = _json if form == "json" else _text
    structlog.configure(
        processors=[_stamped, render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    _calls.open(lines if calls and LEVELS[level] <= logging.INFO else None, text=form == "text")
    _adopt(Foreign(lines, render), LEVELS[level])


def call_finished(account: Account) -> None:
    """Write the one line of a finished call, if such lines are wanted."""
    lines = _calls.lines
    if lines is not None:
        lines.msg(_calls.render(CallLine.of(account)))


class CallLine(msgspec.Struct):
    """What is written of a finished call. A struct, as there is one for every request. Tokens are the node's count."""

    time: datetime
    level: str
    event: str
    id: str
    caller: str
    endpoint: str
    model: str
    workload: Workload
    reason: Reason
    node: str | None
    outcome: Outcome
    status: int
    prompt_tokens: int
    output_tokens: int | None
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    retries: int
    stream: bool

    @classmethod
    def of(cls, account: Account) -> "CallLine":
        """The line of one call. Only the model and the id can be a stranger's words."""
        call, usage = account.call, account.usage
        return cls(
            time=datetime.now(UTC),
            level="info",
            event="call",
            id=_clean(call.id),
            caller=call.caller,
            endpoint=call.endpoint.path,
            model=_clean(call.model),
            workload=call.workload,
            reason=call.reason,
            node=account.place or None,
            outcome=account.outcome,
            status=account.status,
            prompt_tokens=usage.prompt if usage else call.prompt_tokens,
            output_tokens=usage.completion if usage else None,
            queue_ms=_ms(account.queued_s),
            ttft_ms=None if account.first_token_s is None else _ms(account.first_token_s),
            duration_ms=_ms(account.duration_s),
            retries=max(0, account.legs - 1),
            stream=call.stream,
        )


class CallLines:
    """Where the lines of finished calls go, past structlog's machinery: to `lines`, if they are wanted at all."""

    def __init__(self) -> None:
        self.lines: Lines | None = None
        self.render: Callable[[CallLine], bytes] = _encode

    def open(self, lines: Lines | None, *, text: bool) -> None:
        """Write to `lines` from now on; None writes nothing."""
        self.lines, self.render = lines, _told if text else _encode


class Foreign(logging.Handler):
    """Records of libraries that use the standard logging, as lines of ours."""

    def __init__(self, lines: Lines, render: Callable[[object, str, Fields], bytes]) -> None:
        super().__init__()
        self._lines = lines
        self._render = render

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            first = record.getMessage().partition("\n")[0]
        except Exception:  # noqa: BLE001
            first = "a record that cannot be shown"
        level = record.levelname.lower()
        fields: Fields = {"event": first, "logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info[1]
        self._lines.msg(self._render(None, level, _stamped(None, level, fields)))


def _adopt(foreign: Foreign, level: int) -> None:
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, Foreign)]:
        root.removeHandler(old)
    root.addHandler(foreign)
    root.setLevel(max(level, logging.WARNING))
    for name in FOREIGN:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(max(level, logging.WARNING))
    logging.getLogger("ebbtide").setLevel(level)
    logging.captureWarnings(True)


def _stamped(_: object, level: str, fields: Fields) -> Fields:
    error = fields.pop("exc_info", None)
    event = fields.pop("event", "")
    if error is True:
        error = sys.exception()
    told = _exception(error) if isinstance(error, BaseException) else {}
    stamped = {"time": _now(), "level": level, "event": event, **fields, **told}
    return {
        name: CREDENTIAL.sub("[hidden]", value) if isinstance(value, str) else value for name, value in stamped.items()
    }


def _exception(error: BaseException) -> Fields:
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    told: Fields = {"error": type(error).__qualname__}
    if isinstance(error, OSError) and error.strerror:
        told["reason"] = error.strerror
    if frames:
        told["at"] = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    if error.__cause__ is not None:
        told["cause"] = type(error.__cause__).__qualname__
    return told


def _json(_: object, __: str, fields: Fields) -> bytes:
    return _encode({name: _shown(name, value) for name, value in fields.items()})


def _text(_: object, __: str, fields: Fields) -> bytes:
    shown = {name: _shown(name, value) for name, value in fields.items() if value is not None}
    head = f"{shown.pop('time')} {shown.pop('level'):<7} {shown.pop('event')}"
    return " ".join([head, *(f"{name}={_word(value)}" for name, value in shown.items())]).encode()


def _told(line: CallLine) -> bytes:
    return _text(None, "", {**msgspec.structs.asdict(line), "time": _now()})


def _word(value: object) -> str:
    if isinstance(value, str) and value and not set(value) & {" ", '"', "="}:
        return value
    return _encode(value).decode()


def _shown(name: str, value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if name in HIDDEN:
        return "[hidden]"
    if isinstance(value, str):
        return _clean(value)
    return f"[{type(value).__name__}]"


def _clean(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _ms(seconds: float) -> float:
    return int(seconds * 10_000) / 10


def _now() -> str:
    return f"{datetime.now(UTC).isoformat()[:-6]}Z"


_encode = msgspec.json.Encoder(enc_hook=str).encode
_calls = CallLines()
