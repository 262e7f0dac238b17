"""The sender against receivers that misbehave, on real sockets; what it sends is verified by OpenAI's SDK."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest
import structlog
from openai import InvalidWebhookSignatureError, OpenAI

from router.errors import StoreLost
from router.jobs.receivers import Receivers, secret_bytes
from router.jobs.store import Delivery, NewBatch, Store, Topic
from router.jobs.webhooks import Webhooks
from router.metrics import Metrics
from router.upstream.client import Hooks
from router.upstream.reach import Reach
from tests.jobs.desk import background
from tests.rig import eventually
from tests.store.conftest import in_a_thread
from tests.upstream.wire import Node, Peer, Script

SECRET = "whsec_" + "c2VjcmV0IHdpdGggMzIgYnl0ZXMgb2YgcmFuZG9tIQ=="
OTHER = "whsec_" + "YW5vdGhlciBzZWNyZXQgb2YgMzIgcmFuZG9tIGJ5dGU="
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SDK = OpenAI(api_key="none")
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


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database to copy."""
    file = tmp_path_factory.mktemp("migrated") / "hooks.db"
    in_a_thread(f"sqlite:///{file}")
    return file


@pytest.fixture
async def bench(tmp_path: Path, migrated: Path) -> AsyncIterator[Bench]:
    shutil.copy(migrated, tmp_path / "hooks.db")
    async with Bench(tmp_path) as bench:
        yield bench


def says(status: str, *more: bytes, head: str = "Content-Length: 0") -> Script:
    async def script(peer: Peer) -> None:
        await peer.send(f"HTTP/1.1 {status}\r\n{head}\r\n\r\n".encode(), *more)

    return script


async def hangs(peer: Peer) -> None:
    await peer.gone()


async def hangs_up(peer: Peer) -> None:
    """Closes without a word."""


async def resets(peer: Peer) -> None:
    peer.reset()


async def trickles(peer: Peer) -> None:
    """A head that never ends, byte by byte."""
    await peer.send(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        await peer.send(b"x")
        await asyncio.sleep(0.01)


async def floods(peer: Peer) -> None:
    """A good status and a body without end."""
    await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await peer.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")


async def floods_head(peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await peer.send(b"X: " + b"x" * 8000 + b"\r\n")


def unwrapped(got: tuple[dict[str, str], str], secret: str = SECRET) -> Any:
    return SDK.webhooks.unwrap(got[1], got[0], secret=secret)


async def test_an_event_is_what_the_sdk_expects(bench: Bench) -> None:
    receiver = await bench.receiver(says("204 No Content", head="X: y"))
    batch_id = await bench.ended(f"{receiver.url}/hooks/batches?token=hunter2")
    async with bench.sending():
        assert await bench.settled() == {"delivered": 1, "given_up": 0}
    ((headers, body),) = bench.got
    event = unwrapped(bench.got[0])
    assert (event.type, event.object, event.data.id) == ("batch.failed", "event", batch_id)
    assert json.loads(body).keys() == {"id", "object", "created_at", "type", "data"}
    assert event.id == headers["webhook-id"]
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    with pytest.raises(InvalidWebhookSignatureError):
        unwrapped(bench.got[0], OTHER)
    assert "hunter2" not in str(bench.logs)
    assert bench.logs[0]["host"] == "127.0.0.1"


async def test_failures_are_tried_again_with_the_same_event(bench: Bench) -> None:
    scripts = says("500 Internal Server Error"), says("503 Busy"), resets, says("200 OK")
    receiver = await bench.receiver(*scripts)
    await bench.ended(receiver.url)
    async with bench.sending():
        assert await bench.settled() == {"status": 2, "unanswered": 1, "delivered": 1, "given_up": 0}
    assert len(bench.got) == 4
    assert len({headers["webhook-id"] for headers, _ in bench.got}) == 1
    assert len({body for _, body in bench.got}) == 1
    for got in bench.got:
        unwrapped(got)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (says("400 Bad Request"), "status"),
        (says("500 No", b"x" * 100, head="Content-Length: 100"), "status"),
        (hangs, "unanswered"),
        (hangs_up, "unanswered"),
        (resets, "unanswered"),
        (trickles, "unanswered"),
        (floods_head, "unanswered"),
        (says("not HTTP"), "unanswered"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_what_is_never_taken_is_given_up(bench: Bench, script: Script, outcome: str) -> None:
    receiver = await bench.receiver(script)
    await bench.ended(receiver.url)
    began = monotonic()
    async with bench.sending(timeout_s=0.2):
        assert await bench.settled() == {outcome: 4, "given_up": 1}
    assert monotonic() - began < 4
    assert receiver.accepted == 4


@pytest.mark.parametrize(
    "script",
    [
        floods,
        says("200 OK", b"short", head="Content-Length: 50"),
        says("201 Created", head="Content-Length: 9999999999"),
    ],
)
async def test_a_good_status_is_enough_whatever_follows(bench: Bench, script: Script) -> None:
    receiver = await bench.receiver(script)
    await bench.ended(receiver.url)
    async with bench.sending():
        assert await bench.settled() == {"delivered": 1, "given_up": 0}
    await eventually(lambda: not receiver.live)


async def test_a_redirect_is_not_followed(bench: Bench) -> None:
    target = await bench.receiver(says("200 OK"))
    receivers = [
        await bench.receiver(says(f"{code} Elsewhere", head=f"Location: {target.url}/\r\nContent-Length: 0"))
        for code in (301, 302, 303, 307, 308)
    ]
    for receiver in receivers:
        await bench.ended(receiver.url)
    async with bench.sending(retry_s=()):
        assert await bench.settled() == {"status": 5, "given_up": 5}
    assert target.accepted == 0


async def test_gone_is_the_end_of_it(bench: Bench) -> None:
    receiver = await bench.receiver(says("410 Gone"))
    await bench.ended(receiver.url)
    async with bench.sending():
        assert await bench.settled() == {"gone": 1, "given_up": 1}
    assert receiver.accepted == 1


async def test_one_that_hangs_does_not_hold_up_the_others(bench: Bench) -> None:
    slow, quick = await bench.receiver(hangs), await bench.receiver(says("200 OK"))
    await bench.ended(slow.url)
    for _ in range(3):
        await bench.ended(quick.url)
    async with bench.sending(timeout_s=30):
        await eventually(lambda: bench.counted().get("delivered") == 3, within=5)


async def test_a_stopped_router_gives_back_what_it_was_sending(bench: Bench) -> None:
    receiver = await bench.receiver(hangs, says("200 OK"))
    await bench.ended(receiver.url)
    async with bench.sending(timeout_s=30):
        await eventually(lambda: bench.got, within=5)
    other = await bench.another("other")
    async with bench.sending(store=other):
        await bench.settled()
    assert bench.got[0][0]["webhook-id"] == bench.got[1][0]["webhook-id"]


async def test_two_routers_send_each_event_once(bench: Bench) -> None:
    receiver = await bench.receiver(says("200 OK"))
    for _ in range(20):
        await bench.ended(receiver.url)
    other = await bench.another("other")
    async with bench.sending(), bench.sending(store=other):
        assert await bench.settled() == {"delivered": 20, "given_up": 0}
    assert len(bench.got) == len({headers["webhook-id"] for headers, _ in bench.got}) == 20


async def test_a_lost_store_costs_no_second_sending(bench: Bench) -> None:
    """B74: what was taken while the store was away is written down once it is back, also after the lease."""

    async def taken_away(peer: Peer) -> None:
        bench.store.lost = bench.store.stuck = True
        await peer.send(OK)

    receiver = await bench.receiver(taken_away)
    await bench.ended(receiver.url)
    async with bench.sending():
        await eventually(lambda: bench.counted().get("delivered"), within=5)
        await eventually(lambda: any("wait for the store" in log["event"] for log in bench.logs), within=5)
        bench.ahead_s = 3600
        bench.store.lost = False
        await eventually(lambda: bench.store.claims == 2, within=5)
        bench.store.stuck = False
        assert await bench.settled() == {"delivered": 1, "given_up": 0}
    assert receiver.accepted == 1


async def test_both_secrets_sign_while_receivers_change_over(bench: Bench) -> None:
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(receiver.url)
    async with bench.sending(secrets=[secret_bytes(SECRET), secret_bytes(OTHER)]):
        await bench.settled()
    assert len(bench.got[0][0]["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OTHER):
        unwrapped(bench.got[0], secret)


async def test_a_caller_with_a_secret_of_its_own_is_signed_with_it(bench: Bench) -> None:
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(receiver.url, "ann")
    await bench.ended(receiver.url, "bob")
    async with bench.sending(own={"bob": [secret_bytes(OTHER)]}):
        await bench.settled()
    unwrapped(next(got for got in bench.got if ok(got, SECRET)), SECRET)
    assert sorted(ok(got, OTHER) for got in bench.got) == [False, True]
    assert sorted(ok(got, SECRET) for got in bench.got) == [False, True]


def ok(got: tuple[dict[str, str], str], secret: str) -> bool:
    try:
        unwrapped(got, secret)
    except InvalidWebhookSignatureError:
        return False
    return True


# Where it may go


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "hooks.test"])
async def test_an_allowed_name_with_a_private_address_is_not_told(bench: Bench, host: str) -> None:
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(f"http://{host}:{receiver.port}/")

    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with bench.sending(allowed=[host], reach_private=False, resolve=resolve):
        assert await bench.settled() == {"forbidden": 4, "given_up": 1}
    assert receiver.accepted == 0


async def test_a_name_that_changes_its_address_is_judged_at_every_attempt(bench: Bench) -> None:
    """DNS rebinding: one look-up an attempt, and the connection goes to what that look-up said."""
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(f"http://rebind.test:{receiver.port}/")
    looked = []

    async def resolve(name: str, port: int) -> list[str]:
        looked.append(name)
        return ["192.0.2.1"] if len(looked) % 2 else ["169.254.169.254"]

    async with bench.sending(allowed=["rebind.test"], resolve=resolve):
        assert await bench.settled() == {"forbidden": 4, "given_up": 1}
    assert looked == ["rebind.test"] * 4
    assert receiver.accepted == 0


async def test_the_next_address_is_tried_where_nobody_listens(bench: Bench) -> None:
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(f"http://both.test:{receiver.port}/")

    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.9", "127.0.0.1"]

    async with bench.sending(allowed=["both.test"], resolve=resolve):
        assert await bench.settled() == {"delivered": 1, "given_up": 0}


async def test_a_host_that_is_no_longer_allowed_is_not_told(bench: Bench) -> None:
    receiver = await bench.receiver(says("200 OK"))
    await bench.ended(receiver.url)
    async with bench.sending(allowed=[], secrets=[]):
        assert await bench.settled() == {"forbidden": 4, "given_up": 1}
    assert receiver.accepted == 0


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate it signed for `hooks.test`."""
    place = tmp_path_factory.mktemp("tls")
    (place / "san.cnf").write_text("subjectAltName=DNS:hooks.test\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for arguments in (
        ["req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA"],
        ["req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node"],
        ["x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
         "-out", "node.pem", "-days", "2", "-extfile", "san.cnf"],
    ):  # fmt: skip
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True)
    return place


@pytest.mark.parametrize(("host", "outcome"), [("hooks.test", "delivered"), ("evil.test", "unanswered")])
async def test_the_certificate_must_be_for_the_name(bench: Bench, house: Path, host: str, outcome: str) -> None:
    """Although the connection is made to an address."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(house / "node.pem", house / "node.key")
    receiver = await bench.receiver(says("200 OK"), tls=theirs)
    await bench.ended(f"https://{host}:{receiver.port}/")

    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    ours = ssl.create_default_context(cafile=str(house / "ca.pem"))
    async with bench.sending(allowed=["*.test"], resolve=resolve, tls=ours, retry_s=()):
        assert (await bench.settled())[outcome] == 1
    assert [headers["host"] for headers, _ in bench.got] == [f"{host}:{receiver.port}"] * (outcome == "delivered")
