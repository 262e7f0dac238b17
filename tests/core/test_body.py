"""What a body says of its call, and which bodies are refused."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.body import Body, read_body
from router.core.call import ENDPOINTS
from router.core.wellformed import ROUTING_KEYS, check_form
from router.errors import BadRequest

CHAT = ENDPOINTS["chat/completions"]
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(path: str, **fields) -> Body:
    return read_body(ENDPOINTS[path], json.dumps({"model": "m", **fields}).encode())


def refused(raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_body(CHAT, raw)
    return caught.value


def test_the_routing_fields():
    body = read("chat/completions", stream=True, n=3, max_tokens=7, stream_options={"include_usage": True}, **HI)
    assert (body.model, body.stream, body.n, body.sequences, body.max_output) == ("m", True, 3, 3, 7)
    assert body.has_stream_options
    assert body.asked_usage


def test_absent_and_null_fields_are_the_same():
    nulls = dict.fromkeys(
        ("stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options", "service_tier",
         "background", "background_options", "previous_response_id", "tools", "functions", "response_format")
    )  # fmt: skip
    for body in (read("chat/completions", **HI), read("chat/completions", **HI, **nulls)):
        assert (body.stream, body.n, body.max_output, body.service_tier) == (False, 1, None, None)
        assert (body.background, body.completion_window, body.previous_response_id) == (False, None, None)
        assert (body.has_stream_options, body.asked_usage) == (False, False)
        assert body.content.texts == ["hi"]


def test_the_first_of_the_limits_wins():
    assert read("chat/completions", max_tokens=1, max_completion_tokens=2, **HI).max_output == 2
    assert read("responses", input="hi", max_output_tokens=3).max_output == 3
    assert read("chat/completions", max_tokens=0, **HI).max_output == 0
    assert read("chat/completions", max_tokens=10**400, **HI).max_output == 2**31 - 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"null x",
        b'{"model":"m",}',
        b'{"model":"m"} x',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":Infinity}',
        b'{"model":"m","x":-Infinity}',
        b'{"model":"m","messages":[{"content":NaN}]}',
        b'{"model":"m","x":"\\ud800"}',
        b'{"model":"m","x":"\\ud800 and much text behind it"}',
        b'{"model":"m","x":"\\udc00"}',
        b'{"model":"m","messages":"\\ud800 and more text"}',
        b'{"model":"m","x":"\xed\xa0\x80"}',
        b'{"model":"m","x":"\xff"}',
        b'{"model":"m","messages":[{"content":"\xff"}]}',
        b'{"model":"m","x":"' + b"\xc3\xa9" * 2**20 + b'\xc3"}',
        b'{"model":"m","x":"line\nbreak"}',
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","messages":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        json.dumps(HI).encode("utf-16"),
        json.dumps(HI).encode("utf-32"),
    ],
)
def test_what_is_not_json_is_said_to_be_so(raw):
    answer = refused(raw)
    assert (answer.status, answer.param, answer.code) == (400, None, None)
    assert "JSON" in answer.message


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"model"', b"1", b"[" * 100_000])
def test_what_is_no_object_is_refused(raw):
    answer = refused(raw)
    assert (answer.param, answer.code) == (None, None)
    assert "object" in answer.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ('"x":1', "model", "missing_required_parameter"),
        ('"model":null', "model", "missing_required_parameter"),
        ('"model":""', "model", "invalid_value"),
        (f'"model":"{"m" * 513}"', "model", "invalid_value"),
        ('"model":7', "model", "invalid_type"),
        ('"model":["m"]', "model", "invalid_type"),
        ('"model":"m","stream":"true"', "stream", "invalid_type"),
        ('"model":"m","stream":1', "stream", "invalid_type"),
        ('"model":"m","n":1000', "n", "invalid_value"),
        ('"model":"m","n":0', "n", "invalid_value"),
        ('"model":"m","n":-1', "n", "invalid_value"),
        ('"model":"m","n":1.5', "n", "invalid_type"),
        ('"model":"m","n":true', "n", "invalid_type"),
        ('"model":"m","max_tokens":-1', "max_tokens", "invalid_value"),
        ('"model":"m","max_tokens":"9"', "max_tokens", "invalid_type"),
        ('"model":"m","max_completion_tokens":-1', "max_completion_tokens", "invalid_value"),
        ('"model":"m","max_output_tokens":{}', "max_output_tokens", "invalid_type"),
        ('"model":"m","max_tokens":' + "9" * 5000, "max_tokens", "invalid_value"),
        ('"model":"m","max_tokens":1e999', "max_tokens", "invalid_value"),
        ('"model":"m","seed":' + "9" * 5000, None, "invalid_value"),
        ('"model":"m","messages":[' + "9" * 5000 + "]", "messages", "invalid_value"),
        ('"model":"m","model":"m"', "model", "invalid_value"),
        ('"stream":false,"model":"m","stream":true', "stream", "invalid_value"),
        ('"model":"m","n":1,"x":{"n":2},"n":1', "n", "invalid_value"),
        ('"model":"m","max_tokens":1,"max_tokens":2', "max_tokens", "invalid_value"),
        ('"model":"m","max_completion_tokens":1,"max_completion_tokens":2', "max_completion_tokens", "invalid_value"),
        ('"model":"m","max_output_tokens":1,"max_output_tokens":2', "max_output_tokens", "invalid_value"),
        ('"model":"m","\\u006dodel":"x"', "model", "invalid_value"),
        ('"model":"m","max_tokens":1,"max\\u005ftokens":2', "max_tokens", "invalid_value"),
        ('"model":"m","\\u006e":1,"\\u006E":2', "n", "invalid_value"),
    ],
)
def test_a_wrong_routing_field_is_named(fields, param, code):
    answer = refused(b"{" + fields.encode() + b"}")
    assert (answer.status, answer.param, answer.code) == (400, param, code)
    assert len(answer.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        '"tools":[{"function":{"name":"f","parameters":{"properties":{"model":{"type":"string"},"n":{},"m":{"n":1}}}}}]',
        '"metadata":{"model":"x","stream":"y","max_tokens":"z"}',
        '"max_tokens":1,"max_completion_tokens":2',
        '"x":"\\u006dodel","y":"\\"model\\" \\"model\\""',
        '"messages":[{"role":"user","content":"' + "9" * 20_000 + '"}]',
        '"messages":[{"role":"user","content":"\\ud83d\\ude00"}]',
        '"messages":[{"role":"user","content":"\\u0000"}]',
        '"service_tier":7,"background":"x","background_options":[],"stream_options":3,"previous_response_id":{}',
    ],
)
def test_what_only_looks_wrong_passes(fields):
    assert read_body(CHAT, b'{"model":"m",' + fields.encode() + b"}").model == "m"


def test_a_byte_order_mark_is_no_obstacle():
    assert read_body(CHAT, b"\xef\xbb\xbf" + json.dumps(HI).encode()).content.texts == ["hi"]


def test_refusals_and_representations_do_not_repeat_what_was_written():
    assert "secret" not in refused(b'{"model":"m","n":"secret"}').message
    assert "secret" not in repr(read("chat/completions", messages=[{"content": "secret"}]))
    assert "secret" not in repr(read("chat/completions", messages=[{"content": "secret"}]).content)


@given(path=st.sampled_from(list(ENDPOINTS)), raw=st.binary(max_size=200))
@example(path="responses", raw=b"{}")
def test_any_bytes_are_read_or_refused(path, raw):
    try:
        body = read_body(ENDPOINTS[path], raw)
    except BadRequest:
        return
    assert body.model


def test_a_form_has_a_model_and_a_size():
    body = Body.for_form("whisper", True, 160_000)
    assert (body.model, body.stream, body.sequences, body.bound) == ("whisper", True, 1, 251)
    assert body.service_tier is None
    with pytest.raises(BadRequest):
        Body.for_form(None, False, 1)


@pytest.mark.parametrize("before", [0, 1, 2000, 2150, 2151, 4299, 4300, 4301, 9000])
def test_a_number_too_long_is_found_wherever_it_stands(before):
    raw = b'{"model":"m","x":"' + b"7" * before + b'","seed":' + b"9" * 4301 + b',"y":"' + b"x" * 5000 + b'"}'
    assert refused(raw).code == "invalid_value"
    assert read_body(CHAT, raw.replace(b"9" * 4301, b"9" * 4300)).model == "m"


def members(pairs) -> bytes:
    return ("{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in pairs) + "}").encode()


words = st.text(max_size=8) | st.sampled_from(["", "é", "😀" * 3, '"model"', "\\u006d", "x" * 5000])
odd = st.sampled_from([None, 7, True, 1e300, [], ["a"], {}, {"type": "text", "text": "t"}, [{"type": "image_url"}]])
messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": words})
    | st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "type"]), words | odd, max_size=3)
    | odd,
    max_size=4,
)
said = st.lists(st.fixed_dictionaries({"role": words, "content": words}), max_size=4)
more = st.lists(
    st.tuples(st.just("messages"), messages | odd | words)
    | st.tuples(st.sampled_from(["tools", "functions", "response_format", "prediction", "system", "documents"]), odd)
    | st.tuples(st.sampled_from(["service_tier", "background", "stream_options", "prompt", "text", "seed", "x"]), odd)
    | st.tuples(st.sampled_from(["n", "max_tokens", "max_completion_tokens"]), st.integers(0, 2**33) | odd)
    | st.tuples(st.just("stream"), st.booleans() | odd),
    max_size=3,
)
chats = st.builds(lambda texts, fields: [("messages", texts), *fields], said, st.just([]) | more)
flaws = st.integers(0, 9).flatmap(
    lambda chance: st.none() if chance < 7 else st.tuples(st.integers(0, 60), st.binary(max_size=3))
)


def judged(path: str, raw: bytes) -> tuple[object, ...]:
    try:
        body = read_body(ENDPOINTS[path], raw)
    except BadRequest as error:
        return error.message, error.param, error.code
    told = body.service_tier, body.background, body.completion_window, body.has_stream_options, body.asked_usage
    return body.model, body.stream, body.max_output, body.n, body.content, body.bound, body.guess, body.stated, told


@settings(max_examples=300, deadline=None)
@given(chats, st.sampled_from(["m"] * 7 + [None, "", 7]), flaws)
@example([("messages", None)], "m", None)
@example([("messages", [{"role": "user", "content": "hi"}]), ("messages", [{"content": "hi"}])], "m", None)
@example([("messages", [{"role": "user", "content": "hi"}]), ("text", 1e300), ("n", 0)], "m", None)
@example([("messages", [{"role": "user", "content": "hi"}])], "m", (0, b"\xef\xbb\xbf"))
@example([("messages", [{"role": "user", "content": "hi"}])], "m", (0, b" "))
@example([("messages", [{"role": "user", "content": "hi"}]), ("system", "a")], "m", None)
@example([("messages", [{"role": "user", "content": "hi"}]), ("documents", ["a"])], "m", None)
@example([("messages", [{"role": "user", "content": "hi", "name": "a"}])], "m", None)
@example([("messages", [{"role": "user", "content": ""}] * 20_000)], "m", None)
def test_a_chat_of_texts_is_read_as_any_other(fields, model, flaw):
    """The path of Anthropic's messages reads the same fields, in the one way that suits all bodies."""
    raw = members([("model", json.dumps(model)), *((key, json.dumps(value)) for key, value in fields)])
    if flaw is not None:
        at, what = flaw
        raw = raw[:at] + what + raw[at:]
    assert judged("chat/completions", raw) == judged("messages", raw)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*ROUTING_KEYS, "max_", "N", "x"]),
            st.sampled_from(["1", "null", '"n\\"model\\""', '{"n":1,"n":2,"model":"x"}', '["stream","stream"]']),
            st.sampled_from(["", " ", "\n"]),
        ),
        max_size=6,
    ),
    st.sampled_from([0, 2**20]),
)
def test_a_routing_key_given_twice_is_never_missed(pairs, size):
    """And no other is taken for one: keys of nested objects and words in strings may come as often as they like."""
    keys = [key for key, _, _ in pairs]
    fields = "".join(f',{space}"{key}"{space}:{value}' for key, value, space in pairs)
    raw = b'{"messages":"' + b"x" * size + b'"' + fields.encode() + b"}"
    twice = [key for key in ROUTING_KEYS if keys.count(key) > 1]
    found = []
    try:
        check_form(raw)
    except BadRequest as error:
        found.append(error.param)
    assert found == twice[:1]
