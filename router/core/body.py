"""What a request body says about its call: the few fields that routing needs, and the size of what it carries.

The bytes themselves are forwarded as they came; this is a side reading. It refuses only what no engine could take or
what two readers could take differently (`wellformed`), and wrong types of the fields that decide where a call goes.
Everything else about the body is the engine's to judge, and is counted here whatever its shape (`content`).

Reading costs a few microseconds for a chat message and grows with the body; over `LONG_BODY` bytes call `read_body` in
a thread. It touches nothing shared, so any number of threads may.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Self

import msgspec

from router.core.call import Endpoint
from router.core.content import FLOOD_FROM, Content, is_flood
from router.core.media import audio_tokens, embeds_tokens
from router.core.wellformed import check_form, not_json
from router.errors import BadRequest

__all__ = ["LONG_BODY", "Body", "read_body"]

LONG_BODY = 2**20
MODEL_CHARACTERS = 512
MOST_SEQUENCES = 128  # OpenAI's limit of `n`
MOST_OUTPUT = 2**31 - 1  # larger wishes mean "no limit"; a node's context clamps them
FLOOD_REST = 4096  # bytes beside token ids that are settings rather than content
_BOM = b"\xef\xbb\xbf"

_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_ABSENT = msgspec.Raw(b"")


class _Routing(msgspec.Struct):
    """What routing needs of any body, and the fields that may hold token ids, undecoded. Unknown keys are skipped."""

    model: str | None = None
    stream: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_SEQUENCES)] | None = None
    max_completion_tokens: _NotNegative | None = None
    max_tokens: _NotNegative | None = None
    max_output_tokens: _NotNegative | None = None
    stream_options: Any = None
    service_tier: Any = None
    background: Any = None
    background_options: Any = None
    previous_response_id: Any = None
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    tokens: msgspec.Raw = _ABSENT


class _Fields(_Routing):
    """The union of what the endpoints' bodies hold that bears on size."""

    messages: Any = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None
    prediction: Any = None
    system: Any = None
    instructions: Any = None
    suffix: Any = None
    prompt_embeds: msgspec.Raw = _ABSENT
    text: Any = None
    query: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message that is one text."""

    role: Any
    content: str


class _TextChat(_Fields):
    """A chat of such messages, which has nothing else to count: whatever else it might hold does not decode."""

    messages: list[_Message] = []
    tools: None = None
    functions: None = None
    response_format: None = None
    prediction: None = None
    system: None = None
    documents: None = None


_text_of = attrgetter("content")
_decode_text_chat = msgspec.json.Decoder(_TextChat).decode
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_routing = msgspec.json.Decoder(_Routing).decode
_decode = msgspec.json.decode

_WANTED = {
    "model": "a string",
    "stream": "true or false",
    "n": f"an integer from 1 to {MOST_SEQUENCES}",
    "max_completion_tokens": "an integer of 0 or more",
    "max_tokens": "an integer of 0 or more",
    "max_output_tokens": "an integer of 0 or more",
}
_AT = re.compile(r"`\$\.([a-z_]+)")
_GOT = re.compile(r"got `(\w+)`")


class Body(msgspec.Struct, frozen=True):
    """One body, read.

    `max_output` is the caller's limit of tokens for one sequence (max_completion_tokens, else max_tokens, else
    max_output_tokens), None without one. `content` is what there is to count: no count is above `bound`, because no
    tokenizer makes more tokens than there are bytes, and `guess` is one from sizes alone, within it. `stated`: the body
    may say who waits for it, in `service_tier`, `background` or `completion_window`.
    """

    model: str
    stream: bool
    max_output: int | None
    n: int
    content: Content
    bound: int
    guess: int
    stated: bool
    _fields: _Routing

    def __repr__(self) -> str:
        return f"Body({self.model!r}, bound={self.bound})"  # never what somebody wrote

    @classmethod
    def for_form(cls, model: str | None, stream: bool, size: int) -> Self:
        """A multipart body with `size` bytes of audio, whose form is read elsewhere. Raises BadRequest."""
        return cls.of(_Routing(model=model, stream=stream), Content(media=audio_tokens(size)))

    @classmethod
    def of(cls, fields: _Routing, content: Content) -> Self:
        """The body of these fields and this content, measured. Raises BadRequest without a model to send it to.

        A guess is four characters a token, and half a token more for each further byte of a character: 1.25 for a
        Chinese character (cl100k_base: 1.0 to 1.7), 0.75 for a Cyrillic one (0.5), 1.75 for an emoji (2 to 3).
        """
        model = fields.model
        if not model or len(model) > MODEL_CHARACTERS:
            raise _wrong_model(model)
        limit = fields.max_completion_tokens
        if limit is None:
            limit = fields.max_tokens if fields.max_tokens is not None else fields.max_output_tokens
        size, fixed = content.text_bytes, content.ids + content.media + content.overhead
        return cls(
            model,
            fields.stream is True,
            limit if limit is None or limit < MOST_OUTPUT else MOST_OUTPUT,
            fields.n or 1,
            content,
            size + fixed,
            fixed + (2 * size - content.chars + 3) // 4,
            fields.service_tier is not None or fields.background is not None or fields.background_options is not None,
            fields,
        )

    @property
    def sequences(self) -> int:
        """Prompts x `n`."""
        return self.content.prompts * self.n

    @property
    def fixed(self) -> int:
        """Tokens of all that is not text."""
        return self.bound - self.content.text_bytes

    @property
    def has_media(self) -> bool:
        """Images, audio or files: the count is a guess, and no ratio should be learnt from it."""
        return self.content.media > 0

    @property
    def service_tier(self) -> str | None:
        return _text(self._fields.service_tier)

    @property
    def background(self) -> bool:
        return self._fields.background is True

    @property
    def completion_window(self) -> str | None:
        """`background_options.completion_window`."""
        options = self._fields.background_options
        return _text(options.get("completion_window")) if type(options) is dict else None

    @property
    def previous_response_id(self) -> str | None:
        """The earlier response whose hidden context this call continues."""
        return _text(self._fields.previous_response_id)

    @property
    def has_stream_options(self) -> bool:
        return self._fields.stream_options is not None

    @property
    def asked_usage(self) -> bool:
        """`stream_options.include_usage`."""
        options = self._fields.stream_options
        return type(options) is dict and options.get("include_usage") is True


def read_body(endpoint: Endpoint, raw: bytes) -> Body:
    """Read `raw`, the body of a POST to `endpoint`.

    Raises BadRequest, and nothing else, naming the field in `param` with code `missing_required_parameter`,
    `invalid_type` or `invalid_value`; both are None when the body is not a JSON object in UTF-8.
    """
    try:
        if endpoint.path == "chat/completions" and len(raw) < FLOOD_FROM:
            try:
                chat = _decode_text_chat(raw)
            except msgspec.DecodeError:
                pass  # another body than a chat of texts and nothing else, or none
            else:
                check_form(raw)
                return Body.of(chat, Content.of_messages(list(map(_text_of, chat.messages))))
        raw = raw.removeprefix(_BOM)
        fields, content = _read_any(endpoint, raw)
        check_form(raw)
        return Body.of(fields, content)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError:
        raise not_json("it is not valid JSON" if raw else "it is empty") from None
    except RecursionError:
        raise not_json("it is nested too deeply") from None


def _read_any(endpoint: Endpoint, raw: bytes) -> tuple[_Routing, Content]:
    content = Content()
    if is_flood(raw):
        fields = _decode_routing(raw)
        _read_flood(fields, content, len(raw))
        content.measure()
        return fields, content
    whole = _decode_fields(raw)
    _READERS.get(endpoint.path, _read_plain)(whole, content)
    content.measure()
    whole.messages = whole.documents = None  # let go of pictures in base64
    return whole, content


def _wrong_field(error: str) -> BadRequest:
    """Put msgspec's finding in OpenAI's words; the value itself is never repeated."""
    at, got = _AT.search(error), _GOT.search(error)
    if at is None:
        kind = got[1] if got else "other value"
        return BadRequest(f"The body must be a JSON object with a 'model', but it is a JSON {kind}.")
    field = at[1]
    wanted = _WANTED.get(field, "a number within the range of JSON readers")
    if got:
        message = f"Invalid type for '{field}': expected {wanted}, but got {got[1]} instead."
        return BadRequest(message, param=field, code="invalid_type")
    return BadRequest(f"Invalid value for '{field}': expected {wanted}.", param=field, code="invalid_value")


def _wrong_model(model: str | None) -> BadRequest:
    if model is None:
        return BadRequest("You must provide a model parameter.", param="model", code="missing_required_parameter")
    wanted = f"a name of 1 to {MODEL_CHARACTERS} characters"
    return BadRequest(f"Invalid value for 'model': expected {wanted}.", param="model", code="invalid_value")


def _text(value: object) -> str | None:
    return value if type(value) is str else None


def _read_chat(fields: _Fields, content: Content) -> None:
    content.messages(fields.messages)
    if fields.tools is not None:
        content.json(fields.tools)
    if fields.functions is not None:
        content.json(fields.functions)
    if fields.response_format is not None:
        content.json(fields.response_format)
    if fields.prediction is not None:
        content.tree(fields.prediction)
    if fields.documents is not None:
        content.tree(fields.documents)
    if fields.system is not None:
        content.tree(fields.system)


def _read_responses(fields: _Fields, content: Content) -> None:
    content.messages(_value(fields.input))
    content.tree(fields.instructions)
    for schema in (fields.tools, fields.text):
        if schema is not None:
            content.json(schema)


def _read_prompts(fields: _Fields, content: Content) -> None:
    for prompt in (fields.prompt, fields.input, fields.tokens):
        if prompt is not _ABSENT and not content.token_ids(prompt):
            content.prompt(_decode(prompt))
    content.tree(fields.suffix)
    if fields.prompt_embeds is not _ABSENT:
        content.media += embeds_tokens(memoryview(fields.prompt_embeds).nbytes)
    if fields.messages is not None:
        _read_chat(fields, content)


def _read_pairs(fields: _Fields, content: Content) -> None:
    sides = (
        (fields.query, fields.documents),
        (fields.queries, fields.items if fields.documents is None else fields.documents),
        (fields.text_1, fields.text_2),
        (fields.data_1, fields.data_2),
    )
    for left, right in sides:
        if left is not None and right is not None:
            content.pairs(left, right)
            return


def _read_plain(fields: _Fields, content: Content) -> None:
    for value in (_value(fields.input), fields.text, fields.instructions):
        content.tree(value)


def _read_flood(fields: _Routing, content: Content, size: int) -> None:
    for prompt in (fields.prompt, fields.input, fields.tokens):
        if prompt is not _ABSENT and content.token_ids(prompt):
            size -= memoryview(prompt).nbytes
    if size > FLOOD_REST:
        content.opaque(size)


def _value(raw: msgspec.Raw) -> object:
    return None if raw is _ABSENT else _decode(raw)


_READERS: dict[str, Callable[[_Fields, Content], None]] = {
    "chat/completions": _read_chat,
    "messages": _read_chat,
    "messages/count_tokens": _read_chat,
    "completions": _read_prompts,
    "embeddings": _read_prompts,
    "tokenize": _read_prompts,
    "detokenize": _read_prompts,
    "responses": _read_responses,
    "rerank": _read_pairs,
    "score": _read_pairs,
}
