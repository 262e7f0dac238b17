"""What is counted in a body, whatever its shape."""

import base64
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.body import Body, read_body
from router.core.call import ENDPOINTS
from router.core.content import KEPT_BYTES
from router.errors import BadRequest

CHAT = ENDPOINTS["chat/completions"]
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(path: str, **fields) -> Body:
    return read_body(ENDPOINTS[path], json.dumps({"model": "m", **fields}).encode())


def texts(path: str, **fields) -> list[str]:
    return read(path, **fields).content.texts


def test_every_chat_text_is_counted_once():
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "name": "two", "content": [
            {"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
        {"role": "assistant", "content": None, "reasoning_content": "five", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "six", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "eight"}]},
    ]  # fmt: skip
    assert texts("chat/completions", messages=messages) == [
        "one", "two", "three", "four", "five", "six", '{"a":1}', "seven", "eight",
    ]  # fmt: skip


def test_schemas_and_predictions_are_text():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    found = texts(
        "chat/completions",
        tools=tools,
        functions=[{}],
        response_format={"type": "text"},
        prediction={"content": "p"},
        **HI,
    )
    assert found == ["hi", json.dumps(tools, separators=(",", ":")), "[{}]", '{"type":"text"}', "p"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "text",
        7,
        {},
        [None],
        [7, "x", []],
        [{}],
        [{"content": None}],
        [{"content": ""}],
        [{"content": []}],
        [{"content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": None}],
        [{"role": "assistant", "content": None, "tool_calls": {}}],
        [{"content": [{"type": "reasoning"}]}],
        [{"content": [{"type": None}, {"type": []}, {"type": {}}, {}, None, 3.5, True]}],
        [
            {
                "content": [
                    {"type": "image_url"},
                    {"type": "input_audio"},
                    {"type": "file"},
                    {"type": "image_url", "image_url": 7},
                ]
            }
        ],
        [{"content": [{"type": "tool_result", "content": [{"type": "tool_result", "content": "deep"}]}]}],
        [{"content": [[[[[[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]]]]]}],
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "embeddings", "tokenize"])
def test_odd_messages_are_the_engines_to_judge(path, messages):
    body = read(path, messages=messages, input=messages)
    assert 0 <= body.guess <= body.bound


def test_unknown_parts_are_flagged_and_cost_little():
    body = read("chat/completions", messages=[{"content": [{"type": "hologram", "data": "x" * 10**6}]}])
    assert body.content.odd
    assert body.bound < 100


def media(size: int) -> str:
    return base64.b64encode(bytes(size)).decode()


def test_base64_is_never_text():
    body = read(
        "chat/completions",
        messages=[{"role": "user", "content": [
            {"type": "text", "text": "what is this"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + media(2_000_000)}},
            {"type": "input_audio", "input_audio": {"data": media(3_000_000), "format": "mp3"}},
            {"type": "file", "file": {"file_data": "data:application/pdf;base64," + media(5_000_000)}},
        ]}],
    )  # fmt: skip
    assert body.content.texts == ["what is this"]
    assert 300 <= body.guess <= body.bound < 8192
    assert body.has_media


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x", "detail": "low"}}, 85),
        ({"type": "image_url", "image_url": {"url": "https://x", "detail": "high"}}, 1100),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, 1100),
        ({"type": "input_image", "image_url": "data:,", "detail": "low"}, 85),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 10**6}}, 1100),
        ({"type": "input_audio", "input_audio": {"data": "A" * 1_280_000, "format": "wav"}}, 751),
        ({"type": "input_audio", "input_audio": {"data": "A" * 1_280_000, "format": "mp3"}}, 1501),
        ({"type": "audio_url", "audio_url": {"url": "https://x"}}, 750),
        ({"type": "file", "file": {"file_id": "file-1"}}, 1000),
        ({"type": "input_file", "file_data": "A" * 2 * 10**7}, 4000),
        ({"type": "document", "source": {"type": "base64", "data": "A" * 40_000}}, 1007),
        ({"type": "video_url", "video_url": {"url": "https://x"}}, 4096),
    ],
)
def test_the_media_table(part, tokens):
    body = read("chat/completions", messages=[{"content": [part]}])
    assert body.content.media == tokens
    assert body.content.texts == []


def test_a_document_of_plain_text_is_text():
    source = {"type": "text", "media_type": "text/plain", "data": "words"}
    body = read("messages", messages=[{"content": [{"type": "document", "title": "t", "source": source}]}])
    assert sorted(body.content.texts) == ["t", "words"]


def test_anthropic_bodies():
    messages = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "one", "signature": "s" * 500},
            {"type": "tool_use", "id": "t", "name": "two", "input": {"a": ["b"]}},
            {"type": "redacted_thinking", "data": "r" * 500}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "text", "text": "three"}, {"type": "image", "source": {"type": "base64", "data": "A" * 10**6}}]}]},
    ]  # fmt: skip
    body = read("messages", max_tokens=9, system=[{"type": "text", "text": "four"}], messages=messages)
    assert body.content.texts == ["one", "two", '{"a":["b"]}', "three", "four"]
    assert (body.max_output, body.content.media, body.content.odd) == (9, 1100, False)


def test_responses_bodies():
    assert texts("responses", input="one", instructions="two") == ["one", "two"]
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "name": "three", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "four"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "five"}], "encrypted_content": "x" * 999},
    ]
    body = read("responses", input=items, tools=[], text={"format": {"type": "text"}}, previous_response_id="resp_1")
    assert body.content.texts == ["one", "two", "three", "{}", "four", "five", "[]", '{"format":{"type":"text"}}']
    assert body.previous_response_id == "resp_1"
    assert not body.content.odd


@pytest.mark.parametrize(
    ("prompt", "ids", "sequences", "found"),
    [
        ("text", 0, 1, ["text"]),
        (["a", "b"], 0, 2, ["a", "b"]),
        ([1, 2, 3], 3, 1, []),
        ([[1, 2], [3]], 3, 2, []),
        ([[1], [], [2]], 2, 3, []),
        ([[]], 0, 1, []),
        ([], 0, 1, []),
        ([1, "a", [2, 3]], 3, 3, ["a"]),
        (["123"], 0, 1, ["123"]),
        (7, 0, 1, []),
        ([1.5], 0, 1, []),
        ({"x": 1}, 0, 1, []),
    ],
)
@pytest.mark.parametrize(
    ("path", "field"), [("completions", "prompt"), ("embeddings", "input"), ("tokenize", "prompt")]
)
def test_prompt_shapes(path, field, prompt, ids, sequences, found):
    body = read(path, **{field: prompt})
    assert (body.content.ids, body.sequences, body.content.texts) == (ids, sequences, found)


def test_prompts_times_n_are_the_sequences():
    assert read("completions", prompt=["a", "b"], n=3).sequences == 6


def test_other_prompt_fields():
    assert read("detokenize", tokens=[1, 2, 3]).bound == 3
    assert texts("completions", prompt="a", suffix="b") == ["a", "b"]
    assert read("completions", prompt_embeds="A" * 10**6).bound < 200
    assert texts("tokenize", **{"messages": HI["messages"]}) == ["hi"]
    assert texts("audio/speech", input="say it", voice="v") == ["say it"]


@pytest.mark.parametrize(
    ("path", "fields", "sizes"),
    [
        ("rerank", {"query": "qq", "documents": ["a", "bcd", {"text": "ef"}]}, (3, 2 * 3 + 6)),
        ("score", {"text_1": "qq", "text_2": ["a", "b"]}, (2, 6)),
        ("score", {"text_1": ["qq", "r"], "text_2": ["a", "b"]}, (2, 5)),
        ("score", {"text_1": "qq", "text_2": "a"}, (1, 3)),
        ("score", {"queries": "qq", "documents": ["a", "b"]}, (2, 6)),
        ("score", {"queries": "qq", "items": ["a", "b"]}, (2, 6)),
        ("score", {"data_1": "qq", "data_2": ["a", "b"]}, (2, 6)),
        ("rerank", {"query": None, "documents": 7}, (1, 0)),
        ("rerank", {"query": "q"}, (1, 0)),
    ],
)
def test_pairs_cost_both_sides_each_time(path, fields, sizes):
    body = read(path, **fields)
    assert (body.sequences, body.content.text_bytes) == sizes


def test_sizes_are_of_utf8():
    body = read("completions", prompt="a€😀")
    assert (body.content.chars, body.content.text_bytes) == (3, 8)
    assert body.guess == 4


def test_more_text_than_any_context_is_measured_and_let_go():
    body = read("completions", prompt=["x" * KEPT_BYTES, "y"])
    assert not body.content.whole
    assert body.content.texts == []
    assert body.bound == KEPT_BYTES + 1
    many = read("embeddings", input=["ab"] * 20_000)
    assert (many.content.texts, many.bound, many.sequences) == ([], 40_000, 20_000)


def test_millions_of_tiny_values_are_counted_by_their_bytes():
    raw = b'{"model":"m","messages":[' + b",".join([b"{}"] * 400_000) + b"]}"
    body = read_body(CHAT, raw)
    assert body.content.odd
    assert body.bound == len(raw)
    assert body.guess <= len(raw)
    with pytest.raises(BadRequest):
        read_body(CHAT, raw.replace(b'"m"', b"7"))


def test_millions_of_token_ids_are_their_length():
    rows = b",".join([b"[" + b",".join([b"7"] * 10) + b"]"] * 250_000)
    body = read_body(ENDPOINTS["embeddings"], b'{"model":"m","input":[' + rows + b"]}")
    assert (body.content.ids, body.sequences, body.bound) == (2_500_000, 250_000, 2_500_000)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "content", "image_url", "input_audio", "file", "source", "data", "tool_calls", "x"]
            )
            | st.text(max_size=3),
            inner | st.sampled_from(["text", "image_url", "input_audio", "file", "document", "image", "tool_use"]),
            max_size=5,
        )
    ),
    max_leaves=25,
)
FIELDS = (
    "messages", "prompt", "input", "tokens", "suffix", "system", "tools", "functions", "response_format", "prediction",
    "instructions", "text", "query", "queries", "documents", "items", "text_1", "text_2", "stream_options",
    "service_tier", "background", "background_options", "previous_response_id", "prompt_embeds",
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(list(ENDPOINTS)), fields=st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_any_content_is_counted_within_its_bound(path, fields):
    body = read_body(ENDPOINTS[path], msgspec.json.encode({"model": "m", **fields}))
    assert 0 <= body.guess <= body.bound
    assert body.sequences >= 1
    assert isinstance(body.service_tier, str | None)
    assert isinstance(body.asked_usage, bool)


@given(st.lists(st.integers(0, 2**31)), st.lists(st.lists(st.integers(0, 2**31), max_size=5), min_size=1, max_size=5))
def test_token_ids_are_their_length(flat, rows):
    assert read("completions", prompt=flat).bound == len(flat)
    assert read("completions", prompt=rows).bound == sum(map(len, rows))
    assert read("completions", prompt=rows).sequences == len(rows)
