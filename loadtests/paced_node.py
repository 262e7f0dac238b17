"""Two nodes that stream one event each `--gap` seconds to everybody: `python loadtests/paced_node.py --events 50`.

Rules: they speak enough of vLLM to be probed as one, with more room than any test asks for; one ticker walks over all
streams, in `TICKS` parts so that they do not all write at once; a stream is its head, `--events` events, `[DONE]`, and
with a gap of 0 all of it in one write; a call that does not stream gets one JSON answer.
Prints the two ports, then serves until its standard input ends.
"""

import argparse
import asyncio
import json
import sys

import uvloop

TICKS = 20
MODELS = {"data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 32768}]}
METRICS = 'vllm:cache_config_info{engine="0",kv_cache_size_tokens="8000000"} 1.0\n'
LEVELS = "vllm:num_requests_running{} %d\nvllm:num_requests_waiting{} 0\nvllm:kv_cache_usage_perc{} 0.0\n"
WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello there"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21},
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def event(choices: list[object], **more: object) -> bytes:
    said = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": choices}
    return b"data: " + json.dumps(said | more).encode() + b"\n\n"


def delta(text: str, finish: str | None) -> bytes:
    return event([{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Streams:
    """All streams of one node, in parts that are served one after the other."""

    def __init__(self, events: int, gap: float) -> None:
        usage = event([], usage={"prompt_tokens": 20, "completion_tokens": events, "total_tokens": 20 + events})
        words = [delta(f" word{number}", "stop" if number == events else None) for number in range(1, events + 1)]
        last = chunk(words[-1]) + chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.pieces = [*map(chunk, words[:-1]), last]
        self.burst = HEAD + b"".join(self.pieces) if gap == 0 else None
        self.parts: list[dict[Connection, int]] = [{} for _ in range(TICKS)]
        self.turn = 0
        self.pause = gap / TICKS

    @property
    def running(self) -> int:
        return sum(map(len, self.parts))

    def add(self, connection: "Connection") -> None:
        min(self.parts, key=len)[connection] = 0

    def drop(self, connection: "Connection") -> None:
        for part in self.parts:
            part.pop(connection, None)

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.pause, loop.time() - 1)
            await asyncio.sleep(due - loop.time())
            self.turn = (self.turn + 1) % TICKS
            part = self.parts[self.turn]
            for connection, sent in list(part.items()):
                connection.transport.write(self.pieces[sent])
                if sent + 1 < len(self.pieces):
                    part[connection] = sent + 1
                else:
                    del part[connection]


class Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pending = b""
        self.transport = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.drop(self)

    def data_received(self, data: bytes) -> None:
        self.pending += data
        head, found, rest = self.pending.partition(b"\r\n\r\n")
        if not found:
            return
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        if len(rest) >= length:
            self.pending = rest[length:]
            self.answer(head, rest[:length])

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST") and b'"stream":true' not in body.replace(b" ", b""):
            self.page(json.dumps(WHOLE).encode(), b"application/json")
        elif head.startswith(b"POST") and self.streams.burst is not None:
            self.transport.write(self.streams.burst)
        elif head.startswith(b"POST"):
            self.transport.write(HEAD)
            self.streams.add(self)
        elif head.startswith(b"GET /v1/models"):
            self.page(json.dumps(MODELS).encode(), b"application/json")
        elif head.startswith(b"GET /metrics"):
            self.page((METRICS + LEVELS % self.streams.running).encode(), b"text/plain")
        else:
            self.page(b"{}", b"application/json")

    def page(self, body: bytes, kind: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)
        )


async def serve(events: int, gap: float) -> None:
    """Two nodes, until standard input ends."""
    loop = asyncio.get_running_loop()
    nodes = [Streams(events, gap) for _ in range(2)]
    servers = [
        await loop.create_server(lambda streams=streams: Connection(streams), "127.0.0.1", 0, backlog=4096)
        for streams in nodes
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    tickers = [loop.create_task(streams.tick()) for streams in nodes if gap]
    await loop.run_in_executor(None, sys.stdin.read)
    for ticker in tickers:
        ticker.cancel()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between two events of a stream")
    options = parser.parse_args()
    uvloop.run(serve(options.events, options.gap))


if __name__ == "__main__":
    main()
