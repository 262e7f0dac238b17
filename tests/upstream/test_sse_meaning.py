"""What the events of a stream tell the router."""

import msgspec
import pytest

from router.core.call import Protocol, Usage
from router.upstream.meaning import TokenReader
from router.upstream.sse import Events
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


def fed(stream: bytes, protocol: Protocol = Protocol.CHAT) -> Events:
    events = Events(protocol)
    events.feed(stream)
    return events


def delta(fields: bytes) -> bytes:
    return data(b'{"choices":[{"index":0,"delta":{%s}}]}' % fields)


@pytest.mark.parametrize(
    ("protocol", "stream", "tokens", "usage"),
    [
        (Protocol.CHAT, VLLM_CHAT, 3, Usage(7, 3)),
        (Protocol.CHAT, LLAMACPP_CHAT, 1, Usage(7, 1)),
        (Protocol.COMPLETION, COMPLETION, 1, None),
        (Protocol.RESPONSES, RESPONSES, 1, Usage(7, 3)),
        (Protocol.MESSAGES, MESSAGES, 1, Usage(7, 3)),
    ],
)
def test_a_whole_answer(protocol, stream, tokens, usage):
    events = fed(stream, protocol)
    assert (events.meaningful, events.complete, events.tokens, events.usage) == (True, True, tokens, usage)
    assert (events.failure, events.errored, events.oversized) == (None, False, 0)


@pytest.mark.parametrize(
    "fields",
    [
        b'"content":"a"', b'"reasoning_content":"a"', b'"reasoning":"a"', b'"refusal":"no"', b'"content":" "',
        b'"tool_calls":[{"index":0,"function":{"name":"f"}}]', b'"function_call":{"name":"f"}', b'"audio":{"id":"x"}',
    ],
)  # fmt: skip
def test_deltas_a_person_would_see(fields):
    events = fed(ROLE + delta(fields))
    assert (events.meaningful, events.tokens) == (True, 1)


@pytest.mark.parametrize(
    "event",
    [ROLE, USAGE, delta(b""), delta(b'"content":null'), delta(b'"tool_calls":[]'), b": x\n\n", b"id: 1\n\n", DONE,
     data(b"{}"), data(b'{"choices":[]}'), data(b'{"choices":null,"error":null}'),
     data(b'{"choices":[{"index":0,"text":""}]}')],
)  # fmt: skip
def test_events_that_say_nothing(event):
    events = fed(event)
    assert (events.meaningful, events.tokens, events.failure) == (False, 0, None)


def test_a_finish_alone_is_meaningful():
    events = fed(ROLE + STOP)
    assert (events.meaningful, events.complete, events.done, events.tokens) == (True, True, False, 0)


def test_every_choice_must_finish():
    events = fed(ROLE + token(b"a") + token(b"b", index=1))
    stop = STOP.replace(b'"index":0', b'"index":1')
    events.feed(stop)
    assert not events.complete
    events.feed(STOP)
    assert events.complete
    events.feed(token(b"c", index=2))
    assert not events.complete
    assert events.tokens == 3


@pytest.mark.parametrize("space", [b":", b" : ", b": "])
def test_a_finish_is_seen_however_it_is_spaced(space):
    events = fed(ROLE + token(b"a"))
    events.feed(STOP.replace(b":", space).replace(b"data" + space, b"data:"))
    assert events.complete


def test_words_in_the_text_are_not_keys():
    events = fed(ROLE + token(b"a") + token(b'\\"error\\": {\\"finish_reason\\":\\"stop\\"}, \\"usage\\":{}'))
    assert (events.errored, events.complete, events.tokens) == (False, False, 2)


FLAT = b'{"object":"error","message":"boom","type":"Internal","code":500}'
ERRORS = [
    (Protocol.CHAT, data(b'{"error":{"message":"boom","type":"X","param":null,"code":500}}')),
    (Protocol.CHAT, data(b'{"error":"boom"}')),
    (Protocol.CHAT, data(b'{"error": {"object":"error","message":"boom"}}')),
    (Protocol.CHAT, data(FLAT)),
    (Protocol.COMPLETION, named(b"error", b'{"message":"boom"}')),
    (Protocol.CHAT, named(b"error", b"boom")),
    (Protocol.CHAT, data(b'{"error":{"message":"boom"},"choices":"odd"}')),
    (Protocol.RESPONSES, named(b"error", b'{"type":"error","message":"boom","code":"x"}')),
    (Protocol.RESPONSES, data(b'{"type":"error","message":"boom"}')),
    (Protocol.RESPONSES, named(b"response.failed", b'{"type":"response.failed","response":{"id":"r"}}')),
    (Protocol.MESSAGES, named(b"error", b'{"type":"error","error":{"type":"overloaded_error","message":"boom"}}')),
    (Protocol.PLAIN, data(b'{"error":{"message":"boom"}}')),
]
START = {
    Protocol.CHAT: (ROLE, token(b"a")),
    Protocol.COMPLETION: (b": x\n\n", data(b'{"choices":[{"index":0,"text":"a"}]}')),
    Protocol.RESPONSES: (
        RESPONSES[: RESPONSES.index(b"event: response.out")],
        RESPONSES.split(b"event: response.com")[0],
    ),
    Protocol.MESSAGES: (
        MESSAGES[: MESSAGES.index(b"event: content_block_d")],
        MESSAGES[: MESSAGES.index(b"event: content_block_stop")],
    ),
    Protocol.PLAIN: (b": x\n\n", data(b'{"a":1}')),
}


@pytest.mark.parametrize(("protocol", "error"), ERRORS)
def test_an_error_before_anything_meaningful_is_a_failure(protocol, error):
    quiet, _ = START[protocol]
    events = fed(quiet + error, protocol)
    assert (events.meaningful, events.errored, events.tokens) == (False, False, 0)
    assert events.failure == error.split(b"data: ", 1)[1].strip()


@pytest.mark.parametrize(("protocol", "error"), ERRORS)
def test_an_error_after_something_meaningful_is_not(protocol, error):
    _, loud = START[protocol]
    events = fed(loud, protocol)
    assert events.meaningful
    out = events.feed(error)
    assert (events.failure, events.errored) == (None, True)
    if protocol in (Protocol.CHAT, Protocol.COMPLETION):
        said = msgspec.json.decode(out.removeprefix(b"data: "))["error"]
        assert set(said) >= {"message", "type", "param", "code"}
        assert said["code"] is None or isinstance(said["code"], str)
        assert said["message"] == ("boom" if b"{" in error else "the node reported an error")
    else:
        assert out == error


def test_responses_are_held_until_the_model_speaks():
    quiet, loud = START[Protocol.RESPONSES]
    events = fed(quiet, Protocol.RESPONSES)
    assert (events.meaningful, events.response_id, events.sequence_number) == (False, "resp_1", 1)
    events.feed(loud[len(quiet) :])
    assert (events.meaningful, events.complete, events.sequence_number) == (True, False, 2)


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_terminal_events_of_a_response(kind):
    payload = b'{"type":"response.%s","response":{"usage":{"input_tokens":1,"output_tokens":2}}}' % kind.encode()
    events = fed(START[Protocol.RESPONSES][1] + named(b"response." + kind.encode(), payload), Protocol.RESPONSES)
    assert (events.complete, events.usage, events.errored) == (True, Usage(1, 2), kind == "failed")


@pytest.mark.parametrize(
    ("payload", "meaningful"),
    [
        (b'{"type":"content_block_start","content_block":{"type":"text","text":""}}', False),
        (b'{"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}', False),
        (b'{"type":"content_block_start","content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}', True),
        (b'{"type":"content_block_delta","delta":{"type":"text_delta","text":""}}', False),
        (b'{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"hm"}}', True),
        (b'{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}', True),
        (b'{"type":"message_delta","delta":{"stop_reason":"end_turn"}}', True),
        (b'{"type":"message_stop"}', True),
        (b'{"type":"ping"}', False),
        (b'{"type":"something_new"}', True),
    ],
)
def test_messages(payload, meaningful):
    assert fed(data(payload), Protocol.MESSAGES).meaningful is meaningful


def test_odd_usage_is_not_usage():
    for usage in (b"null", b"{}", b'{"prompt_tokens":null}', b'{"prompt_tokens":"7"}', b"[]"):
        assert fed(data(b'{"choices":[],"usage":%s}' % usage)).usage is None
    assert fed(data(b'{"choices":[],"usage":{"prompt_tokens":7}}')).usage == Usage(7, 0)


@pytest.mark.parametrize("space", [b"", b" "])
def test_an_event_like_the_one_before_is_known_unread(space):
    block = token(b"a").replace(b'":', b'":' + space).removesuffix(b"\n\n")
    reader = TokenReader()
    reader.read(block[5:].strip(), b"")
    reader.learn(block)
    assert reader.known(block.replace(b'"a"', b'"another"'))
    assert not reader.known(block.replace(b'"a"', b'"another","finish_reason":"stop"'))


def test_a_known_event_is_judged_as_if_it_were_read():
    events = fed(ROLE + token(b"a"))
    for text in (b"b", b"\\n", b'say \\"x\\"', b"\\\\", b'\\"', b""):
        events.feed(token(text))
    assert (events.tokens, events.complete, events.errored) == (6, False, False)
    evil = token(b"a").replace(b'"a"', b'"a","finish_reason":"stop","x":"b"')
    events.feed(evil + token(b"a", index=1))
    assert (events.tokens, events.complete) == (8, False)
    events.feed(token(b"z")[:-6] + b',"error":{"message":"boom"}}\n\n')
    events.feed(STOP + STOP.replace(b'"index":0', b'"index":1'))
    assert events.complete
