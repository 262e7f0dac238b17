"""So many clients that ask again and again, where there is no wrk: `python clients.py URL CLIENTS SECONDS BODY`.

Prints one JSON object: answers, wrong ones, and the middle and the 99th of 100 times of an answer in milliseconds.
"""

import asyncio
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

import uvloop

KEY = "sk-bench"


class Client(asyncio.Protocol):
    """One connection, one question at a time."""

    def __init__(self, request: bytes, times: list[float], wrong: list[bytes]) -> None:
        self.request, self.times, self.wrong = request, times, wrong
        self.answer = b""
        self.length = -1
        self.transport = None

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.answer, self.length, self.asked_at = b"", -1, time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if self.length < 0:
            head, found, _ = self.answer.partition(b"\r\n\r\n")
            if not found:
                return
            lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            self.length = len(head) + 4 + int(lines[0][15:]) if lines else 0
        if self.answer.endswith(b"\r\n0\r\n\r\n") if not self.length else len(self.answer) >= self.length:
            self.times.append(time.perf_counter() - self.asked_at)
            if not self.answer.startswith(b"HTTP/1.1 200"):
                self.wrong.append(self.answer)
            self.ask()


async def crowd(url: str, clients: int, seconds: float, body: str) -> dict[str, float]:
    """What the clients saw."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    head = f"POST {urlsplit(url).path} HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {KEY}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    times: list[float] = []
    wrong: list[bytes] = []
    loop = asyncio.get_running_loop()
    for _ in range(clients):
        await loop.create_connection(lambda: Client(request, times, wrong), host, port)
    await asyncio.sleep(seconds)
    cuts = statistics.quantiles(times or [0.0, 0.0], n=100)
    return {"done": len(times), "wrong": len(wrong), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


if __name__ == "__main__":
    told = sys.argv
    print(json.dumps(uvloop.run(crowd(told[1], int(told[2]), float(told[3]), told[4]))))
