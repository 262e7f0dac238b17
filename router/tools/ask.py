"""One question to a chat endpoint, streamed and timed, from a thread: what a caller without any library would see."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from router.errors import EbbtideError

#: Longest silence before a question is given up.
SILENCE_S = 600.0


class Answered(NamedTuple):
    """An answer and its times, in seconds from sending the question. `headers` have lower-case names."""

    text: str
    headers: dict[str, str]
    first_s: float
    whole_s: float
    pieces: int

    @property
    def queued_s(self) -> float:
        """How long the router kept it waiting for room."""
        return float(self.headers.get("x-ebbtide-queue-ms", 0)) / 1000


def ask(port: int, body: dict[str, object], heard: Callable[[str], None] = lambda text: None) -> Answered:
    """Put a streamed question to `/v1/chat/completions` on this machine; `heard` gets each piece as it comes.

    Raises EbbtideError when the answer is an error, or breaks off.
    """
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SILENCE_S)
    try:
        payload = json.dumps({**body, "stream": True})
        connection.request("POST", "/v1/chat/completions", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EbbtideError(f"the router answered {response.status}: {response.read(2000).decode(errors='replace')}")
        first, pieces = 0.0, []
        for piece in _pieces(response):
            first = first or time.monotonic() - started
            pieces.append(piece)
            heard(piece)
        headers = {name.lower(): value for name, value in response.getheaders()}
    except (OSError, http.client.HTTPException) as error:
        raise EbbtideError(f"the answer broke off: {error}") from error
    finally:
        connection.close()
    return Answered("".join(pieces), headers, first, time.monotonic() - started, len(pieces))


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text of each event, until `[DONE]`."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EbbtideError(f"the answer broke off: {event['error'].get('message')}")
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise EbbtideError("the answer broke off: it had no end")
