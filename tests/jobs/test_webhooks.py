"""The sender against receivers that misbehave, on real sockets; what it sends is verified by OpenAI's SDK."""

import asyncio
import json
from time import monotonic
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from router.jobs.receivers import secret_bytes
from tests.jobs.hooks import OK, OTHER, SECRET, Bench, says
from tests.rig import eventually
from tests.upstream.wire import Peer, Script

SDK = OpenAI(api_key="none")


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
