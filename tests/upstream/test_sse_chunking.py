"""Any chunking of a stream gives the same bytes and the same attributes."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.call import Protocol
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

PIECES = [
    ROLE, STOP, USAGE, DONE, token(b"a"), token(b"b", index=1), token("\u2028\u4f60".encode()), token(b"x" * 700),
    token(b"a").replace(b"\n", b"\r\n"), token(b"a").replace(b"\n", b"\r"), b"\n", b"\r", b"\r\n", b"\n\n", b"id: 1\n",
    b": c\n", b"retry: 3\n\n", b"event: ping\n", b"data:", b"data: \n\n", b"data: [DONE] \n\n", b"\xef\xbb\xbf",
    data(b'{"error":"x"}'), data(b'{"error":{"message":"boom","code":1}}'), data(b"{"), RESPONSES, MESSAGES, COMPLETION,
    ROLE.replace(b'"choices"', b'"prompt_progress":{"total":9},"choices"'), LLAMACPP_CHAT,
    token(b"a").replace(b'":', b'": '), token(b"b").replace(b'":', b'": '), named(b"error", b'{"message":"x"}'),
    b"x" * 320, b"y" * 301 + b"\n\n",
]  # fmt: skip
ATTRIBUTES = (
    "meaningful", "failure", "errored", "done", "complete", "usage", "tokens", "oversized", "response_id",
    "sequence_number",
)  # fmt: skip

streams = st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=6)), max_size=12).map(b"".join)
options = st.fixed_dictionaries(
    {
        "drop_usage": st.booleans(),
        "drop_progress": st.booleans(),
        "rename": st.sampled_from([None, (b"m", b"other-name")]),
        "cap": st.sampled_from([300, 2**20]),
    }
)


def outcome(protocol: Protocol, chunks: list[bytes], chosen: dict) -> tuple[bytes, list[object]]:
    events = Events(protocol, **chosen)
    out = b"".join([events.feed(chunk) for chunk in chunks])
    events.end()
    return out, [getattr(events, name) for name in ATTRIBUTES]


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({min(edge, len(stream)) for edge in at} | {0, len(stream)})
    return [stream[start:stop] for start, stop in pairwise(edges)]


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(Protocol), streams, st.lists(st.integers(0, 4000), max_size=12), options)
@example(Protocol.CHAT, VLLM_CHAT, [1, 2, 3], {"cap": 300})
@example(Protocol.CHAT, b"data: x\r\r\n\n\rdata: y\n\n", [8, 9, 10, 11], {})
def test_chunking_does_not_matter(protocol, stream, at, chosen):
    expected = outcome(protocol, [stream], chosen)
    assert outcome(protocol, cut(stream, at), chosen) == expected
    assert outcome(protocol, [stream[i : i + 1] for i in range(len(stream))], chosen) == expected


@settings(max_examples=120, deadline=None)
@given(streams, options)
def test_chat_output_is_always_readable(stream, chosen):
    out, _ = outcome(Protocol.CHAT, [stream], chosen | {"cap": 2**20})
    assert out == b"" or out.endswith(b"\n\n")
    assert b"\r" not in out
    for block in out.split(b"\n\n")[:-1]:
        assert block
        lines = block.split(b"\n")
        assert all(line.startswith((b"data", b":")) for line in lines)
        values = [line.partition(b":")[2].strip() for line in lines if line.startswith(b"data")]
        assert any(values) or not values
    assert out.count(DONE) <= 1


@settings(max_examples=100, deadline=None)
@given(streams)
def test_reading_twice_changes_nothing_more(stream):
    once, _ = outcome(Protocol.CHAT, [stream], {})
    twice, _ = outcome(Protocol.CHAT, [once], {})
    assert twice == once
