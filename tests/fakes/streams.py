"""What a healthy engine says when it generates: whole answers and events, for the four generating endpoints.

Shapes follow vLLM 0.32 as recorded (chat, completions, tokenise) and the published event lists of OpenAI's Responses
and Anthropic's Messages. An answer is built from what was asked and never looks at a socket.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.script import Script

CREATED = 1_795_964_362
DONE = b"data: [DONE]\n\n"


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def data_event(value: Any) -> bytes:
    return b"data: " + compact(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + compact(value) + b"\n\n"


@dataclass(kw_only=True)
class Asked:
    """What an answer is made from."""

    id: str
    model: str
    body: dict[str, Any]
    script: Script
    tokens: int
    prompt_tokens: int

    def word(self, index: int) -> str:
        return f"{' ' if index else ''}{self.script.word}{index}"

    @property
    def text(self) -> str:
        return "".join(self.word(index) for index in range(self.tokens))

    @property
    def finish(self) -> str:
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        return "length" if limit == self.tokens else "stop"

    @property
    def counts(self) -> tuple[int, int]:
        return self.script.usage or (self.prompt_tokens, self.tokens)

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = self.counts
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    @property
    def wants_usage(self) -> bool:
        options = self.body.get("stream_options") or {}
        return bool(options.get("include_usage")) and self.script.send_usage


@dataclass
class Answer:
    """One answer: `early` events at once, `opening` with the first token, then tokens, then `closing`."""

    asked: Asked

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def early(self) -> list[bytes]:
        return []

    def opening(self) -> list[bytes]:
        return []

    def token(self, index: int, *, last: bool) -> bytes:
        raise NotImplementedError

    def closing(self) -> list[bytes]:
        return []

    def failure(self, error: dict[str, Any]) -> bytes:
        """An error inside a 200, as this protocol frames it."""
        return data_event(error)


class Chat(Answer):
    """`chat.completion` and its chunks."""

    def _chunk(self, delta: dict[str, Any], index: int = 0, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._frame([choice])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.asked.id, "object": "chat.completion.chunk", "created": CREATED, "model": self.asked.model}
        return {**head, "choices": choices}

    @property
    def _choices(self) -> int:
        return int(self.asked.body.get("n") or 1)

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.asked.text, "refusal": None, "tool_calls": None}
        choices = [
            {"index": index, "message": message, "logprobs": None, "finish_reason": self.asked.finish}
            for index in range(self._choices)
        ]
        head = {"id": self.asked.id, "object": "chat.completion", "created": CREATED, "model": self.asked.model}
        tail = {"service_tier": None, "system_fingerprint": "fake-1", "usage": self.asked.usage}
        return {**head, "choices": choices, **tail, "prompt_logprobs": None}

    def opening(self) -> list[bytes]:
        if not self.asked.script.role_event:
            return []
        delta = {"role": "assistant", "content": ""}
        return [data_event(self._chunk(delta, index)) for index in range(self._choices)]

    def token(self, index: int, *, last: bool) -> bytes:
        finish = self.asked.finish if last and self.asked.script.finish else None
        delta = {"content": self.asked.word(index)}
        return b"".join(data_event(self._chunk(delta, choice, finish)) for choice in range(self._choices))

    def closing(self) -> list[bytes]:
        events = [data_event({**self._frame([]), "usage": self.asked.usage})] if self.asked.wants_usage else []
        return [*events, DONE] if self.asked.script.done else events


class Completion(Answer):
    """`text_completion`: one choice for every prompt and `n`."""

    @property
    def _choices(self) -> int:
        prompt = self.asked.body.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return (len(prompt) if many and prompt else 1) * int(self.asked.body.get("n") or 1)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.asked.id, "object": "text_completion", "created": CREATED, "model": self.asked.model}
        return {**head, "choices": choices}

    def _choice(self, text: str, index: int, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(self.asked.text, index, self.asked.finish) for index in range(self._choices)]
        return {**self._frame(choices), "usage": self.asked.usage}

    def token(self, index: int, *, last: bool) -> bytes:
        finish = self.asked.finish if last and self.asked.script.finish else None
        word = self.asked.word(index)
        return b"".join(data_event(self._frame([self._choice(word, at, finish)])) for at in range(self._choices))

    def closing(self) -> list[bytes]:
        events = [data_event({**self._frame([]), "usage": self.asked.usage})] if self.asked.wants_usage else []
        return [*events, DONE] if self.asked.script.done else events


@dataclass
class Responses(Answer):
    """OpenAI's Responses: named events, `sequence_number` from 0, no [DONE]."""

    _sequence: int = field(default=0)

    def object(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = {"type": "output_text", "text": text or "", "annotations": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
        prompt, completion = self.asked.counts
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        head = {"id": self.asked.id, "object": "response", "created_at": CREATED, "status": status}
        body = {"model": self.asked.model, "output": [] if text is None else [item], "error": None}
        flags = {"background": bool(self.asked.body.get("background")), "parallel_tool_calls": True, "tools": []}
        extra = {"incomplete_details": None, "instructions": None, "metadata": {}, "tool_choice": "auto"}
        return {**head, **body, **flags, **extra, "usage": usage if status == "completed" else None}

    def _event(self, type_: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event({"type": type_, "sequence_number": number, **fields})

    def whole(self) -> dict[str, Any]:
        return self.object("completed", self.asked.text)

    def early(self) -> list[bytes]:
        kinds = ("created", "in_progress")
        return [self._event(f"response.{kind}", response=self.object("in_progress")) for kind in kinds]

    def opening(self) -> list[bytes]:
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        place: dict[str, Any] = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=part),
        ]

    def token(self, index: int, *, last: bool) -> bytes:
        place: dict[str, Any] = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=self.asked.word(index), logprobs=[])

    def closing(self) -> list[bytes]:
        if not self.asked.script.finish:
            return []
        whole = self.whole()
        item = whole["output"][0]
        place: dict[str, Any] = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        return [
            self._event("response.output_text.done", **place, text=self.asked.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=item["content"][0]),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event("response.completed", response=whole),
        ]

    def failure(self, error: dict[str, Any]) -> bytes:
        said = error.get("error", error)
        return self._event("error", code=str(said.get("code")), message=said.get("message"), param=None)


class Messages(Answer):
    """Anthropic's Messages, with a `ping` as the real service sends it."""

    def _message(self, content: list[dict[str, Any]], stop: str | None, output: int) -> dict[str, Any]:
        usage = {"input_tokens": self.asked.counts[0], "output_tokens": output}
        head = {"id": self.asked.id, "type": "message", "role": "assistant", "model": self.asked.model}
        return {**head, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}

    @property
    def _stop(self) -> str:
        return "max_tokens" if self.asked.finish == "length" else "end_turn"

    def whole(self) -> dict[str, Any]:
        return self._message([{"type": "text", "text": self.asked.text}], self._stop, self.asked.counts[1])

    def opening(self) -> list[bytes]:
        block = {"type": "text", "text": ""}
        return [
            named_event({"type": "message_start", "message": self._message([], None, 0)}),
            named_event({"type": "content_block_start", "index": 0, "content_block": block}),
            named_event({"type": "ping"}),
        ]

    def token(self, index: int, *, last: bool) -> bytes:
        delta = {"type": "text_delta", "text": self.asked.word(index)}
        return named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self) -> list[bytes]:
        if not self.asked.script.finish:
            return []
        usage = {"output_tokens": self.asked.counts[1]}
        delta = {"stop_reason": self._stop, "stop_sequence": None}
        return [
            named_event({"type": "content_block_stop", "index": 0}),
            named_event({"type": "message_delta", "delta": delta, "usage": usage}),
            named_event({"type": "message_stop"}),
        ]

    def failure(self, error: dict[str, Any]) -> bytes:
        said = error.get("error", error)
        return named_event({"type": "error", "error": {"type": "api_error", "message": said.get("message")}})


#: Path below /v1 -> how it answers.
GENERATING: dict[str, Callable[[Asked], Answer]] = {
    "chat/completions": Chat,
    "completions": Completion,
    "responses": Responses,
    "messages": Messages,
}
