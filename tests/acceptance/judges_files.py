"""The judgements on what the client libraries saw of files. Each asserts on the facts of one scenario of `clients/`."""

from typing import Any

from tests.acceptance.checks import Case, batch_check

MONTH_S = 2_592_000
KEYS = {"id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status", "status_details"}


def refused(facts: dict[str, Any], status: int, kind: str, code: str | None, param: str | None) -> str:
    """The facts are those of an exception of that class with these; its message."""
    assert kind in facts.get("error", ()), facts
    told = facts["status_code"], facts["type"], facts["code"], facts["param"]
    assert told == (status, "invalid_request_error", code, param), facts
    assert facts["request_id"], facts
    return str(facts["message"])


@batch_check("C56", "file_created", "python")
def a_file_is_created(case: Case) -> None:
    file = case.facts["file"]
    assert file.keys() >= KEYS
    assert file["id"].startswith("file-")
    told = {name: file[name] for name in ("object", "bytes", "filename", "purpose", "status")}
    assert told == {
        "object": "file",
        "bytes": case.facts["size"],
        "filename": "night.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert file["expires_at"] == file["created_at"] + MONTH_S


@batch_check("C57", "file_sent_in_pieces")
def a_file_is_streamed_in(case: Case) -> None:
    sent, stored = case.facts["sizes"]
    assert sent == stored
    assert case.facts["same"]
    assert case.facts["name"] == ("in.jsonl" if case.sdk.runtime == "python" else "night.jsonl")


@batch_check("C58", "file_expires")
def a_file_expires_when_told(case: Case) -> None:
    assert case.facts["seconds"] == 7200
    codes = ("integer_below_min_value", "integer_above_max_value")
    for facts, code in zip(case.facts["wrong"], codes, strict=True):
        refused(facts, 400, "BadRequestError", code, "expires_after.seconds")


@batch_check("C59", "files_listed")
def files_are_listed(case: Case) -> None:
    facts = case.facts
    assert facts["by_two"] == facts["at_once"] == facts["ascending"][::-1]
    assert [file for file in facts["ascending"] if file in facts["made"]] == facts["made"]
    assert facts["more"] == [True] * (len(facts["more"]) - 1) + [False]
    assert len(facts["more"]) == -(-len(facts["by_two"]) // 2)
    assert set(facts["purposes"]) == {"user_data"}
    assert 3 <= len(facts["purposes"]) < len(facts["by_two"])
    assert facts["first"] == facts["made"][-1]
    assert facts["after"] == facts["by_two"][1:]


@batch_check("C60", "file_content")
def content_comes_back(case: Case) -> None:
    assert case.facts["same"]
    assert case.facts["text"]
    assert case.facts["lines"] == [{"b": 2}]
    assert case.facts["disposition"] == "attachment; filename=\"n_cht.jsonl\"; filename*=UTF-8''n%C3%A4cht.jsonl"


@batch_check("C61", "file_deleted")
def a_file_is_deleted_once(case: Case) -> None:
    first = case.facts["first"]
    assert (first["object"], first["deleted"]) == ("file", True)
    refused(case.facts["second"], 404, "NotFoundError", None, "id")


@batch_check("C62", "unknown_file")
def an_unknown_file(case: Case) -> None:
    assert case.facts.keys() == {"retrieve", "content", "delete"}
    for facts in case.facts.values():
        assert "No such File object: file-nope" in refused(facts, 404, "NotFoundError", None, "id")


@batch_check("C63", "wrong_files", "python")
def what_is_not_jsonl(case: Case) -> None:
    for name in ("name", "empty", "first"):
        message = refused(case.facts[name], 400, "BadRequestError", None, None)
        assert message.startswith("Invalid file format for Batch API. Must be .jsonl"), name
    assert case.facts["later"]["made"] == "processed"


@batch_check("C64", "waited", "python")
def waiting_is_short(case: Case) -> None:
    assert case.facts["status"] == "processed"
    assert case.facts["seconds"] < 4, "the SDK looks every 5 s"


@batch_check("C65", "uploaded_in_parts", "python")
def a_file_in_parts(case: Case) -> None:
    for name in ("upload", "md5"):
        upload = case.facts[name]
        assert (upload["object"], upload["status"], upload["bytes"]) == ("upload", "completed", case.facts["size"])
        assert (upload["file"]["bytes"], upload["file"]["purpose"]) == (case.facts["size"], "batch")
        assert upload["file"]["filename"] == "long.jsonl"
    assert case.facts["same"]
    for name in ("short", "wrong_md5"):
        assert "BadRequestError" in case.facts[name]["error"], case.facts[name]


@batch_check("C75", "uploaded_in_parts", "python")
def a_file_that_is_too_large(case: Case) -> None:
    assert case.facts["too_long"]["status_code"] in (400, 413), case.facts["too_long"]
