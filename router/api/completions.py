"""From a request to its answer: read the body once, count, classify, open the call, send what comes.

Rules:
- Who calls and what the body claims to be are judged before a byte of it is read.
- The body is read by routing once and goes on as it came; on `/responses` one value of it may be replaced.
- The call's block is left before the last bytes are sent, so that a slow client does not hold a node's room.
- Whatever goes wrong is told once, here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from random import getrandbits
from typing import Any

import msgspec
import structlog

from router.api import headers
from router.api.auth import Caller
from router.api.forms import read_form
from router.api.headers import Heading
from router.api.house import House
from router.api.owners import with_known_tier
from router.api.presence import Presence, Watch, too_large
from router.api.replies import Answering
from router.api.turn import Turn
from router.core.body import LONG_BODY, Body, read_body
from router.core.call import Call, Endpoint, Protocol, Reason, Workload
from router.core.classify import classify
from router.core.estimate import Estimate
from router.errors import Answer, BadRequest, ClientLeft, Internal, NodeFailed, UnsupportedContentType

TRANSCRIPT_TOKENS = 448
"""Most tokens of one transcription: Whisper's decoder has this many positions."""
_FREE = frozenset(("tokenize", "detokenize", "messages/count_tokens"))
"""Answered by a node's tokenizer, without room on its device."""
_JSON = b"application/json"
_USAGE_ON_WISH = frozenset(("chat/completions", "completions"))

Asking = Callable[[str, Presence], Awaitable[Call]]

log = structlog.get_logger()


class Asked(msgspec.Struct):
    """One request, read: who asks what of which endpoint, and the bytes of it."""

    id: str
    endpoint: Endpoint
    heading: Heading
    caller: Caller
    query: bytes
    raw: bytes


class Size(msgspec.Struct, kw_only=True, gc=False):
    """Tokens of one request, as the model's own would have it.

    `prompt` of all prompts, `each` of one, `least` what the longest surely has and `upper` what it hardly exceeds;
    `output` of one sequence, at most.
    """

    prompt: int
    each: int
    least: int
    upper: int
    output: int


class Completions:
    """Serves every path whose answer comes from a node."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._watch = Watch(house.terms)

    def create(self, endpoint: Endpoint, turn: Turn) -> Coroutine[Any, Any, None]:
        """Serve a POST to `endpoint`; await it."""
        return self.serve(endpoint.protocol, partial(self._read, endpoint, turn), turn)

    async def serve(self, protocol: Protocol, ask: Asking, turn: Turn) -> None:
        """Make a call with `ask` and send its answer, or the reason why there is none."""
        request_id = f"req_{getrandbits(128):032x}"
        presence = Presence(turn, self._watch)
        answering = Answering(turn, presence, protocol, request_id, self._house.metrics.streams)
        try:
            with presence:
                try:
                    await self._answer(await ask(request_id, presence), answering)
                except Answer as answer:
                    await answering.fail(answer)
                except NodeFailed as error:
                    await answering.cut(error)
                except ClientLeft:
                    return
                except Exception:
                    log.error("request failed through a fault of ours", request_id=request_id, exc_info=True)
                    await answering.fail(Internal("The router failed to serve this request."))
        except ClientLeft:
            return
        except Answer as answer:
            await answering.fail(answer)

    async def _answer(self, call: Call, answering: Answering) -> None:
        answering.expect(call)
        owners = self._house.owners if call.endpoint.protocol is Protocol.RESPONSES else None
        async with self._house.dispatcher.open(call) as reply:
            if owners is not None:
                owners.note(call, reply)
            held = await answering.pour(reply)
            if owners is not None:
                owners.note(call, reply)
        await answering.finish(reply, held)

    async def _read(self, endpoint: Endpoint, turn: Turn, request_id: str, presence: Presence) -> Call:
        house = self._house
        heading = headers.read(turn.headers)
        caller = house.keyring.caller(turn.headers)
        limit = house.terms.request_body_bytes
        _check(endpoint, heading, limit)
        raw = presence.whole_body(limit)
        if raw is None:
            raw = await presence.body(limit)
        read = partial(read_form, heading.content_type) if endpoint.multipart else partial(read_body, endpoint)
        if len(raw) > LONG_BODY:
            body = await asyncio.get_running_loop().run_in_executor(house.reader, read, raw)
        else:
            body = read(raw)
        asked = Asked(request_id, endpoint, heading, caller, turn.query, raw)
        call = await self._call(asked, body)
        if not heading.retried:
            house.metrics.classified(call)
        return call

    async def _call(self, asked: Asked, body: Body) -> Call:
        endpoint, caller, heading = asked.endpoint, asked.caller, asked.heading
        stateful = endpoint.protocol is Protocol.RESPONSES
        earlier = self._house.owners.earlier(caller, body) if stateful else None
        counted, exact = self._guessed(endpoint, body), False
        if counted is None:
            counted, exact = await self._counted(body)
        size = self._size(endpoint, body, counted, 0 if earlier is None else earlier.tokens)
        workload, reason = self._workload(asked, body, size.each)
        return Call(
            id=asked.id,
            endpoint=endpoint,
            model=body.model,
            body=with_known_tier(asked.raw, body) if stateful else asked.raw,
            prompt_tokens=size.prompt,
            output_tokens=size.output,
            workload=workload,
            reason=reason,
            caller=caller.name,
            stream=body.stream,
            sequences=0 if endpoint.path in _FREE else body.sequences,
            counted=counted if exact and earlier is None else 0,
            least_tokens=size.least,
            context_tokens=size.upper,
            asked=body.max_output,
            deadline_s=None if body.stream else heading.deadline_s,
            query=asked.query,
            content_type=heading.content_type if endpoint.multipart else _JSON,
            headers=heading.passed,
            ask_usage=body.stream and not body.has_stream_options and endpoint.path in _USAGE_ON_WISH,
            bound_to=None if earlier is None else earlier.node,
            fallback=caller.fallback,
        )

    def _workload(self, asked: Asked, body: Body, prompt_tokens: int) -> tuple[Workload, Reason]:
        return classify(
            header=asked.heading.workload,
            key_class=asked.caller.workload,
            job=False,
            body=body,
            prompt_tokens=prompt_tokens,
            long_prompt_tokens=self._house.terms.long_prompt_tokens,
            interactive_context=self._house.fleet.interactive_context(body.model),
        )

    def _guessed(self, endpoint: Endpoint, body: Body) -> int | None:
        """Tokens of a body where a guess will do, else None."""
        if endpoint.path in _FREE:
            return 0
        return body.guess if self._house.tokens.guesses(body, decide_at=self._decide_at(body)) else None

    async def _counted(self, body: Body) -> tuple[int, bool]:
        """Tokens of a body, and whether they are worth comparing with a node's count."""
        tokens, decide_at = self._house.tokens, self._decide_at(body)
        counted = await tokens.count(body, decide_at=decide_at)
        return counted, tokens.teaches(body, decide_at=decide_at)

    def _decide_at(self, body: Body) -> int:
        """The smallest number of tokens at which a count changes what is done."""
        shortest, long_prompt = self._house.fleet.shortest_context(body.model), self._house.terms.long_prompt_tokens
        return long_prompt if shortest is None or shortest > long_prompt else shortest

    def _size(self, endpoint: Endpoint, body: Body, counted: int, hidden: int) -> Size:
        """Measure a body. `hidden` are tokens of the conversation it goes on with, which its node keeps."""
        estimate = self._house.estimates.of(body.model)
        prompts = max(1, body.content.prompts)
        prompt = estimate.prompt(counted) + hidden
        return Size(
            prompt=prompt,
            each=prompt // prompts,
            least=_least(body, prompt),
            upper=estimate.upper(counted) // prompts + hidden,
            output=_output(endpoint, body, estimate),
        )


def _check(endpoint: Endpoint, heading: Heading, limit: int) -> None:
    """Raise UnsupportedContentType or TooLarge for what the head alone tells."""
    wanted = b"multipart/form-data" if endpoint.multipart else _JSON
    length, told = heading.content_length, heading.content_type
    if told != wanted and told.partition(b";")[0].strip().lower() != wanted:
        if length == 0:
            raise BadRequest("We could not parse the JSON body of your request: it is empty.")
        shown = wanted.decode()
        raise UnsupportedContentType(f"Unsupported content type. This path reads '{shown}'.")
    if heading.encoded:
        raise UnsupportedContentType("Compressed request bodies are not read. Send it without Content-Encoding.")
    if length is not None and length > limit:
        raise too_large(limit)


def _output(endpoint: Endpoint, body: Body, estimate: Estimate) -> int:
    if endpoint.generates:
        return estimate.output(body.max_output)
    return TRANSCRIPT_TOKENS if endpoint.multipart else 0


def _least(body: Body, prompt_tokens: int) -> int:
    """What the longest prompt of the body surely has: ids count as they are, text at least half of its estimate."""
    content = body.content
    text = max(0, prompt_tokens - content.ids - content.media)
    return (content.ids + text // 2) // max(1, content.prompts)
