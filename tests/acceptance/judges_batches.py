"""The judgements on what the client libraries saw of batches, on the facts of one scenario of `clients/` each."""

from typing import Any

from tests.acceptance.checks import Case, batch_check
from tests.acceptance.judges_files import refused

WINDOW_S = 86_400
REQUIRED = {"id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at"}
NULLABLE = {
    "model", "errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at",
    "failed_at", "expired_at", "cancelling_at", "cancelled_at", "metadata",
}  # fmt: skip
HALF = {f"fast-{number}" for number in range(3)}, {f"slow-{number}" for number in range(4)}


def ids(facts: dict[str, Any]) -> list[str]:
    """The custom_ids of both files, sorted."""
    return sorted(line["custom_id"] for line in facts["output"] + facts["errors"])


def counts(facts: dict[str, Any]) -> tuple[int, int, int]:
    told = facts["batch"]["request_counts"]
    return told["completed"], told["failed"], told["total"]


@batch_check("C67", "batch_seen_through")
def a_batch_is_created(case: Case) -> None:
    batch = case.facts["created"]
    assert batch.keys() >= REQUIRED | NULLABLE
    assert batch["id"].startswith("batch_")
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"night": "5"})
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] == batch["created_at"] + WINDOW_S
    assert {batch[name] for name in NULLABLE - {"metadata"}} == {None}


@batch_check("C68", "batch_seen_through")
def a_batch_completes(case: Case) -> None:
    batch = case.facts["batch"]
    assert batch["status"] == "completed"
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert counts(case.facts) == (2, 1, 3)
    assert len(case.facts["output"]) == 2


@batch_check("C69", "batch_seen_through")
def a_bad_line_fails_alone(case: Case) -> None:
    assert {line["custom_id"] for line in case.facts["output"]} == {"good", "better"}
    (line,) = case.facts["errors"]
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("bad", None, 400)
    assert "max_tokens" in line["response"]["body"]["error"]["message"]


@batch_check("C70", "batch_of_failures", "python")
def a_batch_of_failures(case: Case) -> None:
    batch = case.facts["batch"]
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert counts(case.facts) == (0, 3, 3)
    assert len(case.facts["errors"]) == 3


def found(case: Case, name: str) -> list[tuple[Any, ...]]:
    """What was wrong with a batch that failed: line, code, field."""
    assert case.facts["created"][name] == "validating"
    batch = case.facts[name]["batch"]
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None), batch
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["errors"]["object"] == "list"
    assert all(error["message"] for error in batch["errors"]["data"])
    return [(error["line"], error["code"], error["param"]) for error in batch["errors"]["data"]]


@batch_check("C71", "batches_refused_later", "python")
def an_unknown_input(case: Case) -> None:
    assert found(case, "file") == [(None, "invalid_request", "file_id")]


@batch_check("C72", "batches_refused_later", "python")
def a_line_that_is_no_json(case: Case) -> None:
    assert found(case, "json") == [(2, "invalid_json_line", None)]


@batch_check("C73", "batches_refused_later", "python")
def missing_fields(case: Case) -> None:
    fields = enumerate(("custom_id", "method", "url", "body"), 1)
    assert found(case, "missing") == [(line, "missing_required_parameter", field) for line, field in fields]


@batch_check("C74", "batches_refused_later", "python")
def wrong_values(case: Case) -> None:
    assert found(case, "url") == [(2, "invalid_url", "url")]
    assert found(case, "stream") == [(1, "streaming_unsupported", "body.stream")]
    assert found(case, "unknown_model") == [(1, "model_not_found", "body.model")]
    assert found(case, "no_model") == [(1, "invalid_request", "body.model")]
    assert found(case, "no_messages") == [(1, "invalid_request", "body.messages")]


@batch_check("C75", "batches_refused_later", "python")
def a_repeated_id(case: Case) -> None:
    assert found(case, "twice") == [(3, "duplicate_custom_id", "custom_id")]


@batch_check("C76", "batches_refused_at_once", "python")
def wrong_creations(case: Case) -> None:
    message = refused(case.facts["endpoint"], 400, "BadRequestError", "invalid_value", "endpoint")
    assert "/v1/invalid" in message
    assert "/v1/chat/completions" in message
    refused(case.facts["metadata"], 400, "BadRequestError", "invalid_type", "metadata.a")
    window = refused(case.facts["window"], 400, "BadRequestError", "invalid_value", "completion_window")
    assert "completion_window" in window


def told_apart(case: Case, code: str) -> None:
    """What was done is in the output, the rest in the error file with that code and no answer."""
    done, rest = HALF
    assert {line["custom_id"] for line in case.facts["output"]} == done
    assert {line["custom_id"] for line in case.facts["errors"]} == rest
    assert {line["error"]["code"] for line in case.facts["errors"]} == {code}
    assert {line["response"] for line in case.facts["errors"]} == {None}
    assert counts(case.facts) == (3, 0, 7)


@batch_check("C77", "batch_cancelled")
def a_batch_is_cancelled(case: Case) -> None:
    first, batch = case.facts["first"], case.facts["batch"]
    assert first["status"] == "cancelling"
    assert first["cancelling_at"]
    assert first["output_file_id"] is None
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"] >= batch["in_progress_at"]
    told_apart(case, "batch_cancelled")


@batch_check("C78", "batch_cancelled")
def cancelling_twice(case: Case) -> None:
    assert case.facts["again"] in ("cancelling", "cancelled")
    assert case.facts["after"] == "cancelled"


@batch_check("C78", "cancelled_too_late")
def cancelling_too_late(case: Case) -> None:
    for status, facts in case.facts.items():
        message = refused(facts, 409, "ConflictError", None, None)
        assert f"Cannot cancel a batch with status '{status}'." in message
        assert facts["seconds"] < 1, "two more tries take longer"


@batch_check("C79", "batch_expired", "python")
def a_window_closes(case: Case) -> None:
    batch = case.facts["batch"]
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"]
    told_apart(case, "batch_expired")


@batch_check("C80", "batches_listed")
def batches_are_listed(case: Case) -> None:
    facts = case.facts
    assert facts["listed"] == facts["at_once"]
    assert facts["listed"][:3] == facts["made"][::-1]
    assert facts["times"] == sorted(facts["times"], reverse=True)
    assert len(set(facts["listed"])) == len(facts["listed"])
    assert "batch_nope" in refused(facts["unknown"], 404, "NotFoundError", None, None)


@batch_check("C81", "batch_seen_through")
def every_line_of_a_completed_batch(case: Case) -> None:
    assert ids(case.facts) == ["bad", "better", "good"]


@batch_check("C81", "batch_cancelled")
def every_line_of_a_cancelled_batch(case: Case) -> None:
    assert ids(case.facts) == sorted(HALF[0] | HALF[1])


@batch_check("C81", "batch_expired", "python")
def every_line_of_an_expired_batch(case: Case) -> None:
    assert ids(case.facts) == sorted(HALF[0] | HALF[1])


@batch_check("C82", "batch_seen_through")
def an_output_line(case: Case) -> None:
    for line in case.facts["output"]:
        assert line["id"].startswith("batch_req_")
        assert line["error"] is None
        assert (line["response"]["status_code"], bool(line["response"]["request_id"])) == (200, True)
        body = line["response"]["body"]
        assert (body["object"], body["model"]) == ("chat.completion", "tiny")
        assert body["choices"][0]["message"]["content"] == "tok0 tok1 tok2"


@batch_check("C84", "batch_seen_through", "python")
def output_expires(case: Case) -> None:
    assert (case.facts["kept"], case.facts["purpose"]) == (7200, "batch_output")


@batch_check("C85", "batch_seen_through")
def usage_adds_up(case: Case) -> None:
    usage, bodies = case.facts["batch"]["usage"], [line["response"]["body"] for line in case.facts["output"]]
    for ours, theirs in (("input", "prompt"), ("output", "completion"), ("total", "total")):
        total = sum(body["usage"][f"{theirs}_tokens"] for body in bodies)
        assert usage[f"{ours}_tokens"] == total > 0
    assert case.facts["batch"]["model"] == "tiny"


@batch_check("C86", "input_deleted", "python")
def an_input_deleted_late(case: Case) -> None:
    assert case.facts["deleted"]
    assert case.facts["batch"]["status"] == "completed"
    assert counts(case.facts) == (3, 0, 3)
