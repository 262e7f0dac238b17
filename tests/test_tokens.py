"""Counting: exact where it matters, bounded always, and never in the way of the loop."""

import asyncio
import json
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import tokens as counting
from router.core.body import Body, read_body
from router.core.call import ENDPOINTS
from router.tokens import BACKLOG_BYTES, INLINE_BYTES, SHORT_BYTES, SLICE, Tokens

CHAT = ENDPOINTS["chat/completions"]


@pytest.fixture(scope="module")
def tokens():
    counter = Tokens.load()
    yield counter
    counter.close()


def saying(*texts: str) -> Body:
    return read_body(ENDPOINTS["completions"], json.dumps({"model": "m", "prompt": list(texts)}).encode())


async def exact(tokens: Tokens, *texts: str) -> int:
    return await tokens.count(saying(*texts), decide_at=0)


async def test_the_shipped_vocabulary_is_sound(tokens):
    assert tokens.exact
    assert await exact(tokens, "hello world") == 2
    assert await exact(tokens, "tiktoken is great!") == 6
    assert await exact(tokens, "お誕生日おめでとう") == 9


async def test_control_tokens_are_plain_text(tokens):
    for text in ("<|endoftext|>", "<|im_start|>", "<|fim_prefix|>", "<|endoftext|> <|im_start|> <|fim_prefix|>"):
        assert 1 < await exact(tokens, text) <= len(text)


async def test_a_small_prompt_far_from_the_decision_is_guessed(tokens):
    body = saying("word " * 100)
    assert tokens.guesses(body, decide_at=8192)
    assert await tokens.count(body, decide_at=8192) == body.guess == 125
    assert not tokens.guesses(body, decide_at=499)
    assert await tokens.count(body, decide_at=499) == 101


async def test_a_longer_prompt_is_counted_for_its_room(tokens):
    assert not tokens.guesses(saying("x" * (SHORT_BYTES + 1)), decide_at=10**9)


async def test_media_and_ids_add_to_the_text(tokens):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages = [{"content": [{"type": "text", "text": "hello world"}, image]}]
    body = read_body(CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert await tokens.count(body, decide_at=0) == 2 + body.fixed
    ids = read_body(ENDPOINTS["completions"], b'{"model":"m","prompt":[[1,2],[3]]}')
    assert await tokens.count(ids, decide_at=0) == 3


async def test_pairs_are_counted_as_often_as_they_are_read(tokens):
    raw = json.dumps({"model": "m", "query": "hello world", "documents": ["yes", "no", "so"]}).encode()
    assert await tokens.count(read_body(ENDPOINTS["rerank"], raw), decide_at=0) == 3 * 2 + 3


HARD = {
    "spaces": " ",
    "lines": "\n",
    "mixed space": " \n\t",
    "one letter": "a",
    "marks": "^",
    "accents": "\u0301",
    "emoji": "😀",
    "chinese": "漢字",
    "digits": "7",
}


@pytest.mark.parametrize("unit", HARD.values(), ids=HARD)
async def test_a_million_of_anything_is_counted_within_bounds(tokens, unit):
    body = saying(unit * (1_000_000 // len(unit)) + "x")
    started = time.monotonic()
    assert 0 < await tokens.count(body, decide_at=0) <= tokens.bound(body)
    assert time.monotonic() - started < 20


async def test_cuts_hardly_change_a_count(tokens):
    prose = "The tide that came in with the evening went out again before anybody had seen it. " * 2000
    whole = len(tokens._encoding.encode_ordinary(prose))
    assert len(prose) > 4 * SLICE
    assert whole <= await exact(tokens, prose) <= whole + 5


async def test_too_much_text_is_guessed(tokens):
    body = saying("word " * 2_000_000)
    assert tokens.guesses(body, decide_at=0)
    assert await tokens.count(body, decide_at=0) == body.guess


async def test_a_full_backlog_is_not_joined(tokens):
    bodies = [saying("word " * 400_000) for _ in range(8)]
    counts = await asyncio.gather(*(tokens.count(body, decide_at=0) for body in bodies))
    at_once = BACKLOG_BYTES // bodies[0].content.text_bytes
    assert [count == 400_001 for count in counts] == [True] * at_once + [False] * (8 - at_once)
    assert counts[-1] == bodies[-1].guess
    assert await exact(tokens, "word " * 400_000) == 400_001


async def test_leaving_while_counted_gives_the_backlog_back(tokens):
    tasks = [asyncio.ensure_future(exact(tokens, "word " * 400_000)) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tokens._waiting_bytes == 0


async def test_the_loop_goes_on_while_long_prompts_are_counted(tokens):
    bodies = [saying("Some words of a long document, 1234. " * 25_000) for _ in range(4)]
    late, done = [], asyncio.Event()

    async def watch():
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - before - 0.005)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        await asyncio.gather(*(tokens.count(body, decide_at=0) for body in bodies))
        done.set()
    assert len(late) > 10
    assert sorted(late)[int(0.99 * len(late))] < 0.1


@pytest.mark.parametrize("vocabulary", [None, b"", b"broken", b"IQ== 0\n"])
async def test_without_a_sound_vocabulary_counts_are_guesses(monkeypatch, tmp_path, vocabulary):
    (tmp_path / "data").mkdir()
    if vocabulary is not None:
        (tmp_path / "data" / counting.VOCABULARY).write_bytes(vocabulary)
    monkeypatch.setattr(counting.resources, "files", lambda _package: tmp_path)
    counting._encoding.cache_clear()
    guessing = Tokens.load()
    body = saying("word " * 20_000)
    assert not guessing.exact
    assert await guessing.count(body, decide_at=0) == body.guess == 25_000
    guessing.close()


async def test_after_closing_counts_are_guesses():
    closed = Tokens.load()
    closed.close()
    body = saying("word " * 20_000)
    assert await closed.count(body, decide_at=0) == body.guess


async def test_closing_while_counting_neither_raises_nor_waits_long():
    closing = Tokens.load()
    bodies = [saying("word " * 300_000) for _ in range(4)]
    counts = [asyncio.ensure_future(closing.count(body, decide_at=0)) for body in bodies]
    await asyncio.sleep(0.01)
    started = time.monotonic()
    closing.close()
    assert time.monotonic() - started < 2
    for body, count in zip(bodies, await asyncio.gather(*counts), strict=True):
        assert 0 < count <= body.bound


async def test_a_panic_of_the_encoder_is_a_guess():
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_ordinary(self, _text):
            raise PanicException

    panicking = Tokens(Panicking())
    for body in (saying("word " * 4000), saying("word " * 40_000)):
        assert await panicking.count(body, decide_at=0) == body.guess
    panicking.close()


def test_importing_reads_no_vocabulary_and_loading_needs_no_network(monkeypatch):
    program = (
        "import socket, builtins, router.tokens as t\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse; socket.getaddrinfo = refuse\n"
        "assert t.Tokens.load().exact\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
    monkeypatch.setattr(socket.socket, "connect", None)
    counting._encoding.cache_clear()
    assert Tokens.load().exact


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(max_size=300), max_size=6), decide_at=st.integers(0, 10_000))
async def test_any_text_is_counted_within_its_bound(tokens, texts, decide_at):
    body = saying(*texts)
    assert 0 <= await tokens.count(body, decide_at=decide_at) <= tokens.bound(body)


@settings(max_examples=20, deadline=None)
@given(unit=st.text(min_size=1, max_size=20), times=st.integers(1, 5000))
async def test_any_repetition_is_counted_within_its_bound(tokens, unit, times):
    body = saying((unit * times)[: 3 * INLINE_BYTES])
    assert 0 <= await tokens.count(body, decide_at=0) <= tokens.bound(body)
