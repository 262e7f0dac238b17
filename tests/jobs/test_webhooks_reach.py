"""Where the sender of webhooks may go: judged addresses of allowed names, by certificates for those names."""

import ssl
from pathlib import Path

import pytest

from tests.jobs.hooks import Bench, says
from tests.rig.tls import authority


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
    return authority(tmp_path_factory.mktemp("tls"), "DNS:hooks.test")


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
