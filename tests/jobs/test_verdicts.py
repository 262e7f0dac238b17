"""What an ending means: a table of answers and failures, and the line's fate for each."""

import json

import pytest

from router.errors import (
    BadAnswer,
    BadStatus,
    ConnectFailed,
    ContextTooLong,
    ErrorInStream,
    FirstByteTimeout,
    IdleTimeout,
    ModelNotFound,
    NodeFailed,
    Overloaded,
    RelayMisconfigured,
    Stopped,
    TooLarge,
    Truncated,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from router.jobs.store import Tokens
from router.jobs.verdicts import Back, End, Plain, answered, broken


def judged(status, body, *, streamed=True):
    return answered(status, body, request_id="req_1", streamed=streamed)


def caused(answer, cause):
    answer.__cause__ = cause
    return answer


def test_an_answer_is_kept_as_it_came():
    body = b'{"id":"x","choices":[{"finish_reason":"stop"}],"big":1.0}'
    verdict = judged(200, body)
    assert isinstance(verdict, End)
    assert (verdict.result.body, verdict.result.status, verdict.result.request_id) == (body, 200, "req_1")


def test_line_breaks_between_values_go_and_values_stay():
    verdict = judged(200, b'{\r\n "text": "a\\nb",\n "n": 1e-05\n}\n')
    assert isinstance(verdict, End)
    assert verdict.result.body == b'{"text":"a\\nb","n":1e-05}'


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 4, "completion_tokens": 2}, Tokens(input=4, output=2)),
        ({"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}, Tokens(input=4, cached=3)),
        (
            {"input_tokens": 9, "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}},
            Tokens(input=9, output=5, reasoning=2),
        ),
        ({"prompt_tokens": "many"}, Tokens()),
        (None, Tokens()),
        (7, Tokens()),
    ],
)
def test_tokens_are_counted_in_either_dialect(usage, tokens):
    verdict = judged(200, json.dumps({"usage": usage}).encode())
    assert isinstance(verdict, End)
    assert verdict.result.tokens == tokens


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a":', b'"\xff"', b'{"choices":[{"finish_reason":"abort"}]}'])
def test_what_is_no_whole_answer_is_the_nodes_fault(body):
    verdict = judged(200, body)
    assert isinstance(verdict, Back)
    assert verdict.charged
    assert verdict.last is not None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_the_lines_own_error_is_its_end(status):
    verdict = judged(status, b'{"error":{"message":"no"}}')
    assert isinstance(verdict, End)
    assert (verdict.result.status, verdict.result.done) == (status, False)


@pytest.mark.parametrize(("status", "charged"), [(408, False), (409, False), (429, False), (503, False), (500, True)])
def test_not_now_costs_nothing_and_a_failure_does(status, charged):
    verdict = judged(status, b'{"error":{"message":"no"}}')
    assert isinstance(verdict, Back)
    assert verdict.charged is charged


def test_an_error_body_of_any_shape_becomes_json():
    verdict = judged(404, b"<h1>Not here</h1>")
    assert isinstance(verdict, End)
    assert json.loads(verdict.result.body or b"")["error"]["message"] == "Not here"


@pytest.mark.parametrize("status", [400, 422, 501])
def test_a_refusal_to_stream_asks_for_an_unstreamed_try(status):
    body = b'{"error":{"message":"Streaming is not supported"}}'
    assert isinstance(judged(status, body), Plain)
    assert isinstance(judged(status, body, streamed=False), End)


@pytest.mark.parametrize(
    ("error", "charged"),
    [
        (Overloaded("full", retry_after_s=2), False),
        (ModelNotFound("gone just now"), False),
        (RelayMisconfigured("no key"), False),
        (caused(UpstreamUnavailable("away"), ConnectFailed("refused")), False),
        (caused(UpstreamUnavailable("key"), BadStatus("401", 401)), False),
        (UpstreamUnavailable("nobody knows why"), False),
        (caused(UpstreamUnavailable("cut"), Truncated("cut")), True),
        (caused(UpstreamUnavailable("idle"), IdleTimeout("idle")), True),
        (caused(UpstreamTimeout("late"), FirstByteTimeout("late")), True),
        (caused(UpstreamError("boom", 500), BadStatus("boom", 500)), True),
        (caused(UpstreamError("oom", 503), ErrorInStream("oom")), True),
        (Truncated("cut in the body"), True),
        (BadAnswer("not HTTP"), True),
        (ErrorInStream("late", b'{"error":{"message":"oom"}}', 500), True),
        (ErrorInStream("late", b'{"error":{"message":"slow down"}}', 429), False),
        (ConnectFailed("refused"), False),
        (Stopped("the router stops"), False),
    ],
)
def test_only_a_node_that_had_the_line_costs_it_an_attempt(error, charged):
    verdict = broken(error, request_id="req_1")
    assert isinstance(verdict, Back)
    assert verdict.charged is charged
    assert verdict.reason
    assert verdict.last is not None or not charged


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextTooLong("too long", param="messages"), 400),
        (TooLarge("answer too long"), 413),
        (ErrorInStream("late", b'{"error":{"message":"bad"}}', 400), 400),
    ],
)
def test_what_no_other_try_mends_is_the_end(error, status):
    verdict = broken(error, request_id=None)
    assert isinstance(verdict, End)
    assert verdict.result.status == status
    assert set(json.loads(verdict.result.body or b"")["error"]) == {"message", "type", "param", "code"}


def test_a_wait_that_was_asked_for_is_kept():
    verdict = broken(Overloaded("full", retry_after_s=2), request_id=None)
    assert isinstance(verdict, Back)
    assert verdict.after_s == 2


def test_every_failure_of_a_node_has_a_verdict():
    for kind in NodeFailed.__subclasses__():
        error = kind("x", 500) if kind is BadStatus else kind("x")
        assert isinstance(broken(error, request_id=None), Back)
