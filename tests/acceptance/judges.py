"""The judgements on what the client libraries saw. Each asserts on the facts of one scenario of `clients/`."""

import json
from typing import Any

from tests.acceptance.checks import Case, check
from tests.acceptance.world import HEAD_S
from tests.fakes.plain import vector

WORDS = "tok0 tok1 tok2 tok3 tok4"


def failed(facts: dict[str, Any], status: int, kind: str, code: str | None) -> None:
    """The facts are those of an exception of that class, status and code, with an id."""
    assert kind in facts.get("error", ()), facts
    assert (facts["status_code"], facts["code"]) == (status, code), facts
    assert facts["type"], facts
    assert facts["request_id"], facts


@check("C1", "plain")
def chat_works(case: Case) -> None:
    assert case.facts["kind"] == ("ChatCompletion" if case.sdk.runtime == "python" else "object")
    assert case.facts["text"] == WORDS


@check("C2", "without_v1")
def chat_works_without_v1(case: Case) -> None:
    assert case.facts["text"] == WORDS


@check("C3", "models")
def models_are_listed(case: Case) -> None:
    assert set(case.facts) == {name for node in case.world.nodes for name in node.models}
    for name, model in case.facts.items():
        assert (model["id"], model["object"]) == (name, "model")
        assert isinstance(model["created"], int)
        assert model["owned_by"]
    assert case.facts["tiny"]["max_model_len"] == case.world.a.context
    assert case.facts["narrow"]["max_model_len"] == case.world.narrow.context


@check("C4", "model_by_name")
def a_slash_in_a_name(case: Case) -> None:
    assert case.facts["id"] == "org/name"


@check("C4", "unknown_model")
def an_unknown_name(case: Case) -> None:
    failed(case.facts["retrieve"], 404, "NotFoundError", "model_not_found")


@check("C5", "plain", "node")
def an_object_and_not_a_string(case: Case) -> None:
    assert case.facts["kind"] == "object"


@check("C6", "request_ids")
def ids_everywhere(case: Case) -> None:
    assert all(case.facts.values()), case.facts
    assert len(set(case.facts.values())) == len(case.facts)


@check("C8", "extras")
def extras_arrive(case: Case) -> None:
    assert case.facts["text"] == WORDS
    (seen,) = case.world.seen(f"{case.user}-extras")
    assert seen.json["priority"] == 5
    assert seen.json["foo"] == {"bar": [1, None]}
    assert seen.query == "q=1"


@check("C16", "gzipped")
def gzip_is_read(case: Case) -> None:
    assert case.facts["whole"]["text"] == WORDS
    assert case.facts["stream"]["text"] == WORDS


@check("C18", "embeddings")
def embeddings_are_right(case: Case) -> None:
    assert case.facts["default"] == vector("hello")
    assert case.facts["float"] == vector("hello")


@check("C19", "prompts")
def prompts_pass(case: Case) -> None:
    assert case.facts == {"text": [0], "texts": [0, 1], "ids": [0], "lists": [0, 1]}


@check("C21", "tiers")
def tiers_tell(case: Case) -> None:
    assert (case.facts["flex"], case.facts["priority"]) == ("batch", "interactive")
    assert "error" not in case.facts["fast"], case.facts["fast"]


@check("C22", "left_while_queued")
def who_left_the_queue(case: Case) -> None:
    assert any("Timeout" in name for name in case.facts["error"])
    assert len(case.world.seen(f"{case.user}-holder")) == 1
    assert not case.world.seen(f"{case.user}-left")


@check("C24", "never_answered", "node")
def answered_in_time(case: Case) -> None:
    assert "InternalServerError" in case.facts["error"]
    assert case.facts["code"] == "upstream_timeout"
    assert case.facts["seconds"] < HEAD_S + 1


@check("C25", "tokenize")
def tokenize_both_ways(case: Case) -> None:
    assert case.facts["v1"]["count"] == case.facts["root"]["count"] == 2


@check("C27", "background", "python")
def background(case: Case) -> None:
    assert case.facts["status"] in ("queued", "in_progress")
    assert set(case.facts["fetched"]) == {case.facts["id"]}
    assert case.facts["cancelled"]["status"] == "cancelled"
    unknown = case.facts["unknown"]
    assert (unknown["status_code"], unknown["type"]) == (404, "invalid_request_error")


@check("C28", "earlier_response", "python")
def earlier(case: Case) -> None:
    assert all("id" in turn for turn in case.facts["turns"]), case.facts


@check("C29", "ways_in", "anthropic")
def every_key_form(case: Case) -> None:
    for way, facts in case.facts.items():
        assert facts.get("text") == WORDS, (way, facts)


@check("C29", "errors", "anthropic")
def anthropic_envelope(case: Case) -> None:
    expected = {"unknown": (404, "not_found_error"), "refused": (400, "invalid_request_error")}
    for name, (status, kind) in {**expected, "wrong_key": (401, "authentication_error")}.items():
        facts = case.facts[name]
        assert facts["status_code"] == status, facts
        assert facts["body"]["type"] == "error", facts
        assert facts["body"]["error"]["type"] == kind, facts


@check("C29", "counted", "anthropic")
def tokens_are_counted(case: Case) -> None:
    assert case.facts["tokens"] >= 1


@check("C30", "transcription")
def transcription(case: Case) -> None:
    assert case.facts["text"] == "what was said"


@check("C31", "stream")
def streams(case: Case) -> None:
    assert case.facts["text"].split() == [f"tok{index}" for index in range(12)]
    assert case.facts["chunks"] == 13


@check("C32", "linger")
def ends_at_done(case: Case) -> None:
    assert case.facts["text"] == WORDS
    assert case.facts["seconds"] < 1, case.facts


@check("C33", "cut")
def a_cut_is_an_error(case: Case) -> None:
    for name, facts in case.facts.items():
        assert "APIError" in facts.get("error", ()), (name, facts)
        assert facts["code"] == "upstream_error", (name, facts)
        assert facts["text"] == "tok0 tok1 tok2", (name, facts)


@check("C35", "slow")
def comments_are_not_seen(case: Case) -> None:
    assert (case.facts["text"], case.facts["chunks"], case.facts["odd"]) == (WORDS, 6, 0)


@check("C36", "dirty")
def dirt_is_not_seen(case: Case) -> None:
    assert case.facts["text"] == "clean text", case.facts
    assert (case.facts["odd"], case.facts.get("error")) == (0, None), case.facts


@check("C37", "odd_bytes")
def odd_bytes(case: Case) -> None:
    assert case.facts["crlf"]["text"] == WORDS
    assert case.facts["utf8"]["text"] == "你好🌍 \u2028 \x85 ü"


@check("C38", "usage")
def usage_when_asked(case: Case) -> None:
    assert (case.facts["asked"]["usage"] or 0) > 5
    assert case.facts["asked"]["empty"] == 1
    assert (case.facts["not"]["usage"], case.facts["not"]["empty"]) == (None, 0)


@check("C39", "stream_refused")
def a_refused_stream(case: Case) -> None:
    assert "BadRequestError" in case.facts.get("error", ()), case.facts
    assert case.facts["status_code"] == 400


@check("C40", "second_node")
def second_node(case: Case) -> None:
    assert case.facts["whole"].get("text") == WORDS, case.facts
    assert case.facts["stream"]["text"] == WORDS, case.facts


@check("C41", "responses_stream")
def responses_stream(case: Case) -> None:
    assert case.facts["events"][0] == "response.created"
    assert case.facts["events"][-1] == "response.completed"
    assert case.facts["numbers"] == list(range(len(case.facts["numbers"])))
    if case.sdk.runtime == "python":
        assert case.facts["final"] == WORDS


@check("C42", "responses_cut")
def responses_cut(case: Case) -> None:
    assert case.facts["events"][0] == "response.created", case.facts
    if case.sdk.name == "node-openai-7.59.0":
        assert "APIError" in case.facts["error"], case.facts
    else:
        assert "error" in case.facts["events"], case.facts
        assert "error" not in case.facts, case.facts


@check("C43", "leave")
def leaving_frees_the_node(case: Case) -> None:
    (seen,) = case.world.seen(f"{case.user}-leave")
    assert seen.outcome == "aborted"
    assert seen.ended is not None
    assert seen.ended - case.facts["left"] < 1


@check("C45", "streamed", "anthropic")
def anthropic_stream(case: Case) -> None:
    assert case.facts["events"][0] == "message_start"
    assert case.facts["events"][-1] == "message_stop"
    assert (case.facts["text"], case.facts["stop"]) == (WORDS, "max_tokens")


@check("C33", "cut", "anthropic")
def an_anthropic_cut_is_an_error(case: Case) -> None:
    assert case.facts["error"] in ("APIStatusError", "InternalServerError", "APIError"), case.facts


@check("C47", "error_shapes")
def error_shapes(case: Case) -> None:
    for name, facts in case.facts.items():
        assert facts["status_code"] == (404 if name == "detail" else 400), (name, facts)
        assert isinstance(facts["type"], str), (name, facts)
        assert facts["code"] is None or isinstance(facts["code"], str), (name, facts)
    assert case.facts["flat"]["message"] == "flat words"
    assert case.facts["string"]["message"] == "string words"


@check("C48", "unknown_model")
def unknown_model(case: Case) -> None:
    failed(case.facts["chat"], 404, "NotFoundError", "model_not_found")


@check("C49", "too_long")
def too_long(case: Case) -> None:
    for name, facts in case.facts.items():
        assert "error" in facts, (name, facts)
        failed(facts, 400, "BadRequestError", "context_length_exceeded")
        assert facts["message"].startswith("This model's maximum context length is"), (name, facts)


@check("C50", "wrong_key")
def wrong_key(case: Case) -> None:
    for facts in case.facts.values():
        failed(facts, 401, "AuthenticationError", "invalid_api_key")


@check("C51", "wrong_requests")
def wrong_requests(case: Case) -> None:
    expected = {"method": 405, "path": 404, "model": 404, "media": 415}
    assert {name: facts["status_code"] for name, facts in case.facts.items()} == expected
    assert all(facts["seconds"] < 0.35 for facts in case.facts.values()), "retried"


@check("C52", "asked_to_wait")
def asked_to_wait(case: Case) -> None:
    assert case.facts.get("text") == WORDS, case.facts
    assert case.facts["seconds"] > 1.3
    assert len(case.world.seen(f"{case.user}-again")) == 1


@check("C53", "final_errors")
def final_errors(case: Case) -> None:
    assert case.facts["quota"]["code"] == "insufficient_quota"
    assert case.facts["unimplemented"]["status_code"] == 501
    for name in ("quota", "unimplemented"):
        assert len(case.world.seen(f"{case.user}-{name}")) == 1, name


@check("C55", "error_shapes")
def codes_are_words(case: Case) -> None:
    assert "int" not in {type(facts["code"]).__name__ for facts in case.facts.values()}, json.dumps(case.facts)
