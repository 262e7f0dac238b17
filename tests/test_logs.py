"""Logs: one line an event, in one form, and never what people said."""

import io
import json
import logging
import re
import time
import warnings

import pytest
import structlog

from router import logs
from router.core.account import Account
from router.core.call import ENDPOINTS, Call, Outcome, Reason, Usage, Workload
from router.errors import BadRequest
from tests.logging_state import logging_restored

SECRET = "hunter2-hunter2"


def call(**changed):
    whole = {
        "id": "req_1",
        "endpoint": ENDPOINTS["chat/completions"],
        "model": "llama",
        "body": SECRET.encode(),
        "prompt_tokens": 10,
        "output_tokens": 20,
        "workload": Workload.INTERACTIVE,
        "reason": Reason.STREAM,
        "caller": "chat-ui",
        "stream": True,
        "headers": ((b"authorization", SECRET.encode()),),
    }
    return Call(**{**whole, **changed})


ENDED = {
    "status": 200,
    "place": "a",
    "queued_s": 0.01,
    "first_token_s": 0.2,
    "duration_s": 1.5,
    "usage": Usage(7, 9),
    "legs": 2,
}


@pytest.fixture
def written():
    """Configure the log into memory; calling the result gives what was written since."""
    files = []

    def open_log(**options):
        files.append(io.BytesIO())
        logs.configure(file=files[-1], **options)
        return lambda: files[-1].getvalue().decode()

    with logging_restored():
        yield open_log


def test_a_finished_call_is_one_line(written):
    read = written()
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    (line,) = read().splitlines()
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", told.pop("time"))
    assert told == {
        "level": "info",
        "event": "call",
        "id": "req_1",
        "caller": "chat-ui",
        "endpoint": "chat/completions",
        "model": "llama",
        "workload": "interactive",
        "reason": "stream",
        "node": "a",
        "outcome": "completed",
        "status": 200,
        "prompt_tokens": 7,
        "output_tokens": 9,
        "queue_ms": 10.0,
        "ttft_ms": 200.0,
        "duration_ms": 1500.0,
        "retries": 1,
        "stream": True,
    }


def test_text_form(written):
    read = written(form="text")
    logs.call_finished(Account(call(model='a b="c"'), Outcome.REFUSED, status=503))
    (line,) = read().splitlines()
    assert re.match(r"\S+Z info    call id=req_1 caller=chat-ui ", line)
    assert r' model="a b=\"c\"" ' in line
    assert " status=503 " in line
    assert "ttft_ms" not in line


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("evil", ["a\nb", "a\r\x1b[2Jb", "\u2028", "\x9b31m", "\u202e", "\ud800", "\x00", "x" * 5000])
def test_strangers_words_stay_on_their_line(written, form, evil, request):
    read = written(form=form)
    logs.call_finished(Account(call(model=evil, id=evil), Outcome.COMPLETED, **ENDED))
    structlog.get_logger().warning(evil, node=evil)
    logging.getLogger("uvicorn.error").warning("%s", evil)
    # What pytest keeps of the log for its report must be text that can be sent between its processes.
    request.config.pluginmanager.getplugin("logging-plugin").report_handler.reset()
    text = read()
    assert text.count("\n") == 3
    assert all(line.isprintable() for line in text.split("\n"))
    assert max(map(len, text.split("\n"))) < 1200


def test_calls_can_be_turned_off(written):
    read = written(calls=False)
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    assert read() == ""


def test_levels(written):
    read = written(level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    assert [json.loads(line)["event"] for line in read().splitlines()] == ["loud"]


def test_configuring_again_replaces(written):
    first = written()
    second = written()
    logging.getLogger("x").warning("once")
    assert first() == second()
    assert len(second().splitlines()) == 1


def test_other_libraries_are_heard_from_warnings_up(written):
    read = written()
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("ebbtide.fleet").debug("quiet")
    logging.getLogger("ebbtide.fleet").info("node a answers")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", SECRET)
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "%d", ("not a number",), None)
    next(one for one in logging.getLogger().handlers if isinstance(one, logs.Foreign)).emit(record)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    told = [json.loads(line) for line in read().splitlines()]
    assert [(one["logger"], one["event"][-40:]) for one in told[:4]] == [
        ("ebbtide.fleet", "node a answers"),
        ("uvicorn.error", "Invalid HTTP request received."),
        ("asyncio", "Task exception was never retrieved"),
        ("x", "a record that cannot be shown"),
    ]
    assert told[4]["event"].endswith("DeprecationWarning: old")


def raised(error):
    """The error, with a traceback through here and a cause."""
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise error from cause
    except type(error):
        return error


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_prompt_key_or_body_is_ever_written(written, form):
    read = written(form=form, level="debug")
    log = structlog.get_logger()
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    for name in (
        "prompt",
        "messages",
        "body",
        "key",
        "api_key",
        "authorization",
        "content",
        "headers",
        "text",
        "token",
    ):
        log.info("event", **{name: SECRET})
    for value in (SECRET.encode(), {"a": SECRET}, [SECRET], (SECRET,), object(), BadRequest(SECRET), call()):
        log.info("event", value=value)
    for error in (
        BadRequest(SECRET),
        ValueError(SECRET),
        OSError(SECRET),
        UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
    ):
        log.error("failed", exc_info=raised(error))
        logging.getLogger("uvicorn.error").error("Exception in ASGI application\n%s", SECRET, exc_info=raised(error))
    try:
        raise ValueError(SECRET)
    except ValueError:
        log.exception("failed")
    for text in (
        f"Bearer {SECRET}",
        f"api_key={SECRET}",
        f"'Authorization': 'x{SECRET}'",
        f"http://u:{SECRET}@h/",
        f"sk-{SECRET}",
        f"token: {SECRET}",
    ):
        log.warning(f"told {text}", cause=text)
        logging.getLogger("httpx2").warning("request with %s failed", text)
    text = read()
    assert text.count("\n") == 1 + 10 + 7 + 8 + 1 + 12
    assert SECRET not in text


def test_an_error_is_told_by_type_and_place(written):
    read = written()
    structlog.get_logger().error("failed", exc_info=raised(OSError(111, "Connection refused")), node="a")
    told = json.loads(read())
    assert (told["error"], told["reason"], told["cause"], told["node"]) == (
        "ConnectionRefusedError",
        "Connection refused",
        "KeyError",
        "a",
    )
    assert re.search(r"test_logs.py:\d+ raised", told["at"])


def test_a_log_that_cannot_be_written_harms_nobody(written):
    class Full(io.RawIOBase):
        def write(self, data):
            raise OSError(28, "No space left on device")

    logs.configure(file=Full())
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    closed = io.BytesIO()
    logs.configure(file=closed)
    closed.close()
    logs.call_finished(Account(call(), Outcome.COMPLETED, **ENDED))
    structlog.get_logger().warning("still here", number=2**80)


def test_a_line_is_cheap(written):
    written()
    one = call()

    def took():
        began = time.process_time()
        for _ in range(1000):
            logs.call_finished(Account(one, Outcome.COMPLETED, **ENDED))
        return time.process_time() - began

    # 7 us is what it takes; the bound leaves room for a slow machine.
    assert min(took() for _ in range(10)) / 1000 < 60e-6
