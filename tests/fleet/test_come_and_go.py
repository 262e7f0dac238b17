"""Nodes that join a fleet and leave it while it is watched."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.core.node import Node, State
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.upstream.client import Client
from router.upstream.target import Target
from tests.fakes import FakeNode
from tests.fleet.looking import spec
from tests.rig import eventually


@asynccontextmanager
async def watched(*fakes: FakeNode, here: int, timeout_s: float = 1.0) -> AsyncIterator[tuple[Fleet, list[Node]]]:
    """A watched fleet of the first `here` of these fakes, and a node for each of them."""
    nodes = [Node(spec(fake)) for fake in fakes]
    targets = {fake.url: Target.parse(fake.url) for fake in fakes}
    async with Client() as client:
        fleet = Fleet(nodes[:here], Probe(client, targets, timeout_s=timeout_s), every_s=0.01)
        task = asyncio.create_task(fleet.watch())
        try:
            yield fleet, nodes
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def loops() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watch"))


async def test_who_comes_is_looked_at_and_who_goes_no_more() -> None:
    async with FakeNode(name="a") as a, FakeNode(name="b", models=["late"]) as b:
        async with watched(a, b, here=1) as (fleet, nodes):
            own = fleet.nodes
            await eventually(lambda: nodes[0].state is State.READY)
            fleet.become(nodes)
            assert fleet.nodes is own
            await eventually(lambda: fleet.serving("late") == [nodes[1]])
            fleet.become(nodes[1:])
            assert (fleet.nodes, fleet.by_name, fleet.serving("tiny")) == ([nodes[1]], {"b": nodes[1]}, [])
            await eventually(lambda: loops() == ["watch b"])
            a.forget()
            b.forget()
            await eventually(lambda: len(b.probes) > 5)
            assert not a.probes
        assert loops() == []


async def test_what_was_known_of_a_node_goes_with_it() -> None:
    async with FakeNode(name="a") as a, watched(a, here=1) as (fleet, nodes):
        a.metrics = 404
        await eventually(lambda: fleet.blind == {"a"})
        a.health = 500
        await eventually(lambda: "a" in fleet.trouble)
        fleet.become([])
        assert (fleet.trouble, fleet.blind, fleet.interactive_context("tiny")) == ({}, set(), None)
        a.health, a.metrics = 200, None
        fleet.become(nodes)
        await eventually(lambda: nodes[0].state is State.READY)


async def test_a_look_that_ends_after_its_node_went_tells_nothing() -> None:
    async with FakeNode(name="a") as a, watched(a, here=1, timeout_s=0.2) as (fleet, nodes):
        await eventually(lambda: nodes[0].state is State.READY)
        a.frozen = True
        look = asyncio.create_task(fleet.look(nodes[0]))
        await eventually(lambda: a.connections > 0)
        fleet.become([])
        await look
        a.frozen = False
        assert (fleet.trouble, nodes[0].misses) == ({}, 0)


async def test_a_node_may_be_looked_at_before_it_comes() -> None:
    """Also one that takes the name of another, whose own looks go on meanwhile."""
    old, new = FakeNode(name="a"), FakeNode(name="a", models=["late"])
    async with old, new, watched(old, new, here=1) as (fleet, nodes):
        await eventually(lambda: nodes[0].state is State.READY)
        await fleet.first_look(5, nodes[1:])
        assert (nodes[1].state, nodes[1].models()) == (State.READY, ["late"])
        assert (fleet.by_name["a"], fleet.serving("late")) == (nodes[0], [])
        fleet.become(nodes[1:])
        assert (fleet.by_name["a"], fleet.serving("late")) == (nodes[1], nodes[1:])
        await eventually(lambda: loops() == ["watch a"])
