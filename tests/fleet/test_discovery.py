"""Sources of nodes: a real file, names with a resolver at the rim, and what stands when they fail."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.errors import DiscoveryFailed, SettingsError
from router.fleet.discovery import MOST_ADDRESSES, Addresses, File, Hear, Listed, resolved
from tests.fleet.hearing import QUICK_S, hearing, listed
from tests.rig import eventually


def read(path: Path) -> Sequence[Listed]:
    """A list of names."""
    try:
        return [listed(name) for name in json.loads(path.read_text())]
    except ValueError as error:
        raise SettingsError(f"{path}:1: is not a list") from error


def move(path: Path, suffix: str) -> Path:
    """To another name beside it."""
    return path.rename(path.with_suffix(suffix))


def replace(path: Path, text: str) -> None:
    """As a careful writer does it."""
    spare = path.with_suffix(".new")
    spare.write_text(text)
    spare.rename(path)


# a file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.json"
    path.write_text('["a", "b"]')
    return path


async def test_a_file_that_is_replaced_is_read_again(path: Path) -> None:
    async with hearing(File(path, read, every_s=QUICK_S)) as ears:
        await ears.discovery.first(5)
        assert ears.names == ["a", "b"]
        replace(path, '["b", "c"]')
        await eventually(lambda: ears.names == ["b", "c"])
        replace(path, "[]")
        await eventually(lambda: ears.names == [])
    assert ears.lists == [["a", "b"], ["b", "c"], []]


@pytest.mark.parametrize("bad", ["", "[", "{]", "\0\0"])
async def test_garbage_leaves_the_last_list_and_says_so(path: Path, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with hearing(File(path, read, every_s=QUICK_S)) as ears:
        await ears.discovery.first(5)
        at = ears.discovery.told["file"].at
        replace(path, bad)
        await eventually(lambda: ears.discovery.stale() == ["file"])
        assert ears.trouble == f"{path}:1: is not a list"
        assert (ears.names, ears.discovery.told["file"].at) == (["a", "b"], at)
        replace(path, '["a", "b"]')
        await eventually(lambda: not ears.discovery.stale())
    assert ears.lists == [["a", "b"]], "the same list again is no news"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "told once, however often it failed"


async def test_a_file_that_vanishes_leaves_the_last_list_until_it_is_back(path: Path) -> None:
    async with hearing(File(path, read, every_s=QUICK_S)) as ears:
        await ears.discovery.first(5)
        spare = move(path, ".away")
        await eventually(lambda: ears.trouble is not None)
        assert ears.trouble == f"{path}: cannot be read: no such file or directory"
        assert ears.names == ["a", "b"]
        move(spare, path.suffix)
        await eventually(lambda: ears.trouble is None)
        assert ears.names == ["a", "b"]


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    async with hearing(File(path, read, every_s=QUICK_S)) as ears:
        await ears.discovery.first(5)
        assert (ears.names, ears.discovery.stale()) == ([], ["file"])
        path.write_text('["a"]')
        await eventually(lambda: ears.names == ["a"])


async def test_half_a_list_is_never_taken_for_a_list(path: Path) -> None:
    """Written in place, a list is read once it has been still from one look to the next; here each look is let go."""
    looks = asyncio.Queue[None]()
    source = File(path, read, sleep=lambda _: looks.get())
    async with hearing(source) as ears:
        await ears.discovery.first(5)
        with path.open("w") as file:
            for text in ('["a"]', " " * 4, " " * 4):
                file.write(text)
                file.flush()
                stamp = file.tell()
                os.utime(path, ns=(stamp, stamp))
                looks.put_nowait(None)
                await eventually(looks.empty)
                await asyncio.to_thread(lambda: None)
        assert ears.lists == [["a", "b"]]
        looks.put_nowait(None)
        looks.put_nowait(None)
        await eventually(lambda: ears.names == ["a"])


async def test_a_file_that_did_not_change_is_not_read(path: Path) -> None:
    reads: list[Path] = []
    looks = asyncio.Queue[None]()
    source = File(path, lambda one: [*read(one), *(reads.append(one) or ())], sleep=lambda _: looks.get())
    async with hearing(source) as ears:
        await ears.discovery.first(5)
        for _ in range(5):
            looks.put_nowait(None)
        await eventually(looks.empty)
        replace(path, '["c"]')
        looks.put_nowait(None)
        await eventually(lambda: ears.names == ["c"])
    assert len(reads) == 2


# names


class Resolver:
    """Answers as told: addresses, or an error; counts how often it was asked."""

    def __init__(self, *said: str) -> None:
        self.said: Sequence[str] | OSError = said
        self.asked = 0
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        assert (name, port) == ("vllm.svc", 8000)
        self.asked += 1
        await self.hangs.wait()
        if isinstance(self.said, OSError):
            raise self.said
        return self.said


def addresses(resolve: Resolver, **said: object) -> Addresses:
    fields = {"every_s": QUICK_S, "timeout_s": 5.0, **said}
    return Addresses(
        host="vllm.svc", port=8000, listed=lambda address: listed(f"n{ord(address[-1])}"), resolve=resolve, **fields
    )


async def test_every_address_is_a_node_once() -> None:
    resolve = Resolver("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::3")
    async with hearing(addresses(resolve)) as ears:
        await eventually(lambda: resolve.asked > 3)
        assert ears.lists == [["n49", "n50", "n51"]], "the order a resolver answers in is no news"
        resolve.said = ["10.0.0.1", "10.0.0.4"]
        await eventually(lambda: ears.names == ["n49", "n52"])


@pytest.mark.parametrize(("family", "names"), [("ipv4", ["n49"]), ("ipv6", ["n51"]), ("any", ["n49", "n51"])])
async def test_addresses_of_one_family(family: str, names: list[str]) -> None:
    async with hearing(addresses(Resolver("10.0.0.1", "fd00::3"), family=family)) as ears:
        await ears.discovery.first(5)
        assert ears.names == names


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "cannot be resolved: Name or service not known",
        ),
        ([], "has no address"),
        ([f"10.0.{n // 256}.{n % 256}" for n in range(MOST_ADDRESSES + 1)], f"has over {MOST_ADDRESSES} addresses"),
    ],
    ids=["fails", "empty", "too many"],
)
async def test_a_name_that_cannot_be_resolved_keeps_its_nodes(said: list[str] | OSError, told: str) -> None:
    resolve = Resolver("10.0.0.1")
    async with hearing(addresses(resolve)) as ears:
        await ears.discovery.first(5)
        resolve.said = said
        await eventually(lambda: ears.trouble is not None)
        assert (ears.trouble, ears.names) == (f"vllm.svc: {told}", ["n49"])
        resolve.said = ["10.0.0.2"]
        await eventually(lambda: ears.names == ["n50"])
        assert ears.trouble is None


async def test_a_resolver_that_hangs_is_asked_once() -> None:
    resolve = Resolver("10.0.0.1")
    resolve.hangs.clear()
    async with hearing(addresses(resolve, timeout_s=QUICK_S)) as ears:
        await ears.discovery.first(5)
        assert ears.trouble == "vllm.svc: not resolved within 0.01 s"
        await asyncio.sleep(5 * QUICK_S)
        assert resolve.asked == 1
        resolve.hangs.set()
        await eventually(lambda: ears.names == ["n49"])


async def test_the_systems_own_resolver() -> None:
    assert "127.0.0.1" in await resolved("localhost", 80)
    with pytest.raises(OSError, match=r"."):
        await resolved("no-such-name.invalid", 80)


# all of them


class Pushing:
    """A source that tells when told, and breaks when told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.runs = 0
        self.hear: Hear = lambda _: None
        self.breaks: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, hear: Hear) -> None:
        self.runs += 1
        self.hear = hear
        await self.breaks


async def test_a_source_that_breaks_is_started_again_and_stops_no_other() -> None:
    one, other = Pushing("one"), Pushing("other")
    async with hearing(one, other) as ears:
        await eventually(lambda: one.runs and other.runs)
        one.hear([listed("a")])
        other.hear([listed("b")])
        broken, one.breaks = one.breaks, asyncio.get_running_loop().create_future()
        broken.set_exception(ZeroDivisionError("a fault"))
        await eventually(lambda: one.runs == 2)
        assert (ears.names, ears.discovery.stale(), other.runs) == (["a", "b"], ["one"], 1)
        failed, one.breaks = one.breaks, asyncio.get_running_loop().create_future()
        failed.set_exception(DiscoveryFailed("its server is away"))
        await eventually(lambda: one.runs == 3)
        assert ears.trouble == "its server is away"


async def test_sources_are_exchanged_and_lists_stand_until_the_new_ones_tell() -> None:
    before, after, other = Pushing("one"), Pushing("one"), Pushing("other")
    async with hearing(before, other) as ears:
        await eventually(lambda: before.runs and other.runs)
        before.hear([listed("a")])
        other.hear([listed("b")])
        ears.discovery.use([after])
        assert ears.names == ["a"]
        await eventually(lambda: after.runs)
        before.hear([listed("late")])
        assert ears.names == ["a"], "who was let go is not heard"
        after.hear([listed("c")])
        assert ears.names == ["c"]


async def test_nobody_waits_for_a_source_that_says_nothing() -> None:
    async with hearing(Pushing("silent")) as ears:
        await ears.discovery.first(QUICK_S)
        assert ears.names == []
