"""Which addresses a webhook may lead to. One row an address: of the public internet, of a house, never."""

import socket

import pytest

from router.errors import HookRefused, ProbeFailed
from router.upstream.reach import Reach, private, public


def words(text):
    return text.split()


PUBLIC = words(
    """
1.1.1.1 8.8.8.8 93.184.216.34 172.15.255.255 172.32.0.1 192.167.1.1 100.63.255.255 100.128.0.1 169.253.1.1
223.255.255.255 192.0.1.1 198.17.255.255 198.20.0.1 11.0.0.1 126.255.255.255 128.0.0.1 2606:2800:220:1::1
2a00:1450::8a 2001:4860:4860::8888 ::ffff:8.8.8.8 64:ff9b::808:808
"""
)
PRIVATE = words(
    """
127.0.0.1 127.255.255.254 10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 100.64.0.1 100.127.255.255
::1 fc00::1 fd12:3456::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:7f00:1 64:ff9b::7f00:1 64:ff9b::a00:1
"""
)
NEVER = words(
    """
0.0.0.0 0.1.2.3 169.254.169.254 169.254.0.1 169.254.170.2 100.100.100.200 168.63.129.16 192.0.0.192 192.0.0.1
192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1
255.255.255.255 :: fe80::1 fe80::1%lo febf::1 fec0::1 ff02::1 ff0e::1 2001:db8::1 2001::1 2001:0:53aa:64c::1
2001:10::1 2002:7f00:1:: 2002:808:808:: 3fff::1 100::1 5f00::1 64:ff9b:1::1 ::7f00:1 ::127.0.0.1 ::ffff:0:127.0.0.1
::ffff:169.254.169.254 64:ff9b::a9fe:a9fe fd00:ec2::254 4000::1 e000::1 ::ffff:0.0.0.0 localhost 127.1 2130706433
0x7f.0.0.1 017700000001 127.0.0.1.
"""
)


@pytest.mark.parametrize("address", PUBLIC)
def test_of_the_public_internet(address):
    assert public(address)
    assert not private(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_of_a_house(address):
    assert private(address)
    assert not public(address)


@pytest.mark.parametrize("address", [*NEVER, ""])
def test_never(address):
    assert not public(address)
    assert not private(address)


def naming(*addresses):
    async def resolve(host, port):
        return addresses

    return resolve


async def test_only_what_was_judged_good_is_left():
    mixed = naming("127.0.0.1", "8.8.8.8", "169.254.169.254", "8.8.8.8", "1.1.1.1", "::1")
    assert await Reach(resolve=mixed).addresses("mixed.example", 443) == ["8.8.8.8", "1.1.1.1"]
    opened = Reach(allow_private=True, resolve=mixed)
    assert await opened.addresses("mixed.example", 443) == ["127.0.0.1", "8.8.8.8", "1.1.1.1"]


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1",), ("::1", "10.0.0.1"), ("169.254.169.254",)])
async def test_a_name_without_a_public_address_is_refused(addresses):
    with pytest.raises(HookRefused):
        await Reach(resolve=naming(*addresses)).addresses("inside.example", 443)


async def test_metadata_is_refused_even_where_private_is_allowed():
    with pytest.raises(HookRefused):
        await Reach(allow_private=True, resolve=naming("169.254.169.254", "fd00:ec2::254")).addresses("m.example", 80)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "::1"])
async def test_the_systems_own_names_for_this_machine_are_refused(host):
    """Whatever the resolver makes of them."""
    with pytest.raises((HookRefused, ProbeFailed)):
        await Reach().addresses(host, 443)


async def test_a_name_nobody_knows_is_told():
    async def resolve(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(ProbeFailed, match="resolved"):
        await Reach(resolve=resolve).addresses("nobody.example", 443)


@pytest.mark.parametrize("host", ["x" * 64 + ".example", "a..b"])
async def test_a_name_that_cannot_be_one_is_told(host):
    with pytest.raises(ProbeFailed, match="resolved"):
        await Reach().addresses(host, 443)
