"""The calls a fake node answers: which path is which, what is read from the request, how the answer is made."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests.fakes import plain
from tests.fakes.dialects import SHAPES, Page, refusal
from tests.fakes.play import Play
from tests.fakes.seen import Seen
from tests.fakes.streams import GENERATING, Asked, Responses

if TYPE_CHECKING:
    from tests.fakes.node import FakeNode


@dataclass
class Request:
    """What was read: `body` is the JSON object, or the form's fields the fake knows."""

    path: str
    model: str
    body: dict[str, Any]
    id: str


Performance = Callable[["FakeNode", Play, Request], Awaitable[None]]


@dataclass(frozen=True)
class Desk:
    """One path. `reads` says how the request body is understood."""

    perform: Performance
    path: str
    reads: str = "json"  # json | form | nothing


#: Paths an engine serves at its root; all others stand below its API base only.
ROOTED = {"tokenize", "detokenize", "rerank", "score"}
BASED = {"rerank", "score"}


def find(seen: Seen, api_base: str) -> Desk | None:
    """The desk for a request, or None for a probe or a path this engine does not serve."""
    based = seen.path.startswith(f"{api_base}/")
    path = seen.path.removeprefix(api_base if based else "").strip("/")
    if based and path.startswith("responses/") and not path.endswith("/"):
        return Desk(_stored_response, path, reads="nothing")
    if seen.method != "POST" or ((path not in ROOTED) != based and path not in BASED):
        return None
    return _DESKS.get(path)


def read(seen: Seen, desk: Desk) -> tuple[Request | None, str | None]:
    """(request, None) or (None, what is wrong)."""
    content_type = seen.header("content-type") or ""
    number = seen.header("x-request-id") or uuid4().hex[:16]
    if desk.reads == "nothing":
        return Request(desk.path, "", {"method": seen.method, "query": seen.query}, number), None
    if desk.reads == "form":
        model = plain.multipart_field(content_type, seen.body, "model")
        return (Request(desk.path, model, {}, number), None) if model else (None, "Field required: model")
    if "application/json" not in content_type:
        return None, "Unsupported Media Type: Only 'application/json' is allowed"
    try:
        body = json.loads(seen.body)
    except ValueError as error:
        return None, f"1 validation error: JSON decode error {error}"
    if not isinstance(body, dict):
        return None, "1 validation error: Input should be a valid dictionary"
    return Request(desk.path, str(body.get("model") or ""), body, number), None


def prompt_tokens(node: "FakeNode", request: Request) -> int:
    """The prompt's length as this node counts it; token ids are their number."""
    body = request.body
    if "messages" in body:
        return sum(
            node.count(_text(message.get("content"))) for message in body["messages"] if isinstance(message, dict)
        )
    prompt = body.get("prompt", body.get("input", ""))
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(item) if isinstance(item, list) else node.count(_text(item)) for item in prompt)
    return node.count(str(prompt))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content.get("content") or "") if isinstance(content, dict) else ""


def objection(node: "FakeNode", request: Request) -> Page | None:
    """What the engine itself would refuse: model, required fields, context, an unknown earlier response."""
    if not request.model:
        return None
    if request.model not in node.models and node.dialect != "llamacpp":
        return refusal(node, 404, f"The model `{request.model}` does not exist.", "model")
    if request.path == "chat/completions" and "messages" not in request.body:
        return refusal(node, 400, "1 validation error: {'type': 'missing', 'loc': 'body.messages'}", "body.messages")
    earlier = request.body.get("previous_response_id")
    if earlier and earlier not in node.responses:
        return _no_response(node, earlier)
    if request.path == "responses" and request.body.get("service_tier") in ("fast", "ultrafast"):
        return refusal(
            node, 400, "Input should be 'auto', 'default', 'flex', 'scale' or 'priority'", "body.service_tier"
        )
    prompt = prompt_tokens(node, request)
    if request.path in GENERATING and prompt > node.context:
        shape = "ollama" if node.dialect == "ollama" else SHAPES[node.dialect]
        content_type, body = plain.too_long(shape, node.context, prompt)
        return Page(body, status=400, content_type=content_type)
    return None


def _no_response(node: "FakeNode", id_: str) -> Page:
    said = {"message": f"Response with id '{id_}' not found.", "type": "invalid_request_error", "param": "response_id"}
    return Page({"error": {**said, "code": 404}}, status=404)


# performances


_PREFIXES = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


async def _generate(node: "FakeNode", play: Play, request: Request) -> None:
    body, script, prompt = request.body, play.script, prompt_tokens(node, request)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    tokens = script.n if script.n is not None else min(int(limit or 5), 5)
    asked = Asked(
        id=f"{_PREFIXES[request.path]}{request.id}",
        model=request.model,
        body=body,
        script=script,
        tokens=tokens,
        prompt_tokens=prompt,
    )
    answer = GENERATING[request.path](asked)
    if isinstance(answer, Responses):
        node.responses[asked.id] = answer.object("completed", asked.text)
        if body.get("background"):
            return await _in_background(node, play, answer)
    if body.get("stream"):
        await play.open(answer)
    async with node.slot(play.seen, prompt):
        await (play.stream if body.get("stream") else play.whole)(answer, tokens)
    return None


async def _in_background(node: "FakeNode", play: Play, answer: Responses) -> None:
    """Queued at once; completed once it was asked for after `ttft`."""
    queued = answer.object("queued")
    node.responses[answer.asked.id] = {**queued, "_ready": asyncio.get_running_loop().time() + play.script.ttft}
    node.responses[answer.asked.id]["_done"] = answer.object("completed", answer.asked.text)
    await play.page(200, "application/json", queued)


async def _stored_response(node: "FakeNode", play: Play, request: Request) -> None:
    id_, _, verb = request.path.removeprefix("responses/").partition("/")
    stored = node.responses.get(id_)
    if stored is None:
        page = _no_response(node, id_)
        return await play.page(page.status, page.content_type, page.body)
    if verb == "cancel" and not stored["background"]:
        page = refusal(node, 400, "Cannot cancel a synchronous response")
        return await play.page(page.status, page.content_type, page.body)
    if verb == "cancel":
        stored["status"] = "cancelled"
        stored.pop("_done", None)
    elif request.body["method"] == "DELETE":
        del node.responses[id_]
        return await play.page(200, "application/json", {"id": id_, "object": "response", "deleted": True})
    elif "_done" in stored and asyncio.get_running_loop().time() >= stored["_ready"]:
        stored = node.responses[id_] = stored["_done"]
    public = {key: value for key, value in stored.items() if not key.startswith("_")}
    return await play.page(200, "application/json", public)


def _says(make: Callable[["FakeNode", Request], Any]) -> Performance:
    async def perform(node: "FakeNode", play: Play, request: Request) -> None:
        async with node.slot(play.seen, 0):
            await asyncio.sleep(play.script.ttft)
        answer = play.script.answer if play.script.answer is not None else make(node, request)
        await play.page(200, "application/json", answer)

    return perform


def _tokenize(node: "FakeNode", request: Request) -> dict[str, Any]:
    count = prompt_tokens(node, request)
    return {"count": count, "max_model_len": node.context, "tokens": list(range(count)), "token_strs": None}


async def _speech(node: "FakeNode", play: Play, request: Request) -> None:
    await play.wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in range(4):
        await play.wire.chunk(bytes([0xFF, 0xFB, piece]) * 100)
        await asyncio.sleep(play.script.gap)
    await play.wire.send(b"0\r\n\r\n")


def _desk(path: str, perform: Performance, reads: str = "json") -> tuple[str, Desk]:
    return path, Desk(perform, path, reads)


_DESKS = dict(
    [
        *(_desk(path, _generate) for path in GENERATING),
        _desk("embeddings", _says(lambda _, request: plain.embeddings(request.model, request.body))),
        _desk("rerank", _says(lambda _, request: plain.rerank(request.model, request.body))),
        _desk("score", _says(lambda _, request: plain.score(request.model, request.body))),
        _desk("tokenize", _says(_tokenize)),
        _desk("detokenize", _says(lambda _, request: {"prompt": " ".join(map(str, request.body["tokens"]))})),
        _desk("messages/count_tokens", _says(lambda node, request: {"input_tokens": prompt_tokens(node, request)})),
        _desk("audio/transcriptions", _says(lambda *_: {"text": "what was said"}), "form"),
        _desk("audio/translations", _says(lambda *_: {"text": "what was meant"}), "form"),
        _desk("audio/speech", _speech),
    ]
)
