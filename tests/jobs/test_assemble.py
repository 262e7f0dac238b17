"""Streams put together: whatever the cut, the body is what the node would have answered unstreamed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.call import Protocol
from router.errors import BadAnswer, ErrorInStream, Truncated
from router.jobs.assemble import Assembly
from router.upstream.sse import Events, failure_events
from tests.fakes.script import Script
from tests.fakes.streams import Asked, Chat, Completion, Responses
from tests.jobs.streaming import DONE, chats, chunked, completions, event, streamed

PROTOCOLS = {"chat.completion": Protocol.CHAT, "text_completion": Protocol.COMPLETION}


def assembled(protocol: Protocol, *data: bytes) -> Any:
    assembly = Assembly(protocol)
    for piece in data:
        assembly.feed(piece)
    body = assembly.body()
    assert b"\n" not in body
    return json.loads(body)


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, **more}
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def said(*deltas: dict[str, Any]) -> dict[str, Any]:
    body = assembled(Protocol.CHAT, *map(chunk, deltas), chunk({}, "stop"), DONE)
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


@given(st.data(), st.one_of(chats(), completions()))
def test_any_body_taken_apart_in_any_way_comes_back(data, whole):
    pieces = chunked(data.draw, streamed(data.draw, whole))
    assert assembled(PROTOCOLS[whole["object"]], *pieces) == whole


@given(st.data(), st.one_of(chats(), completions()))
def test_it_reads_what_the_corridor_lets_through(data, whole):
    protocol = PROTOCOLS[whole["object"]]
    events = Events(protocol)
    cleaned = [events.feed(piece) for piece in chunked(data.draw, streamed(data.draw, whole))]
    assert events.complete
    assert assembled(protocol, *cleaned) == whole


@pytest.mark.parametrize(
    ("protocol", "kind", "body"),
    [
        (Protocol.CHAT, Chat, {"n": 2, "stream_options": {"include_usage": True}}),
        (Protocol.COMPLETION, Completion, {"prompt": ["a", "b"], "stream_options": {"include_usage": True}}),
        (Protocol.RESPONSES, Responses, {}),
    ],
)
def test_what_a_node_streams_is_what_it_answers_unstreamed(protocol, kind, body):
    answer = kind(Asked(id="a", model="m", body=body, script=Script(), tokens=4, prompt_tokens=9))
    tokens = [answer.token(at, last=at == 3) for at in range(4)]
    got = assembled(protocol, *answer.early(), *answer.opening(), *tokens, *answer.closing())
    whole = answer.whole()
    for choice in whole.get("choices", ()):
        if "message" in choice:
            choice["message"] = {key: value for key, value in choice["message"].items() if value is not None}
    only_unstreamed = {"service_tier", "system_fingerprint", "prompt_logprobs"}
    assert got == {key: value for key, value in whole.items() if key not in only_unstreamed}


def test_a_responses_body_keeps_its_bytes():
    response = b'{"id":"resp_1","output":[],"temperature":1.0,"big":12345678901234567890123,"text":"\\u00fc"}'
    stream = b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n' % response
    assembly = Assembly(Protocol.RESPONSES)
    assembly.feed(stream)
    assert assembly.body() == response


def test_an_incomplete_response_is_an_answer():
    stream = event({"type": "response.incomplete", "response": {"status": "incomplete"}})
    assert assembled(Protocol.RESPONSES, stream) == {"status": "incomplete"}


def test_tool_calls_all_numbered_zero_are_told_apart_by_id():
    one, other = ({"index": 0, "id": f"c{at}", "function": {"name": "f", "arguments": str(at)}} for at in (1, 2))
    calls = said({"tool_calls": [one]}, {"tool_calls": [other]})["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("c1", "1"), ("c2", "2")]


def test_pieces_of_a_tool_call_without_a_number_go_on_with_the_last():
    first = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    calls = said({"tool_calls": [first]}, {"tool_calls": [{"function": {"arguments": "}"}}]})["tool_calls"]
    assert calls == [{**first, "function": {"name": "f", "arguments": "{}"}}]


def several(first: int) -> list[bytes]:
    """Two prompts as llama.cpp streams them; `first` is done before the other."""
    named = {"id": "c", "object": "text_completion", "model": "m"}
    usage = [{"prompt_tokens": 2, "completion_tokens": 1}, {"prompt_tokens": 7, "completion_tokens": 3}]

    def piece(index: int, text: str, finish: str | None, **more: Any) -> bytes:
        return event({**named, "choices": [{"index": index, "text": text, "finish_reason": finish}], **more})

    ends = [piece(index, "", "stop", usage=usage[index], timings={"n": index}) for index in (first, 1 - first)]
    return [b"data: null\n\n", piece(1, "b", None), piece(0, "a", None), *ends, DONE]


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_prompts_the_first_ones_counts_are_kept(first):
    body = assembled(Protocol.COMPLETION, *several(first))
    assert [choice["text"] for choice in body["choices"]] == ["a", "b"]
    assert (body["usage"], body["timings"]) == ({"prompt_tokens": 2, "completion_tokens": 1}, {"n": 0})


def test_an_old_function_call_is_joined():
    call = said({"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}})
    assert call["function_call"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("deltas", "content"),
    [
        ([{"role": "assistant", "content": ""}], ""),
        ([{"role": "assistant", "content": None}], ""),
        ([{"content": ""}, {"reasoning_content": "hm"}], None),
        ([{"content": ""}, {"refusal": "no"}], None),
        ([{"content": "a"}, {"refusal": None}, {"content": "b"}], "ab"),
    ],
)
def test_content_is_null_only_beside_something_else(deltas, content):
    assert said(*deltas)["content"] == content


def test_vllm_as_recorded():
    recorded = (
        b'data: {"id":"chatcmpl-8c","object":"chat.completion.chunk","created":1795964362,"model":"tiny","choices":'
        b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        b'data: {"id":"chatcmpl-8c","object":"chat.completion.chunk","created":1795964362,"model":"tiny","choices":'
        b'[{"index":0,"delta":{"content":"evalu"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        b'data: {"id":"chatcmpl-8c","object":"chat.completion.chunk","created":1795964362,"model":"tiny","choices":'
        b'[{"index":0,"delta":{"content":" 2"},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":null}]}\n\n'
        b'data: {"id":"chatcmpl-8c","object":"chat.completion.chunk","created":1795964362,"model":"tiny","choices":[],'
        b'"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2},'
        b'"system_fingerprint":"vllm-0.32.0-05264bb0"}\n\n' + DONE
    )
    assert assembled(Protocol.CHAT, recorded) == {
        "id": "chatcmpl-8c",
        "object": "chat.completion",
        "created": 1795964362,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "evalu 2"},
                "logprobs": None,
                "finish_reason": "length",
                "token_ids": None,
                "stop_reason": None,
            }
        ],
        "prompt_token_ids": None,
        "prompt_text": None,
        "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
        "system_fingerprint": "vllm-0.32.0-05264bb0",
    }


# failures


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"", Truncated),
        (DONE, Truncated),
        (chunk({"content": "a"}), Truncated),
        (chunk({"content": "a"}, "stop") + chunk({"content": "b"}, index=1), Truncated),
        (chunk({"content": "a"}) + b'data: {"choices":[{"ind\n\n' + chunk({}, "stop"), BadAnswer),
        (b"data: 7\n\n" + DONE, BadAnswer),
        (b'data: {"choices":[3]}\n\n' + DONE, BadAnswer),
        (b'data: {"choices":{"a":1}}\n\n' + DONE, BadAnswer),
        (chunk({"content": "a"}) + failure_events(Protocol.CHAT, "died", "upstream_error"), ErrorInStream),
    ],
)
def test_half_an_answer_is_none(stream, error):
    with pytest.raises(error):
        assembled(Protocol.CHAT, stream)


@pytest.mark.parametrize(("code", "status"), [(400, 400), ("429", 429), ("upstream_error", 500), (None, 500)])
def test_an_error_after_the_first_token_keeps_its_status_and_body(code, status):
    error = {"error": {"message": "no", "code": code}}
    with pytest.raises(ErrorInStream) as caught:
        assembled(Protocol.CHAT, chunk({"content": "a"}), event(error), DONE)
    assert caught.value.status == status
    assert json.loads(caught.value.body) == error


@pytest.mark.parametrize(
    ("step", "status"),
    [
        ({"type": "error", "code": "upstream_error", "message": "died"}, 500),
        ({"type": "error", "code": "invalid_prompt", "message": "bad"}, 400),
        ({"type": "error", "error": {"code": 503, "message": "full"}}, 503),
        ({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "oops"}}}, 500),
        ({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "x"}}}, 429),
        ({"type": "response.failed", "response": {"error": None}}, 500),
    ],
)
def test_a_failed_response_has_a_status(step, status):
    with pytest.raises(ErrorInStream) as caught:
        assembled(Protocol.RESPONSES, event(step))
    assert caught.value.status == status
    assert json.loads(caught.value.body)["error"]["message"]


def test_a_response_without_its_last_event_is_cut():
    with pytest.raises(Truncated):
        assembled(Protocol.RESPONSES, event({"type": "response.created", "response": {"id": "r"}}))


def test_a_long_answer_is_joined_in_linear_time():
    delta = chunk({"content": "x" * 50})
    body = assembled(Protocol.CHAT, *[delta] * 20_000, chunk({}, "stop"), DONE)
    assert len(body["choices"][0]["message"]["content"]) == 1_000_000
