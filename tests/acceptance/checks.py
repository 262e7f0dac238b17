"""What is checked, and by which clients: inference first, then files and batches.

`CHECKS` says what each check promises. `judges` and `batch_judges` hold, for the client libraries, the scenario whose
facts are judged and the judgement: a function that asserts. What needs exact bytes, or a look inside, is judged by raw
clients in `test_wire.py` and `test_wire_batches.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.acceptance.sdks import Sdk

CHECKS: dict[str, str] = {
    "C1": "chat works with only the base URL changed",
    "C2": "the same calls work without `/v1` in the base URL",
    "C3": "every model is listed, with the node's own facts about it",
    "C4": "a model name with a slash is found, escaped or not; an unknown one is 404 `model_not_found`",
    "C5": "JSON answers say they are JSON",
    "C6": "every answer has exactly one `x-request-id`",
    "C7": "that id is the one the node received",
    "C8": "unknown body fields and query parameters reach the node unchanged",
    "C9": "a caller's key reaches neither node nor relay; theirs does",
    "C10": "no hop-by-hop header crosses in either direction",
    "C11": "a chunked request body is accepted",
    "C12": "`Expect: 100-continue` is answered at once",
    "C13": "a browser's preflight is answered without a key",
    "C14": "`HEAD` answers where `GET` does",
    "C15": "a trailing slash changes nothing and nothing redirects",
    "C16": "a gzip answer of the relay is readable, streamed or not",
    "C17": "60 KiB of headers are accepted, more than 64 KiB refused",
    "C18": "embeddings come back right with each encoding",
    "C19": "all four prompt shapes of completions pass",
    "C20": "`max_completion_tokens` beats `max_tokens`; the room held ends at the node's context",
    "C21": "`service_tier` tells the workload, and `fast` is no error on `/responses`",
    "C22": "a caller that leaves the queue never reaches the node",
    "C23": "a caller that leaves a running call frees the node within a second",
    "C24": "a call that does not stream is answered before the client's own limit, and not to be retried",
    "C25": "`/tokenize` works at the root and below `/v1`",
    "C26": "rerank and score work on all their paths",
    "C27": "a background response is fetched and cancelled at the node that has it",
    "C28": "`previous_response_id` finds its node",
    "C29": "Anthropic's SDK works with each kind of key; errors have its envelope",
    "C30": "a transcription is routed by the `model` field, wherever it stands in the form",
    "C31": "each event is passed on as it comes",
    "C32": "a stream ends at `[DONE]` and is closed at once",
    "C33": "a node that dies in the stream is an `APIError` with code `upstream_error`",
    "C34": "no part of an event is passed on",
    "C35": "comments keep a waiting stream alive and no SDK sees them",
    "C36": "`id`, `retry`, empty `data` and events without data never pass",
    "C37": "CRLF events are readable, characters cut anywhere stay whole",
    "C38": "the usage chunk comes when asked for, and only then",
    "C39": "a refused stream is a refused call",
    "C40": "a 503 before the first byte is tried elsewhere",
    "C41": "Responses events keep order, names and numbers; the helper works",
    "C42": "a broken Responses stream ends in an `error` event",
    "C43": "leaving a stream frees the node within a second",
    "C44": "a client that stops reading is let go, and its node with it",
    "C45": "Anthropic's stream passes with its pings",
    "C46": "every error has the one shape",
    "C47": "errors of every engine are brought into that shape",
    "C48": "an unknown model is 404 `model_not_found`",
    "C49": "a prompt that is too long is `context_length_exceeded` whoever says so",
    "C50": "a missing or wrong key is 401 `invalid_api_key`",
    "C51": "wrong requests get their own status and are not retried",
    "C52": "a full router says when to come back, and the SDK does",
    "C53": "what cannot succeed is not retried",
    "C54": "an SDK's attempts are counted once as demand",
    "C55": "`error.code` is never a number",
    "C56": "an uploaded file is an object with every key, processed at once, kept for 30 days",
    "C57": "a file may be streamed in, the file first and its length unsaid; 200 MB hold less than 32 MB of memory",
    "C58": "`expires_after` is kept, and refused out of its range",
    "C59": "files are listed in pages, in both orders, by purpose",
    "C60": "the content comes back byte for byte, with its name",
    "C61": "a deleted file is gone; deleting it again is 404",
    "C62": "an unknown file is 404 `No such File object`",
    "C63": "what is not JSONL is refused as the input of a batch; a bad later line is left to the batch",
    "C64": "`wait_for_processing` returns at once",
    "C65": "a file comes in parts; a wrong total or checksum is refused",
    "C66": "one key's files and batches are unknown to another",
    "C67": "a new batch is `validating`, with every key",
    "C68": "a batch is polled to `completed`; its times are in order, its counts add up, its output is readable",
    "C69": "a bad line fails alone, with its own status and body",
    "C70": "a batch of failures completes without output",
    "C71": "an unknown input file fails the batch, not the request",
    "C72": "a line that is not JSON is named",
    "C73": "every missing field of every line is named",
    "C74": "a wrong url, stream, model or body has its own code",
    "C75": "a repeated `custom_id`, too many lines and too large a file are refused",
    "C76": "a wrong endpoint, metadata or window is refused at once",
    "C77": "a cancelled batch keeps what is done and tells the rest as `batch_cancelled`",
    "C78": "cancelling twice is fine; cancelling what has ended is 409, asked once",
    "C79": "a closed window gives what is done and tells the rest as `batch_expired`",
    "C80": "batches are listed in pages, newest first; an unknown one is 404",
    "C81": "every line is in one of the two files, once, however the batch ends",
    "C82": "an output line holds the answer as it came",
    "C83": "after a restart no finished line is asked again",
    "C84": "`output_expires_after` counts from the output file's own beginning",
    "C85": "`usage` and `model` tell what the lines used",
    "C86": "an input deleted after its check is still read; before it, the batch fails",
    "C87": "a webhook is signed so that the SDKs take it; a retry keeps its id, a rotation has both signatures",
    "C88": "input files written for OpenAI and for `vllm run-batch` are taken unchanged",
    "C89": "a line is sent streamed, as batch work, and stored unstreamed",
    "C90": "a node's 429 or 503 is never the end of a line",
}


@dataclass(frozen=True)
class Case:
    """One client's facts, and the world they came from."""

    sdk: Sdk
    user: str
    world: Any
    facts: Any


@dataclass(frozen=True)
class Judge:
    """One check, held against the facts of one scenario."""

    check: str
    scenario: str
    runtimes: tuple[str, ...]
    judge: Callable[[Case], None]


Register = Callable[[Callable[[Case], None]], Callable[[Case], None]]
judges: list[Judge] = []
batch_judges: list[Judge] = []


def check(id_: str, scenario: str, *runtimes: str) -> Register:
    """Registers a judgement; `runtimes` are `python`, `node` and `anthropic`, the first two when none is named."""
    return _registering(judges, id_, scenario, runtimes)


def batch_check(id_: str, scenario: str, *runtimes: str) -> Register:
    """The same for what the batches' script saw."""
    return _registering(batch_judges, id_, scenario, runtimes)


def _registering(into: list[Judge], id_: str, scenario: str, runtimes: tuple[str, ...]) -> Register:
    assert id_ in CHECKS

    def register(judge: Callable[[Case], None]) -> Callable[[Case], None]:
        into.append(Judge(id_, scenario, runtimes or ("python", "node"), judge))
        return judge

    return register
