"""A bench for the sender: a store that can be taken away, receivers that play scripts, what they were told."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import structlog

from router.errors import StoreLost
from router.jobs.receivers import Receivers, secret_bytes
from router.jobs.store import Delivery, NewBatch, Store, Topic
from router.jobs.webhooks import Webhooks
from router.metrics import Metrics
from router.upstream.client import Hooks
from router.upstream.reach import Reach
from tests.jobs.desk import background
from tests.upstream.wire import Node, Peer, Script

SECRET = "whsec_" + "c2VjcmV0IHdpdGggMzIgYnl0ZXMgb2YgcmFuZG9tIQ=="
OTHER = "whsec_" + "YW5vdGhlciBzZWNyZXQgb2YgMzIgcmFuZG9tIGJ5dGU="
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TLS = ssl.create_default_context()
RETRY_S = (0.05, 0.05, 0.05)


class Trouble(Store):
    """A store that can be taken away; `claims` counts what it gave out."""

    lost = stuck = False
    claims = 0

    async def delivered(self, delivery: Delivery) -> None:
        if self.lost or self.stuck:
            raise StoreLost("taken away by a test")
        await super().delivered(delivery)

    async def outbox(self) -> Any:
        if self.lost:
            raise StoreLost("taken away by a test")
        return await super().outbox()

    async def claim_deliveries(self, **options: Any) -> list[Delivery]:
        claimed = await super().claim_deliveries(**options)
        self.claims += len(claimed)
        return claimed


class Bench:
    """A store and a sender. `got` is each request a receiver read: headers and body."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.stack = AsyncExitStack()
        self.metrics = Metrics()
        self.ahead_s = 0.0
        self.logs: list[Any] = []
        self.got: list[tuple[dict[str, str], str]] = []

    async def __aenter__(self) -> "Bench":
        self.store = await self.another()
        self.logs = self.stack.enter_context(structlog.testing.capture_logs())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stack.aclose()

    async def another(self, name: str = "one") -> Trouble:
        store = await Trouble.open(f"sqlite:///{self.home}/hooks.db", router=name, clock=lambda: time() + self.ahead_s)
        self.stack.push_async_callback(store.close)
        return store

    async def receiver(self, *scripts: Script, **options: Any) -> Node:
        """Plays the scripts, one a connection, the last for ever."""

        async def play(peer: Peer) -> None:
            head, body = await peer.request()
            fields = (line.partition(":") for line in head.decode().split("\r\n")[1:] if line)
            self.got.append(({name.lower(): value.strip() for name, _, value in fields}, body.decode()))
            await scripts[min(peer.number, len(scripts) - 1)](peer)

        return await self.stack.enter_async_context(Node(play, **options).listening())

    async def ended(self, url: str, caller: str = "ann") -> str:
        """A batch that has failed, for want of an input; its id."""
        new = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "window_s": 86400, "webhook": url}
        made = await self.store.create_batch(NewBatch(caller=caller, input_file_id="file-none", **new))
        batch = await self.store.claim_validation(30)
        assert batch is not None
        await self.store.fail_batch(batch, [])
        return made.id

    @asynccontextmanager
    async def sending(self, *, store: Store | None = None, tls: Any = None, **options: Any) -> AsyncIterator[Webhooks]:
        """A sender at work; options as for `Receivers` and `Webhooks`, and `resolve`."""
        reach = Reach(allow_private=options.pop("reach_private", True), resolve=options.pop("resolve", None))
        told = {"allowed": ["127.0.0.1"], "allow_private": True, "secrets": [secret_bytes(SECRET)]}
        told |= {name: options.pop(name) for name in [*told, "own"] if name in options}
        hooks = Hooks(tls=tls or TLS)
        sender = Webhooks(
            store=store or self.store,
            receivers=Receivers(**told),
            hooks=hooks,
            reach=reach,
            metrics=self.metrics,
            **{"retry_s": RETRY_S, "timeout_s": 2.0, **options},
        )
        async with background(sender.run()):
            yield sender
        await hooks.close()

    async def settled(self, within: float = 5.0) -> dict[str, float]:
        """Wait until nothing is left to deliver; the attempts by outcome."""
        async with asyncio.timeout(within):
            while (await self.store.outbox()).waiting:
                await self.store.wakes.wait(Topic.ENDED, self.store.wakes.count(Topic.ENDED), timeout_s=0.02)
        return self.counted()

    def counted(self) -> dict[str, float]:
        families = {family.name.removeprefix("ebbtide_"): family.values for family in self.metrics.families()}
        attempts = {outcome: count for (outcome,), count in families["webhook_attempts"].items()}
        return attempts | {"given_up": families["webhooks_given_up"][()]}


def says(status: str, *more: bytes, head: str = "Content-Length: 0") -> Script:
    async def script(peer: Peer) -> None:
        await peer.send(f"HTTP/1.1 {status}\r\n{head}\r\n\r\n".encode(), *more)

    return script
