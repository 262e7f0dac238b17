"""What a body would put in front of a model: texts to count, and the tokens of everything that is not text.

Counting never judges validity: a shape nobody knows is counted as the text in it, or a small constant, and marked
`odd`; the engine validates. Rules:

- texts are collected first and measured once; over `KEPT_BYTES` or `KEPT_TEXTS` only their sizes are kept;
- media by the table in `media`, never by the length of their base64;
- token ids are their length and are never built as objects;
- a body of millions of tiny values is counted by its bytes (`opaque`), so that reading cannot multiply memory.
"""

from typing import Any, Self

import msgspec

from router.core.media import MEDIA

__all__ = ["KEPT_BYTES", "Content", "is_flood"]

KEPT_BYTES = 8 * 2**20  # of UTF-8; twice the text of a million tokens, more than any context
KEPT_TEXTS = 16_384
DEPTH = 16
MESSAGE = 5  # Llama-3's template: <|start_header_id|> role <|end_header_id|> \n\n ... <|eot_id|>
ANSWER_HEAD = 4  # <|begin_of_text|> and the header of the answer
TOOL_CALL = 8
UNKNOWN_PART = 16

FLOOD_FROM = 2**20
FLOOD_CONTAINERS = 200_000
FLOOD_VALUES = 4_000_000

#: Keys whose values are text to a model, in every dialect.
TEXT_KEYS = frozenset((
    "arguments", "code", "content", "function", "input", "name", "output", "query", "reasoning", "reasoning_content",
    "refusal", "summary", "text", "thinking", "title", "tool_calls",
))  # fmt: skip

#: `type` of parts, blocks and items that are text by the keys above.
TEXT_TYPES = frozenset((
    "custom", "custom_tool_call", "custom_tool_call_output", "function", "function_call", "function_call_output",
    "input_text", "item_reference", "message", "output_text", "reasoning", "reasoning_text", "redacted_thinking",
    "refusal", "summary_text", "text", "thinking", "tool_addition", "tool_reference", "tool_removal", "tool_result",
    "tool_use",
))  # fmt: skip

_IDS_AND_PUNCTUATION = b"0123456789-,[] \t\r\n"
_SPACE = b" \t\r\n"


def is_flood(raw: bytes) -> bool:
    """Would building every value of `raw` cost many times its length in memory?"""
    if len(raw) < FLOOD_FROM:
        return False
    if raw.count(b"{") + raw.count(b"[") > FLOOD_CONTAINERS:
        return True
    return len(raw) > FLOOD_VALUES and raw.count(b",") > FLOOD_VALUES


class Content(msgspec.Struct):
    """A running sum over one body; call `measure` when all is added.

    `texts` are still to be counted, `times` how often the model reads each (empty: once); both are dropped, and `whole`
    is False, when there is too much. `chars` and `text_bytes` (UTF-8) are the size of all text, repeats included.
    `ids`, `media` and `overhead` are tokens; `prompts` is how many sequences the body starts, before `n`.
    """

    texts: list[str] = []
    times: list[int] = []
    chars: int = 0
    text_bytes: int = 0
    ids: int = 0
    media: int = 0
    overhead: int = 0
    prompts: int = 1
    odd: bool = False
    whole: bool = True

    def __repr__(self) -> str:
        return f"Content(text_bytes={self.text_bytes}, ids={self.ids}, media={self.media})"  # never what somebody wrote

    @classmethod
    def of_messages(cls, texts: list[str]) -> Self:
        """Chat messages that are each one text, measured."""
        together = "".join(texts)
        chars = len(together)
        size = chars if together.isascii() else len(together.encode())
        content = cls(texts, chars=chars, text_bytes=size, overhead=ANSWER_HEAD + MESSAGE * len(texts))
        if size > KEPT_BYTES or len(texts) > KEPT_TEXTS:
            content.texts, content.whole = [], False
        return content

    def measure(self) -> None:
        """Sum up the texts, and let go of them if they are too many to count."""
        chars, size = _sizes(self.texts, self.times)
        self.chars += chars
        self.text_bytes += size
        if size > KEPT_BYTES or len(self.texts) > KEPT_TEXTS:
            self.texts, self.times, self.whole = [], [], False

    def opaque(self, size: int) -> None:
        """Add `size` bytes that nobody will look into."""
        self.chars += size
        self.text_bytes += size
        self.odd = True
        self.whole = False

    def json(self, value: object) -> None:
        """Add a value that templates render as its JSON (tools, schemas, arguments)."""
        self.texts.append(msgspec.json.encode(value).decode())

    def messages(self, messages: object) -> None:
        """Add chat or Anthropic messages, or Responses items."""
        self.overhead += ANSWER_HEAD
        if type(messages) is not list:
            self.tree(messages)
            return
        self.overhead += MESSAGE * len(messages)
        for message in messages:
            if type(message) is dict and len(message) == 2 and type(text := message.get("content")) is str:
                self.texts.append(text)
            else:
                self.tree(message)

    def tree(self, value: object, depth: int = 0) -> None:
        """Add whatever `value` holds."""
        if type(value) is str:
            self.texts.append(value)
        elif depth > DEPTH:
            self._unknown()
        elif type(value) is dict:
            self._part(value, depth + 1)
        elif type(value) is list:
            for item in value:
                self.tree(item, depth + 1)
        elif value is not None:
            self.overhead += 1

    def _part(self, part: dict[str, Any], depth: int) -> None:
        kind = part.get("type")
        if kind is not None and not self._has_text(part, kind, depth):
            return
        for key, value in part.items():
            if key not in TEXT_KEYS:
                continue
            if type(value) is dict and key in ("input", "arguments"):
                self.json(value)
                continue
            if type(value) is list and key == "tool_calls":
                self.overhead += TOOL_CALL * len(value)
            self.tree(value, depth)

    def _has_text(self, part: dict[str, Any], kind: object, depth: int) -> bool:
        """Account for the part's type; False when that was all there is to count."""
        media = MEDIA.get(kind) if type(kind) is str else None
        if media is None:
            if type(kind) is not str or kind not in TEXT_TYPES:
                self._unknown()
            return True
        source = part.get("source")
        if kind == "document" and type(source) is dict and source.get("type") in ("text", "content"):
            self.tree(source.get("content", source.get("data")), depth)
            return True
        self.media += media(part)
        return False

    def _unknown(self) -> None:
        self.odd = True
        self.overhead += UNKNOWN_PART

    def token_ids(self, raw: msgspec.Raw) -> bool:
        """Add `raw` if it holds nothing but integers in lists, which valid JSON lets us count by its commas."""
        start = bytes(memoryview(raw)[:64]).lstrip(b"[" + _SPACE)[:1]
        if start not in b"-0123456789]":
            return False
        packed = bytes(raw)
        if packed[:1] != b"[" or packed.translate(None, _IDS_AND_PUNCTUATION):
            return False
        packed = packed.translate(None, _SPACE)
        self.ids += packed.count(b",") + 1 - packed.count(b"[]")
        if packed.startswith(b"[["):
            self.prompts = packed.count(b"[") - 1
        return True

    def prompt(self, value: object) -> None:
        """Add a prompt of text or texts. Each element is one sequence."""
        if type(value) is not list:
            self.tree(value)
            return
        if any(type(item) is not int for item in value):
            self.prompts = len(value)
        for item in value:
            self._sequence(item)

    def _sequence(self, item: object) -> None:
        if type(item) is int:
            self.ids += 1
        elif type(item) is list and all(type(number) is int for number in item):
            self.ids += len(item)
        else:
            self.tree(item)

    def pairs(self, left: object, right: object) -> None:
        """Add a rerank or score: every pair is one sequence, and a side given once is read with each of the other."""
        one, two = _listed(left), _listed(right)
        self.prompts = max(1, len(one), len(two))
        for side in (one, two):
            times = -(-self.prompts // len(side)) if side else 1
            single = Content()
            for item in side:
                single.tree(item)
            self.texts += single.texts
            self.times += [times] * len(single.texts)
            self.media += single.media * times
            self.overhead += single.overhead * times
            self.odd |= single.odd


def _sizes(texts: list[str], times: list[int]) -> tuple[int, int]:
    """Characters, and bytes of UTF-8, of texts that are read so many times (empty: once)."""
    if times:
        chars = sum([len(text) * often for text, often in zip(texts, times, strict=True)])
        return chars, sum([_bytes_of(text) * often for text, often in zip(texts, times, strict=True)])
    chars = sum(map(len, texts))
    return chars, chars if all(map(str.isascii, texts)) else sum(map(_bytes_of, texts))


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _listed(value: object) -> list[Any]:
    if value is None:
        return []
    return value if type(value) is list else [value]
