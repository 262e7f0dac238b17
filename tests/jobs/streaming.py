"""Takes unstreamed answers apart into the events an engine would have streamed, in as many ways as Hypothesis likes."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
TEXT = st.text(max_size=12)
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def pieces(draw: Draw, whole: Any) -> list[Any]:
    """A string or list cut anywhere, empty cuts included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    edges = [0, *cuts, len(whole)]
    return [whole[start:stop] for start, stop in pairwise(edges)]


def chunked(draw: Draw, raw: bytes) -> list[bytes]:
    """The bytes in network pieces."""
    step = draw(st.sampled_from([1, 2, 7, 64, len(raw) or 1]))
    return [raw[at : at + step] for at in range(0, len(raw), step)]


# answers


def tool_call(draw: Draw, number: int) -> dict[str, Any]:
    function = {"name": draw(st.sampled_from(["look", "add"])), "arguments": draw(TEXT)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def logprobs(draw: Draw) -> dict[str, Any] | None:
    tokens = draw(st.lists(TEXT, max_size=3))
    entries = [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in tokens]
    return draw(st.sampled_from([None, {"content": entries, "refusal": None}]))


def message(draw: Draw) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
    for field in draw(st.sets(st.sampled_from(["reasoning_content", "reasoning", "refusal", "novelty"]))):
        said[field] = draw(st.text(min_size=1, max_size=8))
    calls = [tool_call(draw, number) for number in range(draw(st.integers(0, 3)))]
    if calls:
        said["tool_calls"] = calls
    if len(said) > 2 and not said["content"]:
        said["content"] = None
    return said


def ending(draw: Draw) -> dict[str, Any]:
    reason = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))
    return {"finish_reason": reason, "stop_reason": draw(st.sampled_from([None, 7, "END"]))}


def frame(draw: Draw, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "prompt_tokens_details": None}
    extra = {"system_fingerprint": draw(st.sampled_from([None, "fp"])), "service_tier": "default", "x_unknown": [1]}
    return {"id": "a-1", "object": kind, "created": 5, "model": "m", "choices": choices, "usage": usage, **extra}


@st.composite
def chats(draw: Draw) -> dict[str, Any]:
    choices = [
        {"index": index, "message": message(draw), "logprobs": logprobs(draw), **ending(draw)}
        for index in range(draw(st.integers(1, 3)))
    ]
    return frame(draw, "chat.completion", choices)


@st.composite
def completions(draw: Draw) -> dict[str, Any]:
    tokens = st.lists(TEXT, max_size=3)
    choices = []
    for index in range(draw(st.integers(1, 3))):
        words = draw(tokens)
        told = {"tokens": words, "token_logprobs": [-1.0] * len(words), "text_offset": list(range(len(words)))}
        choices.append({"index": index, "text": draw(TEXT), "logprobs": draw(st.sampled_from([None, told]))})
        choices[-1] |= {"token_ids": [1, 2, 3][: len(words)], **ending(draw)}
    return frame(draw, "text_completion", choices)


# apart


def streamed(draw: Draw, whole: dict[str, Any]) -> bytes:
    """The answer as events: choices interleaved, usage in an event of its own."""
    kind = whole["object"].replace("chat.completion", "chat.completion.chunk")
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": kind}
    lines = [list(_parts(draw, choice)) for choice in whole["choices"]]
    order = draw(st.permutations([at for at, line in enumerate(lines) for _ in line]))
    events = [event({**head, "choices": [lines[at].pop(0)], "obfuscation": "xx"}) for at in order]
    tail = {key: value for key, value in whole.items() if key not in (*head, "choices")}
    events.append(event({**head, "choices": [], **tail}))
    comment = draw(st.sampled_from([b"", b": keep-alive\n\n"]))
    return comment + b"".join(events) + draw(st.sampled_from([b"", DONE]))


def _parts(draw: Draw, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    index = {"index": choice["index"]}
    deltas = list(_deltas(draw, choice["message"]) if "message" in choice else _texts(draw, choice))
    probs = list(_logprobs(draw, choice["logprobs"]))
    ids = pieces(draw, choice["token_ids"]) if "token_ids" in choice else []
    empty = {"delta": {}} if "message" in choice else {"text": ""}
    for at in range(max(len(deltas), len(probs), len(ids))):
        part = dict(deltas[at] if at < len(deltas) else empty)
        part["logprobs"] = probs[at] if at < len(probs) else None
        if ids:
            part["token_ids"] = ids[at] if at < len(ids) else None
        yield {**index, **part, "finish_reason": None}
    yield {**index, **empty, "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def _texts(draw: Draw, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from ({"text": piece} for piece in pieces(draw, choice["text"]))


def _logprobs(draw: Draw, told: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    if told is not None:
        lists = {key: pieces(draw, value) for key, value in told.items() if value is not None}
        for at in range(max(len(cuts) for cuts in lists.values())):
            step = {key: cuts[at] if at < len(cuts) else [] for key, cuts in lists.items()}
            yield step | {key: None for key, value in told.items() if value is None}


def _deltas(draw: Draw, said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"delta": {"role": "assistant", "content": draw(st.sampled_from(["", None]))}}
    for field, value in said.items():
        if field not in ("role", "tool_calls"):
            yield from ({"delta": {field: piece}} for piece in pieces(draw, value or ""))
    for number, call in enumerate(said.get("tool_calls", ())):
        first, *rest = pieces(draw, call["function"]["arguments"])
        opening = {"index": number, **call, "function": {"name": call["function"]["name"], "arguments": first}}
        yield {"delta": {"tool_calls": [opening]}}
        for piece in rest:
            repeated = draw(st.sampled_from([{}, {"id": call["id"], "type": "function"}, {"id": None}]))
            yield {"delta": {"tool_calls": [{"index": number, **repeated, "function": {"arguments": piece}}]}}
