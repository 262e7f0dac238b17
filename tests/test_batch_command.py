"""`ebbtide batch` against a real desk for files and batches; the runner's part is played by the test."""

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.errors import EbbtideError
from router.tools import batch as command
from tests.http.counter import Counter, bad, good, jsonl, line, open_counter


@pytest.fixture
async def counter(tmp_path, monkeypatch):
    async with open_counter(tmp_path) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{made.port}/v1/")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-ann")
        monkeypatch.setattr(command, "POLL_S", (0.02, 0.05))
        yield made


def arguments(action: str, target: object, **options: Any) -> argparse.Namespace:
    told = {
        "url": None,
        "endpoint": None,
        "window": "24h",
        "metadata": None,
        "wait": False,
        "json": False,
        "webhook": None,
    }
    return argparse.Namespace(action=action, target=str(target), **{**told, "output": None, "errors": None, **options})


async def run(action: str, target: object, **options: Any) -> int:
    """The command, in a thread of its own: it brings its own loop."""
    return await asyncio.to_thread(command.run, arguments(action, target, **options))


async def play(counter: Counter, answer: Callable[..., Any]) -> None:
    """Check and run batches until cancelled, once there is one."""
    while True:
        if (await counter.ask("GET", "/v1/batches")).json["data"]:
            await counter.check()
            await counter.work(answer)
        await asyncio.sleep(0.02)


def a_file(home: Path, *lines: Any) -> Path:
    path = home / "lines.jsonl"
    path.write_bytes(jsonl(*(lines or (line("a"), line("b")))))
    return path


async def waited(counter: Counter, file: Path, answer: Callable[..., Any] = good, **options: Any) -> int:
    playing = asyncio.create_task(play(counter, answer))
    try:
        return await run("submit", file, wait=True, **options)
    finally:
        playing.cancel()


async def test_a_file_is_submitted_waited_for_and_its_results_saved(counter, tmp_path, capsys):
    place = tmp_path / "out.jsonl"
    assert await waited(counter, a_file(tmp_path), output=place, metadata=[("team", "night")]) == 0
    answers = [json.loads(found) for found in place.read_bytes().splitlines()]
    assert {found["custom_id"] for found in answers} == {"a", "b"}
    assert not place.with_name("out.jsonl.part").exists()
    said = capsys.readouterr()
    assert said.out == ""
    assert "completed: 2 of 2 lines answered" in said.err
    assert "completed: 2/2 lines, 0 failed" in said.err
    (batch,) = (await counter.ask("GET", "/v1/batches")).json["data"]
    assert batch["metadata"] == {"team": "night"}


async def test_lines_that_failed_are_told_by_the_exit_status(counter, tmp_path):
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    mixed = lambda job: bad(job) if job.custom_id == "b" else good(job)  # noqa: E731
    assert await waited(counter, a_file(tmp_path), mixed, output=out, errors=errors) == 1
    assert json.loads(out.read_bytes())["custom_id"] == "a"
    assert json.loads(errors.read_bytes())["custom_id"] == "b"


async def test_a_bad_file_is_told_line_by_line(counter, tmp_path, capsys):
    file = a_file(tmp_path, line("a"), line("a"))
    assert await waited(counter, file) == 1
    assert "line 2: The custom_id 'a' was used before" in capsys.readouterr().out


async def test_status_results_and_cancel_by_id(counter, tmp_path, capsysbinary):
    assert await run("submit", a_file(tmp_path), json=True) == 0
    batch_id = json.loads(capsysbinary.readouterr().out)["id"]
    await counter.check()
    assert await run("status", batch_id) == 0
    assert capsysbinary.readouterr().out.split() == [batch_id.encode(), b"in_progress", b"0/2", b"0", b"failed"]
    with pytest.raises(EbbtideError, match="add --wait"):
        await run("results", batch_id)
    await counter.work(good, limit=1)
    assert await run("cancel", batch_id) == 0
    await counter.sweep()
    capsysbinary.readouterr()
    assert await run("results", batch_id) == 0
    assert json.loads(capsysbinary.readouterr().out)["error"] is None


@pytest.mark.parametrize(
    ("action", "target", "words"),
    [
        ("status", "batch_none", "the service answered 404: No batch found"),
        ("submit", "missing.jsonl", None),
    ],
)
async def test_what_is_refused_is_told_in_the_services_words(counter, tmp_path, action, target, words):
    with pytest.raises(EbbtideError if words else FileNotFoundError, match=words):
        await run(action, target if words else tmp_path / target)


async def test_nobody_there_is_told_with_the_url(tmp_path, monkeypatch):
    with pytest.raises(EbbtideError, match=r"http://127\.0\.0\.1:9/v1: no answer"):
        await run("status", "batch_1", url="http://127.0.0.1:9/v1")


async def test_a_service_that_is_away_for_a_moment_is_waited_for(counter, tmp_path, monkeypatch):
    looks = 0
    real = command.Counter.look

    async def look(self: command.Counter, batch_id: str) -> command.Batch:
        nonlocal looks
        looks += 1
        if looks < 4:
            return await real(command.Counter(client=self.client, url="http://127.0.0.1:9/v1", key=None), batch_id)
        return await real(self, batch_id)

    monkeypatch.setattr(command.Counter, "look", look)
    assert await waited(counter, a_file(tmp_path)) == 0
    assert looks >= 4


async def test_a_first_line_that_is_no_request_names_no_endpoint(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('\n{"custom_id": "a"}\n')
    with pytest.raises(EbbtideError, match="the first line is not a request"):
        await run("submit", file, url="http://127.0.0.1:9/v1")
