"""What of a stream reaches the client."""

import msgspec
import pytest

from router.core.call import Protocol
from router.upstream.sse import KEEP_ALIVE, Events, failure_events
from tests.upstream.streams import (
    COMPLETION,
    DONE,
    LLAMACPP_CHAT,
    MESSAGES,
    RESPONSES,
    ROLE,
    STOP,
    USAGE,
    VLLM_CHAT,
    data,
    named,
    token,
)  # fmt: skip

WHOLE = [
    (Protocol.CHAT, VLLM_CHAT),
    (Protocol.CHAT, LLAMACPP_CHAT),
    (Protocol.COMPLETION, COMPLETION),
    (Protocol.RESPONSES, RESPONSES),
    (Protocol.MESSAGES, MESSAGES),
    (Protocol.PLAIN, MESSAGES),
]


def passed(stream: bytes, protocol: Protocol = Protocol.CHAT, **options) -> bytes:
    events = Events(protocol, **options)
    out = events.feed(stream)
    events.end()
    return out


@pytest.mark.parametrize(("protocol", "stream"), WHOLE)
def test_a_good_stream_passes_untouched_as_the_same_object(protocol, stream):
    assert Events(protocol).feed(stream) is stream
    events = Events(protocol)
    for event in stream.split(b"\n\n")[:-1]:
        piece = event + b"\n\n"
        assert events.feed(piece) is piece


@pytest.mark.parametrize(
    "odd",
    [
        token(b'\\"'),
        token(b""),
        token(b"a", index=1),
        b": c\n\n",
        USAGE,
        STOP,
        data(b'{"error":"x"}'),
        b"id: 1\n" + token(b"a"),
        DONE,
    ],
)
@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_a_run_of_tokens_is_read_as_its_events_are_one_by_one(odd, at):
    pieces = [token(b"a%d" % number) for number in range(8)]
    pieces.insert(at, odd)
    one, many = Events(Protocol.CHAT), Events(Protocol.CHAT)
    assert many.feed(b"".join(pieces)) == b"".join([one.feed(piece) for piece in pieces])
    assert (many.tokens, many.done, many.complete) == (one.tokens, one.done, one.complete)
    assert (many.usage, many.failure, many.errored) == (one.usage, one.failure, one.errored)


def test_a_run_is_not_believed_where_a_token_holds_another_event():
    events = Events(Protocol.CHAT)
    events.feed(token(b"a"))
    hidden = token(b"b")[:-2].replace(b"b", b'b"}\n\ndata: [DONE]\n\n')
    assert events.feed(token(b"c") + hidden) == token(b"c") + hidden.split(b"\n\n")[0] + b"\n\n" + DONE
    assert events.done


def test_only_whole_events_are_forwarded():
    events = Events(Protocol.CHAT)
    assert events.feed(token(b"a") + token(b"b")[:-1]) == token(b"a")
    assert events.feed(b"") == b""
    assert events.feed(b"\n") == token(b"b")
    assert events.feed(token(b"c")[:-2]) == b""
    events.end()
    assert events.tokens == 2
    assert not events.complete


@pytest.mark.parametrize(
    "noise",
    [
        b"id: 7\n\n", b"retry: 3000\n\n", b"event: ping\n\n", b"event: ping\ndata: {}\n\n", b"data:\n\n", b"data: \n\n",
        b"data\n\n", b"\n", b"\n\n\n", b"foo: bar\n\n", b"id: 7\nevent: x\n\n",
    ],
)  # fmt: skip
def test_what_sdks_cannot_read_is_dropped(noise):
    stream = noise + ROLE + noise + token(b"a") + noise + DONE + noise
    assert passed(stream) == ROLE + token(b"a") + DONE


@pytest.mark.parametrize("extra", [b"id: 7\n", b"retry: 3000\n", b"event: message\n", b"foo\n", b"id\n"])
def test_fields_are_stripped_from_an_event(extra):
    assert passed(extra + token(b"a")) == token(b"a")
    assert passed(token(b"a")[:-1] + extra + b"\n") == token(b"a")


def test_named_protocols_keep_event_and_data_only():
    delta = named(b"response.output_text.delta", b'{"type":"response.output_text.delta"}')
    assert passed(b"id: 1\nretry: 5\n" + delta + b"event: ping\n\n", Protocol.RESPONSES) == delta
    assert passed(b"id: 1\n" + MESSAGES + b"retry: 1\n\n", Protocol.MESSAGES) == MESSAGES


def test_comments_pass_and_mean_nothing():
    events = Events(Protocol.CHAT)
    assert events.feed(b": ping\n\n:\n\nid: 3\n: x\n\n") == b": ping\n\n:\n\n: x\n\n"
    assert not events.meaningful
    assert events.feed(b": c\n" + token(b"a")) == b": c\n" + token(b"a")
    assert events.meaningful


@pytest.mark.parametrize(
    "mark", [b"data: [DONE] \n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"id: 1\ndata: [DONE]\n\n"]
)
def test_the_end_mark_is_exact_and_nothing_follows(mark):
    events = Events(Protocol.CHAT)
    assert events.feed(token(b"a") + mark + token(b"late") + b": late\n\n") == token(b"a") + DONE
    assert (events.done, events.complete, events.tokens) == (True, True, 1)


def test_an_end_mark_without_its_blank_line_counts():
    for tail in (b"data: [DONE]", b"data: [DONE]\n"):
        events = Events(Protocol.CHAT)
        assert events.feed(token(b"a") + tail) == token(b"a")
        events.end()
        assert events.complete


@pytest.mark.parametrize("ending", [b"\r\n", b"\r"])
def test_other_line_ends_become_lf(ending):
    assert passed(VLLM_CHAT.replace(b"\n", ending)) == VLLM_CHAT
    assert passed(MESSAGES.replace(b"\n", ending), Protocol.MESSAGES) == MESSAGES


def test_a_bom_is_dropped_once():
    assert passed(b"\xef\xbb\xbf" + VLLM_CHAT) == VLLM_CHAT
    assert passed(b"\xef\xbb\xbf" + MESSAGES, Protocol.MESSAGES) == MESSAGES


def test_several_data_lines_are_one_event():
    split = b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"a"}}]}\n\n'
    events = Events(Protocol.CHAT)
    assert events.feed(split) == split
    assert events.tokens == 1


def test_the_usage_chunk_is_read_and_kept_back():
    events = Events(Protocol.CHAT, drop_usage=True)
    assert events.feed(VLLM_CHAT) == VLLM_CHAT.replace(USAGE, b"")
    assert events.usage is not None
    assert (events.usage.prompt, events.usage.completion) == (7, 3)
    both = STOP.replace(b'"choices"', b'"usage":{"prompt_tokens":1,"completion_tokens":1},"choices"')
    assert passed(both, drop_usage=True) == both
    azure = data(b'{"choices":[],"prompt_filter_results":[]}')
    assert passed(azure, drop_usage=True) == azure


def test_progress_is_kept_back_and_tokens_are_not():
    told = b'"prompt_progress":{"total":9,"cache":0,"processed":8,"time_ms":1}'
    progress = ROLE.replace(b'"choices"', told + b',"choices"')
    both = STOP.replace(b'"choices"', told + b',"choices"')
    assert told in progress
    assert told in both
    assert passed(progress + VLLM_CHAT, drop_progress=True) == VLLM_CHAT
    assert passed(progress + VLLM_CHAT) == progress + VLLM_CHAT
    assert passed(both, drop_progress=True) == STOP
    assert passed(both) == both
    unreadable = both.replace(told, told + b',"\xff":1')
    assert passed(unreadable, drop_progress=True) == unreadable


def test_a_model_is_renamed_and_nothing_else():
    rename = (b"m", 'Chat \u00e9"1'.encode())
    after = msgspec.json.encode(rename[1].decode())
    assert passed(VLLM_CHAT, rename=rename) == VLLM_CHAT.replace(b'"model":"m"', b'"model":' + after)
    assert passed(RESPONSES, Protocol.RESPONSES, rename=rename) == RESPONSES.replace(
        b'"model":"m"', b'"model":' + after
    )
    spaced = data(b'{"model" : "m", "x": {"model":"m"}, "choices":[]}')
    assert passed(spaced, rename=(b"m", b"n")) == data(b'{"model" : "n", "x": {"model":"m"}, "choices":[]}')
    for other in (
        b'{"model":"mm"}',
        b'{"model":null}',
        b'{"a":"\\"model\\":\\"m\\""}',
        b'{"model":"\\x"}',
        b'{"model":"',
    ):
        assert passed(data(other), rename=rename) == data(other)
    assert passed(data(b'{"model":"a\\/b"}'), rename=(b"a/b", b"c")) == data(b'{"model":"c"}')


@pytest.mark.parametrize("end", [b"\n\n", b"\n\n\n\n"])
def test_an_oversized_event_passes_unread(end):
    events = Events(Protocol.CHAT, cap=1000, rename=(b"m", b"n"))
    huge = token(b"x" * 5000)
    stream = ROLE + huge[:-2] + end + token(b"a") + USAGE + DONE
    out = b"".join(events.feed(stream[i : i + 300]) for i in range(0, len(stream), 300))
    assert out == (ROLE + huge + token(b"a") + USAGE + DONE).replace(b'"model":"m"', b'"model":"n"')
    assert (events.oversized, events.tokens, events.meaningful, events.complete) == (1, 2, True, True)
    assert events.usage is not None


def test_malformed_json_is_forwarded():
    for payload in (
        b"{",
        b"not json",
        b"[1,2]",
        b"7",
        b'{"choices":7}',
        b'{"x":NaN}',
        b'{"error":"\xff"}',
        b"[" * 9999,
    ):
        events = Events(Protocol.CHAT)
        assert events.feed(data(payload)) == data(payload)
        assert events.meaningful
        assert events.failure is None


def test_keep_alive_is_a_comment():
    assert KEEP_ALIVE == b": keep-alive\n\n"


def parsed(events: bytes) -> list[tuple[str, object]]:
    found = []
    for block in events.removesuffix(b"\n\n").split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        raw = fields[b"data"]
        found.append((fields.get(b"event", b"").decode(), None if raw == b"[DONE]" else msgspec.json.decode(raw)))
    return found


def test_failure_events_by_protocol():
    error = {"message": 'node "a" left', "type": "server_error", "param": None, "code": "upstream_error"}
    for protocol in (Protocol.CHAT, Protocol.COMPLETION, Protocol.PLAIN):
        events = failure_events(protocol, error["message"], "upstream_error")
        assert parsed(events) == [("", {"error": error}), ("", None)]
    messages = failure_events(Protocol.MESSAGES, "gone", "upstream_error")
    assert parsed(messages) == [("error", {"type": "error", "error": {"type": "api_error", "message": "gone"}})]
    (flat,) = parsed(failure_events(Protocol.RESPONSES, "gone", "upstream_error"))
    assert flat == (
        "error",
        {"type": "error", "code": "upstream_error", "message": "gone", "param": None, "sequence_number": 0},
    )
    first, second = parsed(
        failure_events(Protocol.RESPONSES, "gone", "upstream_error", response_id="resp_1", sequence_number=4)
    )
    assert (first[1]["sequence_number"], second[1]["sequence_number"]) == (5, 6)
    assert second[0] == second[1]["type"] == "response.failed"
    assert second[1]["response"]["id"] == "resp_1"
    assert second[1]["response"]["status"] == "failed"
