"""The reading of input files: what is accepted, each code, exact places, bounded findings and memory, and speed."""

import json
import random
import tracemalloc
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.jobs.checks import Rules, batched
from router.jobs.findings import LISTED
from router.jobs.lines import Reader
from router.jobs.opening import OPENING_BYTES, Opening
from router.jobs.store import LineError, NewJob

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def line(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields


def chat(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    return line(custom_id, body={"model": "tiny", "messages": MESSAGES} | fields)


def without(key: str, custom_id: str = "a") -> dict[str, Any]:
    return {name: value for name, value in line(custom_id).items() if name != key}


def jsonl(*lines: Any) -> bytes:
    return b"".join(raw if isinstance(raw, bytes) else json.dumps(raw).encode() + b"\n" for raw in lines)


def read(data: bytes, url: str = CHAT, step: int = 2**20, **rules: Any) -> tuple[list[NewJob], tuple[LineError, ...]]:
    reader = reader_of(url, **rules)
    jobs = [job for at in range(0, len(data), step) for job in reader.feed(data[at : at + step])]
    jobs += reader.end()
    return jobs, reader.found.told()


def reader_of(url: str = CHAT, **rules: Any) -> Reader:
    return Reader(url, Rules(**{"models": {"tiny", "other", "org/name"}.__contains__} | rules))


def codes(*lines: Any, url: str = CHAT, **rules: Any) -> list[tuple[str, int | None, str | None]]:
    return [(error.code, error.line, error.param) for error in read(jsonl(*lines), url, **rules)[1]]


def accepted(data: bytes, url: str = CHAT, **rules: Any) -> list[NewJob]:
    jobs, errors = read(data, url, **rules)
    assert errors == ()
    return jobs


def test_a_job_points_at_its_line():
    data = jsonl(line("a"), line("b"), line("ü"))
    jobs = accepted(data)
    assert [(job.line, job.custom_id, job.model) for job in jobs] == [
        (1, "a", "tiny"),
        (2, "b", "tiny"),
        (3, "ü", "tiny"),
    ]
    for job in jobs:
        assert json.loads(data[job.offset : job.offset + job.length])["custom_id"] == job.custom_id


@given(
    st.lists(st.sampled_from(["job", "blank", "spaces", "crlf"]), min_size=1, max_size=30),
    st.integers(1, 200),
    st.booleans(),
)
def test_places_are_exact_however_the_bytes_come(kinds: list[str], step: int, bom: bool):
    pieces = {"blank": b"\n", "spaces": b" \t\r\n"}
    lines = []
    for number, kind in enumerate(kinds, 1):
        raw = json.dumps(line(f"id-{number}")).encode() + (b"\r\n" if kind == "crlf" else b"\n")
        lines.append(pieces.get(kind, raw))
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(lines).removesuffix(b"\n")
    jobs, errors = read(data, step=step)
    wanted = [number for number, kind in enumerate(kinds, 1) if kind not in pieces]
    assert [job.line for job in jobs] == wanted
    assert [error.code for error in errors] == ([] if wanted else ["empty_file"])
    for job in jobs:
        assert json.loads(data[job.offset : job.offset + job.length])["custom_id"] == f"id-{job.line}"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u000b", "\u000c", "\x1c", "\x1e"])
def test_only_a_newline_ends_a_line(separator: str):
    raw = json.dumps(chat(messages=[{"role": "user", "content": f"a{separator}b"}]), ensure_ascii=ord(separator) < 32)
    (job,) = accepted(raw.encode() + b"\n")
    assert job.length == len(raw.encode())


@pytest.mark.parametrize(
    "raw", [b"{", b"[1]", b"1", b'{"a": NaN}', b'{"custom_id": "\xff"}', b"{} x", b"[" * 100_000, b'"a"']
)
def test_what_is_not_one_json_object_is_told(raw: bytes):
    assert codes(line("a"), raw + b"\n", line("b")) == [("invalid_json_line", 2, None)]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_no_json_are_told(value: str):
    raw = json.dumps(chat(temperature="X")).replace('"X"', value).encode() + b"\n"
    assert codes(raw) == [("invalid_json_line", 1, None)]


def test_invalid_utf8_in_a_body_is_told():
    assert codes(json.dumps(chat(user="X")).encode().replace(b"X", b"\xff") + b"\n") == [("invalid_json_line", 1, None)]


def test_missing_fields_are_told_with_line_and_name():
    keys = ["custom_id", "method", "url", "body"]
    told = codes(*(without(key, str(number)) for number, key in enumerate(keys)))
    assert told == [("missing_required_parameter", number, key) for number, key in enumerate(keys, 1)]
    assert codes({}) == [("missing_required_parameter", 1, key) for key in keys]
    assert codes(line(None, body=None)) == [("missing_required_parameter", 1, key) for key in ("custom_id", "body")]


WRONG = [
    (chat(stream=True), "streaming_unsupported", "body.stream"),
    (chat(background=True), "invalid_request", "body.background"),
    (line(body={"messages": MESSAGES}), "invalid_request", "body.model"),
    (line(body={"model": "tiny"}), "invalid_request", "body.messages"),
    (chat(model=None), "invalid_request", "body.model"),
    (chat(model=7), "invalid_request", "body.model"),
    (chat(model=""), "invalid_request", "body.model"),
    (chat(model="x" * 513), "invalid_request", "body.model"),
    (chat(model="a\0"), "invalid_request", "body.model"),
    (chat(model="unknown"), "model_not_found", "body.model"),
    (line(url="/v1/completions"), "invalid_url", "url"),
    (line(url="/v1/chat/completions/"), "invalid_url", "url"),
    (line(url="https://api.example/v1/chat/completions"), "invalid_url", "url"),
    (line(method="GET"), "invalid_method", "method"),
    (line(url=7), "invalid_type", "url"),
    (line(7), "invalid_type", "custom_id"),
    (line(""), "invalid_value", "custom_id"),
    (line("x" * 513), "invalid_value", "custom_id"),
    (line("a\0"), "invalid_value", "custom_id"),
    (line(body=[]), "invalid_type", "body"),
    (line(body="{}"), "invalid_type", "body"),
]


@pytest.mark.parametrize(("wrong", "code", "param"), WRONG)
def test_each_code_names_its_line_and_field(wrong: dict[str, Any], code: str, param: str):
    assert codes(line("first"), wrong) == [(code, 2, param)]


def test_two_models_in_one_body_are_told():
    raw = json.dumps(line()).replace('"model": "tiny"', '"model": "tiny", "model": "other"').encode() + b"\n"
    assert codes(raw) == [("invalid_request", 1, "body.model")]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": -1}, {"n": 0}, {"temperature": "hot"}, {"messages": "x"}, {"stream": 1}]
)
def test_a_value_the_endpoint_would_refuse_fails_alone_later(fields: dict[str, Any]):
    assert len(accepted(jsonl(line("a"), chat("b", **fields)))) == 2


def test_a_line_with_several_faults_tells_each():
    wrong = line("a", method="GET", url="/v1/x", body={"stream": True})
    assert [param for _, _, param in codes(line("a"), wrong)] == [
        "custom_id", "method", "url", "body.stream", "body.model", "body.messages",
    ]  # fmt: skip


def test_a_repeated_custom_id_is_told_with_its_first_line():
    errors = read(jsonl(line("a"), line("a"), b"\n", line("b"), line("a")))[1]
    assert [(error.code, error.line, error.param) for error in errors] == [
        ("duplicate_custom_id", number, "custom_id") for number in (2, 5)
    ]
    assert "on line 1" in errors[0].message


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n"])
def test_a_file_without_lines_is_told(data: bytes):
    assert [(error.code, error.line) for error in read(data)[1]] == [("empty_file", None)]


def test_several_models_are_allowed_or_not():
    lines = [chat("a"), chat("b", model="other"), chat("c", model="org/name"), chat("d")]
    assert len(accepted(jsonl(*lines))) == 4
    assert codes(*lines, several_models=False) == [("mismatched_model", number, "body.model") for number in (2, 3)]


def test_the_one_model_is_known():
    reader = reader_of()
    reader.feed(jsonl(chat("a"), chat("b")))
    assert reader.model == "tiny"
    reader.feed(jsonl(chat("c", model="other")))
    assert reader.model is None


def test_a_model_is_looked_up_once():
    asked: list[str] = []
    accepted(jsonl(*(chat(str(number)) for number in range(20))), models=lambda model: not asked.append(model))
    assert asked == ["tiny"]


def test_findings_are_bounded_and_the_rest_is_counted():
    lines = [line("same") for _ in range(300)]
    errors = read(jsonl(*lines))[1]
    assert len(errors) == LISTED + 1
    assert errors[-1].code == "too_many_errors"
    assert "199 more" in errors[-1].message
    assert errors[-1].line is None


def test_too_many_lines_end_the_reading():
    reader = reader_of(lines=3)
    reader.feed(jsonl(*(line(str(number)) for number in range(5))))
    assert reader.done
    assert [(error.code, error.line) for error in reader.found.told()] == [("batch_request_limit_exceeded", None)]
    assert len(accepted(jsonl(*(line(str(number)) for number in range(3)), b"\n\n"), lines=3)) == 3


@pytest.mark.parametrize("step", [7, 100, 2**20])
def test_a_line_that_is_too_long_is_told_and_not_kept(step: int):
    data = jsonl(line("a"), chat("b", user="x" * 2000), line("c"), chat("d", user="x" * 2000))
    errors = read(data, step=step, line_bytes=1000)[1]
    assert [(error.code, error.line) for error in errors] == [("invalid_request", 2), ("invalid_request", 4)]


def test_places_after_a_blank_and_a_long_line_are_exact():
    reader = reader_of(line_bytes=1000)
    data = jsonl(b"\n", chat("b", user="x" * 2000), line("c"))
    reader.feed(data)
    assert reader._offset == len(data)


OTHERS = [
    ("/v1/completions", {"model": "tiny", "prompt": "x"}, "prompt"),
    ("/v1/embeddings", {"model": "tiny", "input": ["x", "y"]}, "input"),
    ("/v1/responses", {"model": "tiny", "input": "x"}, "input"),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 5}, "messages"),
    ("/v1/rerank", {"model": "tiny", "query": "x", "documents": ["y"]}, "documents"),
]


@pytest.mark.parametrize(("url", "body", "field"), OTHERS)
def test_every_endpoint_is_read_and_its_prompt_is_needed(url: str, body: dict[str, Any], field: str):
    assert len(accepted(jsonl(line(url=url, body=body)), url)) == 1
    less = {name: value for name, value in body.items() if name != field}
    assert codes(line(url=url, body=less), url=url) == [("invalid_request", 1, f"body.{field}")]


def test_a_batch_goes_on_from_no_earlier_response():
    """Who made it is known to one process only and may be gone by the time the line runs."""
    alone = {"model": "tiny", "input": "x", "previous_response_id": None}
    assert len(accepted(jsonl(line(url="/v1/responses", body=alone)), "/v1/responses")) == 1
    for body in ({"model": "tiny", "input": "x"}, {"model": "tiny"}):
        told = codes(line(url="/v1/responses", body=body | {"previous_response_id": "resp_1"}), url="/v1/responses")
        assert ("invalid_request", 1, "body.previous_response_id") in told


def test_sample_files_of_vllm_are_accepted_unchanged():
    asks = {"model": "org/name", "max_completion_tokens": 1000}
    talk = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello world!"}]
    one, two = ({"custom_id": f"request-{n}", "method": "POST"} for n in (1, 2))
    assert accepted(jsonl(*({**one_of, "url": CHAT, "body": {**asks, "messages": talk}} for one_of in (one, two))))
    embed = {"model": "org/name", "input": "Hello world!"}
    assert accepted(jsonl({**one, "url": "/v1/embeddings", "body": embed}), "/v1/embeddings")
    score = {"model": "org/name", "queries": "capital of France?", "documents": ["Brasilia.", "Paris."]}
    older = {"model": "org/name", "text_1": "capital of France?", "text_2": ["Brasilia.", "Paris."]}
    assert accepted(
        jsonl({**one, "url": "/score", "body": score}, {**two, "url": "/v1/score", "body": older}), "/v1/score"
    )
    rank = {"model": "org/name", "query": "capital of France?", "documents": ["Brasilia.", "Paris."]}
    urls = ("/rerank", "/v1/rerank", "/v2/rerank")
    lines = ({"custom_id": url, "method": "POST", "url": url, "body": rank} for url in urls)
    assert len(accepted(jsonl(*lines), "/v1/rerank")) == 3


@pytest.mark.parametrize(
    "url", ["", "/", "/v1", "/v1/", "chat/completions", "/v1chat/completions", "/v1/models", "/v1/tokenize"]
)
def test_other_urls_are_no_endpoint_of_a_batch(url: str):
    assert batched(url) is None


def test_lines_that_begin_alike_share_a_prefix():
    def asks(system: str, user: str, role: str = "system") -> dict[str, Any]:
        return {"messages": [{"role": role, "content": system}, {"role": "user", "content": user}]}

    jobs = accepted(jsonl(chat("a", **asks("S", "1")), chat("b", **asks("S", "2")), chat("c", **asks("T", "1"))))
    a, b, c = (job.prefix for job in jobs)
    assert a == b != c
    assert all(-(2**63) <= prefix < 2**63 and prefix for prefix in (a, b, c))
    long = "x" * 2000
    jobs = accepted(jsonl(chat("a", **asks(long + "1", "", "user")), chat("b", **asks(long + "2", "", "user"))))
    assert jobs[0].prefix == jobs[1].prefix
    told = {"model": "tiny", "input": "x", "instructions": "I"}
    urls = "/v1/responses"
    jobs = accepted(jsonl(line("a", url=urls, body=told), line("b", url=urls, body=told | {"input": "y"})), urls)
    assert jobs[0].prefix == jobs[1].prefix


def test_size_is_the_prompt_in_tokens():
    short, long = accepted(jsonl(chat("a"), chat("b", messages=[{"role": "user", "content": "word " * 4000}])))
    assert short.size < 20
    assert 4000 < long.size < 6000


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "the file is empty"),
        (b"\n \r\n", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"hello\n{}", "its first line is not JSON"),
        (b'{"a":', "its first line is not JSON"),
        (b"\xff\xfe{\0}\0", "its first line is not JSON"),
        (b'\xef\xbb\xbf\n{"a": 1}\r\nrubbish', None),
        (b'{"a": 1}', None),
        (b'{"a": "' + b"x" * (OPENING_BYTES + 5), None),
        (b"x" * (OPENING_BYTES + 5), "its first line is not a JSON object"),
    ],
)
@pytest.mark.parametrize("step", [1, 65536])
def test_the_opening_of_an_upload_tells_jsonl(data: bytes, fault: str | None, step: int):
    if step == 1 and len(data) > 1000:
        step = 1000
    opening = Opening()
    for at in range(0, len(data), step):
        opening.feed(data[at : at + step])
    assert opening.fault() == fault


def test_fifty_thousand_lines_are_read_in_seconds():
    block = "".join(json.dumps(chat(f"request-@-{number:03}")) + "\n" for number in range(500))
    reader, began = reader_of(), process_time()
    jobs = sum(len(reader.feed(block.replace("@", str(number)).encode())) for number in range(100))
    assert jobs == 50_000
    assert process_time() - began < 10


def test_reading_holds_no_more_of_a_longer_file():
    text = " ".join(random.Random(7).choices(["river", "delta", "ebb", "flood", "tide"], k=4000))
    block = "".join(json.dumps(chat(f"request-@-{number}", user=text)) + "\n" for number in range(40))
    reader, size = reader_of(), 0
    tracemalloc.start()
    for number in range(80):
        piece = block.replace("@", str(number)).encode()
        size += len(piece)
        reader.feed(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 60 * 2**20
    assert peak < 12 * 2**20
