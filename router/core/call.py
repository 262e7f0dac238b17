"""The nouns of a call.

A Call is one completion somebody wants. It is frozen: everything later rooms learn about it (where it ran, how it
ended) is theirs to hold. msgspec structs are used because one is built for every request at a tenth of a dataclass's
cost.
"""

from enum import StrEnum

import msgspec


class Workload(StrEnum):
    """Who waits: somebody is watching, or somebody will come back."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


INTERACTIVE, BATCH = Workload.INTERACTIVE, Workload.BATCH
"""The two under names of their own, for what every call goes through: an enum's attribute is a slow look-up in 3.11."""


class Reason(StrEnum):
    """What told the workload, strongest first. Metric label and response header."""

    HEADER = "header"
    KEY = "key"
    JOB = "job"
    TIER = "tier"
    BACKGROUND = "background"
    SIZE = "size"
    CONTEXT = "context"
    STREAM = "stream"
    DEFAULT = "default"


class Protocol(StrEnum):
    """How an answer is framed, and so how its errors and its end look."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    PLAIN = "plain"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One path that nodes answer.

    `path` is what follows the node's API base, or its root when `rooted`; `prompt_field` names the body's field that
    holds the prompt, for errors about its length. `free`: answered by a node's tokenizer, without room on its device.
    """

    path: str
    protocol: Protocol = Protocol.PLAIN
    prompt_field: str = "input"
    rooted: bool = False
    generates: bool = False
    multipart: bool = False
    free: bool = False


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the node counted them."""

    prompt: int
    completion: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One completion somebody wants.

    `prompt_tokens` is our estimate in the model's own tokens; `output_tokens` the most one sequence is expected to
    give; `deadline_s` when the client will stop waiting for a queued call, counted from its arrival;
    `context_tokens` what a context must hold for its longest prompt, as an upper estimate (0: `prompt_tokens`);
    `least_tokens` what that prompt surely has; `counted` the raw count the estimate came from (what `usage` is compared
    with); `asked` the caller's own limit.
    `bound_to` names the only node that may answer (it owns an earlier response). `fallback` allows the relay.
    """

    id: str
    endpoint: Endpoint
    model: str
    body: bytes
    prompt_tokens: int
    output_tokens: int
    workload: Workload
    reason: Reason
    caller: str = ""
    stream: bool = False
    sequences: int = 1
    counted: int = 0
    least_tokens: int = 0
    context_tokens: int = 0
    asked: int | None = None
    deadline_s: float | None = None
    method: str = "POST"
    path: str | None = None
    query: bytes = b""
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ask_usage: bool = False
    bound_to: str | None = None
    fallback: bool = True


class Outcome(StrEnum):
    """How a call ended. Closed: metric label and log field."""

    COMPLETED = "completed"
    CALLER_ERROR = "caller_error"
    CLIENT_LEFT = "client_left"
    CLIENT_STALLED = "client_stalled"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    CUT = "cut"
    TAKEN_BACK = "taken_back"
    SHUTDOWN = "shutdown"


#: Paths below `/v1` (and at the root) that are forwarded to a node by the `model` in their body.
ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(path="chat/completions", protocol=Protocol.CHAT, generates=True, prompt_field="messages"),
        Endpoint(path="completions", protocol=Protocol.COMPLETION, generates=True, prompt_field="prompt"),
        Endpoint(path="embeddings"),
        Endpoint(path="responses", protocol=Protocol.RESPONSES, generates=True),
        Endpoint(path="messages", protocol=Protocol.MESSAGES, generates=True, prompt_field="messages"),
        Endpoint(path="messages/count_tokens", protocol=Protocol.MESSAGES, prompt_field="messages", free=True),
        Endpoint(path="rerank", prompt_field="documents"),
        Endpoint(path="score"),
        Endpoint(path="tokenize", rooted=True, prompt_field="prompt", free=True),
        Endpoint(path="detokenize", rooted=True, prompt_field="tokens", free=True),
        Endpoint(path="audio/transcriptions", multipart=True, prompt_field="file"),
        Endpoint(path="audio/translations", multipart=True, prompt_field="file"),
        Endpoint(path="audio/speech"),
    )
}
