"""From a request to its answer: read the body once, count, classify, open the call, send what comes.

Rules:
- Who calls and what the body claims to be are judged before a byte of it is read.
- The body is read by routing once and goes on as it came; on `/responses` one value of it may be replaced.
- The call's block is left before the last bytes are sent, so that a slow client does not hold a node's room.
- Whatever goes wrong is told once, here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import getrandbits

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
from router.core.call import Call, Endpoint, Protocol
from router.core.classify import classify
from router.dispatch.reply import Reply
from router.errors import Answer, BadRequest, ClientLeft, Internal, NodeFailed, UnsupportedContentType

TRANSCRIPT_TOKENS = 448
"""Most tokens of one transcription: Whisper's decoder has this many positions."""
_JSON = b"application/json"
_RESPONSES = Protocol.RESPONSES
_USAGE_ON_WISH = frozenset(("chat/completions", "completions"))

Asking = Callable[[Endpoint, Turn, str, Presence], Awaitable[Call]]
"""Makes a call of a request to an endpoint; it gets the request's id, and who waits."""

log = structlog.get_logger()


class Asked(msgspec.Struct):
    """One request, read: who asks what of which endpoint, and the bytes of it."""

    id: str
    endpoint: Endpoint
    heading: Heading
    caller: Caller
    query: bytes
    raw: bytes


class Completions:
    """Serves every path whose answer comes from a node."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._watch = Watch(house.terms)

    async def serve(self, ask: Asking, endpoint: Endpoint, turn: Turn) -> None:
        """Make a call with `ask` and send its answer, or the reason why there is none."""
        request_id = f"req_{getrandbits(128):032x}"
        presence = Presence(turn, self._watch)
        answering = Answering(turn, presence, endpoint.protocol, request_id, self._house.metrics.streams)
        try:
            with presence:
                try:
                    call = await ask(endpoint, turn, request_id, presence)
                    answering.expect(call)
                    async with self._house.dispatcher.open(call) as reply:
                        if endpoint.protocol is _RESPONSES:
                            held = await self._remembered(call, reply, answering)
                        elif call.stream or (held := reply.whole()) is None:
                            held = await answering.pour(reply)
                    presence.finishing = presence.headed = True
                    if turn.connection.stuffed:
                        await answering.drained()
                    answering.finish(reply, held)
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

    async def read(self, endpoint: Endpoint, turn: Turn, request_id: str, presence: Presence) -> Call:
        """The call that a POST to `endpoint` asks for: an `Asking`."""
        house = self._house
        heading = headers.read(turn.headers)
        caller = house.keyring.caller(turn.headers, heading.said)
        if heading.content_type != _JSON or heading.encoded or endpoint.multipart:
            _check(endpoint, heading)
        limit = house.terms.request_body_bytes
        raw = presence.whole_body(limit)
        if raw is None:
            if (heading.content_length or 0) > limit:
                raise too_large(limit)
            raw = await presence.body(limit)
        if len(raw) > LONG_BODY or endpoint.multipart:
            body = await self._body(endpoint, heading, raw)
        else:
            body = read_body(endpoint, raw)
        longest_chat, shortest = house.fleet.contexts(body.model)
        long_prompt = house.terms.long_prompt_tokens
        decide_at = long_prompt if shortest is None or shortest > long_prompt else shortest
        counted, exact = body.guess, False
        if endpoint.free:
            counted = 0
        elif not house.tokens.guesses(body, decide_at=decide_at):
            counted = await house.tokens.count(body, decide_at=decide_at)
            exact = house.tokens.teaches(body, decide_at=decide_at)
        asked = Asked(request_id, endpoint, heading, caller, turn.query, raw)
        call = self._call(asked, body, counted, exact, longest_chat)
        if not heading.retried:
            house.metrics.classified(call)
        return call

    async def _remembered(self, call: Call, reply: Reply, answering: Answering) -> bytes | None:
        """Pour a reply and remember the response it brings."""
        owners = self._house.owners
        owners.note(call, reply)
        held = await answering.pour(reply)
        owners.note(call, reply)
        return held

    async def _body(self, endpoint: Endpoint, heading: Heading, raw: bytes) -> Body:
        read = partial(read_form, heading.content_type) if endpoint.multipart else partial(read_body, endpoint)
        if len(raw) > LONG_BODY:
            return await asyncio.get_running_loop().run_in_executor(self._house.reader, read, raw)
        return read(raw)

    def _call(self, asked: Asked, body: Body, counted: int, exact: bool, longest_chat: int | None) -> Call:
        """The call of a body of so many tokens. `exact`: they are worth comparing with a node's own count."""
        endpoint, caller, heading = asked.endpoint, asked.caller, asked.heading
        raw, node, hidden = self._continued(asked, body) if endpoint.protocol is _RESPONSES else (asked.raw, None, 0)
        estimate = self._house.estimates.of(body.model)
        content = body.content
        prompt, prompts = round(counted * estimate.ratio) + hidden, content.prompts
        text = prompt - content.ids - content.media  # an estimate: half of it the prompt surely has
        workload, reason = classify(
            header=heading.workload,
            key_class=caller.workload,
            body=body,
            prompt_tokens=prompt // prompts,
            long_prompt_tokens=self._house.terms.long_prompt_tokens,
            interactive_context=longest_chat,
        )
        return Call(
            id=asked.id,
            endpoint=endpoint,
            model=body.model,
            body=raw,
            prompt_tokens=prompt,
            output_tokens=estimate.output(body.max_output) if endpoint.generates else _ungenerated(endpoint),
            workload=workload,
            reason=reason,
            caller=caller.name,
            stream=body.stream,
            sequences=0 if endpoint.free else prompts * body.n,
            counted=counted if exact and node is None else 0,
            least_tokens=(content.ids + (text // 2 if text > 0 else 0)) // prompts,
            context_tokens=round(counted * estimate.upper_ratio) // prompts + hidden,
            asked=body.max_output,
            deadline_s=None if body.stream else heading.deadline_s,
            query=asked.query,
            content_type=heading.content_type if endpoint.multipart else _JSON,
            headers=heading.passed,
            ask_usage=body.stream and not body.has_stream_options and endpoint.path in _USAGE_ON_WISH,
            bound_to=node,
            fallback=caller.fallback,
        )

    def _continued(self, asked: Asked, body: Body) -> tuple[bytes, str | None, int]:
        """What is sent on, the node with the response that it continues, and the tokens which that puts before it."""
        raw = with_known_tier(asked.raw, body)
        earlier = self._house.owners.earlier(asked.caller, body)
        return (raw, None, 0) if earlier is None else (raw, earlier.node, earlier.tokens)


def _check(endpoint: Endpoint, heading: Heading) -> None:
    """Raise UnsupportedContentType for what the head alone tells."""
    wanted = b"multipart/form-data" if endpoint.multipart else _JSON
    told = heading.content_type
    if told != wanted and told.partition(b";")[0].strip().lower() != wanted:
        if heading.content_length == 0:
            raise BadRequest("We could not parse the JSON body of your request: it is empty.")
        shown = wanted.decode()
        raise UnsupportedContentType(f"Unsupported content type. This path reads '{shown}'.")
    if heading.encoded:
        raise UnsupportedContentType("Compressed request bodies are not read. Send it without Content-Encoding.")


def _ungenerated(endpoint: Endpoint) -> int:
    return TRANSCRIPT_TOKENS if endpoint.multipart else 0
