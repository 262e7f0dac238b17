"""A collector of OpenTelemetry's that keeps what it is told: OTLP over HTTP, as protobuf."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """`spans` as they came, `heads` of the requests, `paths` they went to. `status` is what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[Any] = []
        self.raw: list[bytes] = []
        self.heads: list[str] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._server = await self._stack.enter_async_context(await asyncio.start_server(self._serve, "127.0.0.1", 0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def named(self, name: str) -> list[Any]:
        """Spans of that name, the call's own first."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.kind)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                self.heads.append(head)
                self.raw.append(body)
                told = ExportTraceServiceRequest.FromString(body)
                self.spans += [span for one in told.resource_spans for scope in one.scope_spans for span in scope.spans]
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.status)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
