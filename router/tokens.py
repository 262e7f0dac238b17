"""Counts tokens without stalling the loop, raising, or asking the network.

The vocabulary is OpenAI's cl100k_base and ships as package data; `core.estimate` learns what a model's own tokenizer
makes of a count. Text that looks like a special token is text. The exact count is skipped, and `Body.guess` given, when

- it decides nothing: the byte bound is within `decide_at` and the text is at most `SHORT_BYTES`, so that the room is
  wrong by less than a small prompt;
- there is too much: over 8 MiB of text, which is above any context;
- there is no time: more than `BACKLOG_BYTES` of text already wait for the counting threads;
- there is no vocabulary: `exact` is False.

Text up to `INLINE_BYTES` is counted at once (2 ms of prose, 10 ms at the worst), longer text in two threads; tiktoken
lets go of the interpreter while it encodes. Text is cut into slices, because tiktoken panics at a million spaces in a
row and so that no thread holds the interpreter long. A cut may split one token in two.
"""

import asyncio
import hashlib
from binascii import a2b_base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from itertools import repeat

import tiktoken

from router.core.body import Body
from router.core.content import Content

__all__ = ["Tokens"]

VOCABULARY = "cl100k_base.tiktoken"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
SHORT_BYTES = 8 * 2**10
INLINE_BYTES = 32 * 2**10
INLINE_TEXTS = 512
BACKLOG_BYTES = 8 * 2**20
THREADS = 2
SLICE = 32 * 2**10  # characters
SEAM = 256  # characters before a cut in which a space is looked for


class Tokens:
    """The counter. `load` it once; `close` it when the loop is done."""

    def __init__(self, encoding: tiktoken.Encoding | None) -> None:
        self._encoding = encoding
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._waiting_bytes = 0
        self._closed = False

    @classmethod
    def load(cls) -> "Tokens":
        """Read the vocabulary (0.2 s of CPU, once a process). Without a sound one every count is a guess."""
        try:
            return cls(_encoding())
        except (OSError, ValueError):
            return cls(None)

    @property
    def exact(self) -> bool:
        """Is there a vocabulary?"""
        return self._encoding is not None

    def close(self) -> None:
        """Stop counting; later counts are guesses. Waits for at most one slice in each thread."""
        self._closed = True
        self._threads.shutdown()

    def bound(self, body: Body) -> int:
        """No count of `body` is above this. Free."""
        return body.bound

    def guesses(self, body: Body, *, decide_at: int) -> bool:
        """Would `count` give a guess, the load of the moment aside?"""
        content = body.content
        if content.text_bytes <= SHORT_BYTES and body.bound <= decide_at:
            return True
        return self._encoding is None or self._closed or not content.whole

    def teaches(self, body: Body, *, decide_at: int) -> bool:
        """Whether `count` is worth comparing with a node's own: of text that is counted, without guesses of media."""
        return not body.has_media and bool(body.content.texts) and not self.guesses(body, decide_at=decide_at)

    async def count(self, body: Body, *, decide_at: int) -> int:
        """Tokens of `body`, from 0 to `bound(body)`; never raises.

        `decide_at` is the smallest number of tokens at which the answer changes what is done: the least of the limit of
        long prompts and the contexts of the nodes in question.
        """
        content = body.content
        if not content.texts or self.guesses(body, decide_at=decide_at):
            return body.guess
        if content.text_bytes <= INLINE_BYTES and len(content.texts) <= INLINE_TEXTS:
            counted = self._encode(content)
        else:
            counted = await self._encode_aside(content)
        return body.guess if counted is None else body.fixed + min(counted, content.text_bytes)

    async def _encode_aside(self, content: Content) -> int | None:
        if self._waiting_bytes + content.text_bytes > BACKLOG_BYTES:
            return None
        self._waiting_bytes += content.text_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, content)
        except RuntimeError:
            return None
        finally:
            self._waiting_bytes -= content.text_bytes

    def _encode(self, content: Content) -> int | None:
        """Tokens of the texts, or None when they could not be counted."""
        encoding, total = self._encoding, 0
        if encoding is None:
            return None
        try:
            for text, times in zip(content.texts, content.times or repeat(1), strict=False):
                for piece in _slices(text):
                    if self._closed:
                        return None
                    total += times * len(encoding.encode_ordinary(piece))
        except BaseException as error:
            # A panic in tiktoken's Rust is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                return None
            raise
        return total


def _slices(text: str) -> Iterator[str]:
    """Cut `text` before a space where there is one near, since tokens begin with their space."""
    at = 0
    while len(text) - at > SLICE:
        end = at + SLICE
        seam = text.rfind(" ", end - SEAM, end)
        cut = seam if seam > at else end
        yield text[at:cut]
        at = cut
    yield text[at:] if at else text


@cache
def _encoding() -> tiktoken.Encoding:
    """Raises ValueError when the file is not the vocabulary, OSError when it is not there."""
    vocabulary = resources.files("router").joinpath("data", VOCABULARY).read_bytes()
    if hashlib.sha256(vocabulary).hexdigest() != SHA256:
        raise ValueError(f"{VOCABULARY} is not the file it should be")
    words = vocabulary.split()  # token, rank, token, rank
    ranks = dict(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    return tiktoken.Encoding("cl100k_base", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
