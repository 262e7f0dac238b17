"""What one leg of a call looks like on the wire to one target.

The body goes out as it came, but for four edits a call may need: another model name (a node or the relay knows the
model under its own), `stream_options.include_usage` on streams whose caller did not say, so that tokens can be
accounted, the priority of batch calls at engines that have one, and the wish of a stream to be told its progress where
that is what makes an engine notice who leaves.
Credentials are the target's own; a caller's never leave the house.
"""

import re
from collections.abc import Mapping

import msgspec

from router.core.call import BATCH, ENDPOINTS, Call
from router.core.node import Node
from router.upstream.target import Target

_ASK_USAGE = b'{"stream_options":{"include_usage":true},'
_BEHIND = {"vllm": b'{"priority":10,', "sglang": b'{"priority":-10,"rid":%b,'}
"""What puts a batch call behind others in an engine's own queue: vLLM serves the lower first, SGLang the higher.
Without their priority scheduling both pass over it; nothing here relies on it. SGLang is also told the name by which a
call can be aborted."""
_PROGRESS = b'{"return_progress":true,'
"""llama.cpp then has something to send after each step of a prompt, and so sees at once that a caller has left: while
it has nothing to send it looks once a second (`HTTP_POLLING_SECONDS` in its server)."""
_QUEUED = frozenset(("chat/completions", "completions"))
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def starts(target: Target) -> dict[str, bytes]:
    """For every endpoint, by its path, the part of a request head that is the same for every call to a target."""
    return {
        endpoint.path: start("POST", target.path(endpoint.path, rooted=endpoint.rooted), target)
        for endpoint in ENDPOINTS.values()
    }


def start(method: str, path: bytes, target: Target) -> bytes:
    """Request line and the headers that are the target's own."""
    lines = b"%b %b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n" % (method.encode(), path, target.host_header)
    if target.authorization is not None:
        lines += b"authorization: " + target.authorization + b"\r\n"
    return lines


def head(call: Call, target: Target, known: Mapping[str, bytes], length: int) -> bytes:
    """The whole request head. `known` are the target's `starts`; `length` is the body's."""
    begun = known.get(call.endpoint.path) if call.path is None and not call.query else None
    if begun is None:
        path = target.path(call.path or call.endpoint.path, rooted=call.endpoint.rooted)
        begun = start(call.method, path + b"?" + call.query if call.query else path, target)
    passed = b"".join([b"%b: %b\r\n" % pair for pair in call.headers]) if call.headers else b""
    if not length and call.method != "POST":
        return b"%bx-request-id: %b\r\n%b\r\n" % (begun, call.id.encode(), passed)
    framing = call.id.encode(), call.content_type, length, passed
    return b"%bx-request-id: %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (begun, *framing)


def behind(call: Call, node: Node | None) -> bytes | None:
    """How the body of a batch call begins at an engine that has priorities; None where the caller has said its own."""
    if call.workload is not BATCH or node is None or not node.takes_priority:
        return None
    if call.endpoint.path not in _QUEUED or b'"priority"' in call.body:
        return None
    begins = _BEHIND.get(node.facts.engine)
    return begins % msgspec.json.encode(call.id) if begins is not None and b"%" in begins else begins


def asks_progress(call: Call, node: Node | None) -> bool:
    """Whether a stream is to tell how much of the prompt has been read; False where the caller has said it."""
    if node is None or node.facts.engine != "llamacpp" or not call.stream:
        return False
    return call.endpoint.path in _QUEUED and b'"return_progress"' not in call.body


def body(
    call: Call, own_name: str, *, asks_usage: bool, asks_progress: bool = False, behind: bytes | None = None
) -> bytes:
    """The body for a target that knows the model as `own_name`; `behind` is put before its first member."""
    raw = call.body
    if own_name != call.model:
        raw = renamed(raw, call.content_type, call.model, own_name)
    if asks_usage:
        raw = _ASK_USAGE + raw[raw.index(b"{") + 1 :].lstrip()
    if asks_progress:
        raw = _PROGRESS + raw[raw.index(b"{") + 1 :].lstrip()
    if behind is not None:
        raw = behind + raw[raw.index(b"{") + 1 :].lstrip()
    return raw


def renamed(raw: bytes, content_type: bytes, model: str, own_name: str) -> bytes:
    """The same body with another model name; every other value keeps its bytes."""
    if content_type.lower().startswith(b"multipart/"):
        field = re.compile(rb'(name="model"(?:\r\n[^\r\n]+)*\r\n\r\n)' + re.escape(model.encode()) + rb"(?=\r\n--)")
        return field.sub(lambda found: found.group(1) + own_name.encode(), raw, count=1)
    members = _members.decode(raw)
    members["model"] = msgspec.Raw(msgspec.json.encode(own_name))
    return msgspec.json.encode(members)
