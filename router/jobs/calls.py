"""A line of a batch made into a Call.

Rules:
- The body goes upstream as the line has it, but for `stream: true` and `stream_options.include_usage`: a streamed call
  can be taken back at once and tells its phase. What no engine streams, and endpoints that do not generate, go
  unstreamed.
- A line is counted and sized like a person's call. Its workload is batch, its reason `job`, its caller the batch's.
- Every try is a call of its own with an id of its own: an engine may still be ending the last one.
"""

import asyncio
from concurrent.futures import Executor
from os import urandom
from typing import Any

import msgspec

from router.core.body import LONG_BODY, Body, read_body
from router.core.call import Call, Endpoint, Protocol, Reason, Workload
from router.core.estimate import Estimate, Estimates
from router.errors import BadRequest
from router.fleet.fleet import Fleet
from router.jobs.checks import batched
from router.jobs.store import JobRow
from router.tokens import Tokens

__all__ = ["Calls", "endpoint_of"]

_STREAM = b'{"stream":true,'
_WITH_USAGE = b'{"stream":true,"stream_options":{"include_usage":true},'
_JOINED = frozenset((Protocol.CHAT, Protocol.COMPLETION, Protocol.RESPONSES))
"""How answers are framed that `assemble` can put together."""
_COUNTS_ON_WISH = frozenset(("chat/completions", "completions"))
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Line(msgspec.Struct):
    body: msgspec.Raw


class _Wishes(msgspec.Struct):
    """What engines refuse to stream: vLLM beam search, `best_of` and logprobs of the prompt; everybody audio."""

    best_of: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    modalities: Any = None

    @property
    def streamable(self) -> bool:
        """Whether an engine that streams would stream it."""
        audio = isinstance(self.modalities, list) and "audio" in self.modalities
        return not (audio or self.use_beam_search or self.best_of) and self.prompt_logprobs is None


class _Read(msgspec.Struct):
    """One line's body: what it says, the bytes that go upstream, and whether they ask for a stream."""

    body: Body
    raw: bytes
    stream: bool


class Calls:
    """Makes calls of lines. `reader` is where long bodies are read; `long_prompt_tokens` where counting gets exact,
    which may be changed."""

    def __init__(
        self, fleet: Fleet, tokens: Tokens, estimates: Estimates, reader: Executor, *, long_prompt_tokens: int
    ) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._estimates = estimates
        self._reader = reader
        self.long_prompt_tokens = long_prompt_tokens

    async def of(self, job: JobRow, line: bytes, *, streamed: bool = True) -> Call:
        """The call of a line. `streamed` allows a stream; the relay is not allowed. Raises BadRequest."""
        endpoint = endpoint_of(job)
        if len(line) > LONG_BODY:
            loop = asyncio.get_running_loop()
            read = await loop.run_in_executor(self._reader, _read, endpoint, line, streamed)
        else:
            read = _read(endpoint, line, streamed)
        body = read.body
        estimate = self._estimates.of(body.model)
        decide_at = self._decide_at(body.model)
        counted = await self._tokens.count(body, decide_at=decide_at)
        prompt_tokens = estimate.prompt(counted)
        prompts = max(1, body.content.prompts)
        return Call(
            id="req_" + urandom(16).hex(),
            endpoint=endpoint,
            model=body.model,
            body=read.raw,
            prompt_tokens=prompt_tokens,
            output_tokens=_output(endpoint, body, estimate),
            workload=Workload.BATCH,
            reason=Reason.JOB,
            caller=job.caller,
            stream=read.stream,
            sequences=body.sequences,
            counted=counted if self._tokens.teaches(body, decide_at=decide_at) else 0,
            least_tokens=_least(body, prompt_tokens),
            context_tokens=estimate.upper(counted) // prompts,
            asked=body.max_output,
            fallback=False,
        )

    def _decide_at(self, model: str) -> int:
        shortest = self._fleet.shortest_context(model)
        return self.long_prompt_tokens if shortest is None else min(self.long_prompt_tokens, shortest)


def endpoint_of(job: JobRow) -> Endpoint:
    """The endpoint a line is for. Raises BadRequest for one that batches do not have."""
    endpoint = batched(job.endpoint)
    if endpoint is None:
        raise BadRequest(f"Batches do not serve '{job.endpoint}'.", param="url", code="invalid_url")
    return endpoint


def _read(endpoint: Endpoint, line: bytes, streamed: bool) -> _Read:
    try:
        raw = bytes(msgspec.json.decode(line, type=_Line).body)
        streams = streamed and endpoint.protocol in _JOINED and msgspec.json.decode(raw, type=_Wishes).streamable
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("The line is not a JSON object with a 'body'.", code="invalid_json_line") from error
    return _Read(read_body(endpoint, raw), _asking(endpoint, raw) if streams else raw, streams)


def _asking(endpoint: Endpoint, raw: bytes) -> bytes:
    """The body with the wish for a stream, and for its usage where that does not come by itself."""
    if b'"stream' in raw:
        members = _members.decode(raw)
        members.pop("stream", None)
        members.pop("stream_options", None)
        raw = msgspec.json.encode(members)
    wish = _WITH_USAGE if endpoint.path in _COUNTS_ON_WISH else _STREAM
    return wish + raw[raw.index(b"{") + 1 :].lstrip()


def _output(endpoint: Endpoint, body: Body, estimate: Estimate) -> int:
    return estimate.output(body.max_output) if endpoint.generates else 0


def _least(body: Body, prompt_tokens: int) -> int:
    """What the longest prompt surely has: ids count as they are, text at least half of its estimate."""
    content = body.content
    text = max(0, prompt_tokens - content.ids - content.media)
    return (content.ids + text // 2) // max(1, content.prompts)
