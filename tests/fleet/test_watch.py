"""What is kept of nodes: from calls, looks and agents, and what comes of it."""

import asyncio
import logging
import math

import pytest

from router.core.drift import Diagnosis, Verdict
from router.core.node import Facts, Load
from router.core.signals import CHANNELS, Counters, Heard, Sample
from router.errors import ProbeFailed
from router.fleet.probe import Look
from router.fleet.watch import FIXED_TOKENS, MOST_CALLS, RELAY, Record, Watch, read_agent
from router.showing import trend
from router.upstream.client import Client
from tests.fakes.days import DECAY, replace, samples
from tests.fleet.looking import Clock, raw_server, told

AGENT = (
    "ebbtide_agent_tree_rss_bytes 5e9\nprocess_resident_memory_bytes 1e9\nebbtide_agent_memory_limit_bytes 6e9\n"
    'ebbtide_agent_gpu_memory_bytes{gpu="0"} 3\nebbtide_agent_gpu_memory_bytes{gpu="1"} 4\n'
    "process_start_time_seconds 1000\nebbtide_agent_age_seconds 2\n"
)


def look(running: float | None = 2, waiting: float | None = 0, used: float | None = 0.5, **counted) -> Look:
    counters = Counters(**counted) if counted else None
    return Look(facts=Facts(), load=Load(running=running, waiting=waiting, used=used), counters=counters)


def test_a_sample_is_made_of_what_was_left_behind():
    record = Record(3600.0)
    for first, gap in ((1.0, 0.1), (3.0, None), (2.0, 0.3)):
        record.calls.append(Heard(prompt_tokens=800, queued_s=first / 10, first_token_s=first, gap_s=gap))
    record.calls.append(Heard(prompt_tokens=5, failed=True, queued_s=0.2))
    record.looks.extend([look(2, 0, 0.2), look(4, 1, None)])
    record.counters = Counters(preemptions=7, prefix_queries=100, prefix_hits=50, part_bytes=9.0, started_at=50.0)
    record.memory = read_agent(AGENT)
    assert record.sample(10.0) == Sample(
        at=10.0,
        ttft_s=2.0 / (800 + FIXED_TOKENS),
        queue_s=0.2,
        gap_s=0.2,
        tokens_per_s=5.0,
        errors=1.0,
        preemptions=7,
        kv_used=0.2,
        prefix_queries=100,
        prefix_hits=50,
        rss_bytes=5e9,
        part_bytes=9.0,
        gpu_bytes=7.0,
        running=3.0,
        waiting=0.5,
        restarts=0.0,
    )
    empty = record.sample(25.0)
    assert {name: getattr(empty, name) for name in CHANNELS if getattr(empty, name) is not None} == {
        "errors": 0.0,
        "restarts": 0.0,
    }


def test_a_later_start_is_a_restart():
    record, seen = Record(3600.0), []
    for at, started in enumerate((None, 100.0, 100.9, 300.0, None, 300.0)):
        record.counters = Counters(started_at=started)
        seen.append(record.sample(float(at)).restarts)
    assert seen == [None, 0, 0, 1, 1, 1]


def test_an_agent_by_other_names_and_one_that_stopped_reading():
    other = read_agent("process_resident_memory_bytes 4\nprocess_start_time_seconds NaN\n")
    assert (other.rss_bytes, other.gpu_bytes, other.limit_bytes, other.started_at) == (4.0, None, None, None)
    assert read_agent(AGENT + "ebbtide_agent_tree_gpu_memory_bytes 2\n").gpu_bytes == 2
    assert read_agent("<html>").rss_bytes is None
    with pytest.raises(ProbeFailed, match="90 s old"):
        read_agent(AGENT.replace("age_seconds 2", "age_seconds 90"))


async def test_calls_that_nobody_reads_are_bounded_and_strangers_leave_nothing():
    async with Client() as client:
        watch = Watch(lambda: ["a"], client, clock=Clock())
        await watch.step()
        for _ in range(3 * MOST_CALLS):
            watch.observe("a", Heard(prompt_tokens=1))
            watch.looked("a", look())
            watch.observe("stranger", Heard(prompt_tokens=1))
            watch.looked("stranger", look())
    record = watch._records["a"]
    assert len(record.calls) == len(record.looks) == MOST_CALLS
    assert set(watch._records) == {"a", RELAY}
    assert watch.signals("stranger") is None
    assert watch.diagnosis("stranger").verdict is Verdict.UNKNOWN


async def test_an_agent_that_is_slow_or_gone_costs_its_own_numbers_alone(caplog):
    hold = asyncio.Event()

    async def silent(reader, writer, head):
        await hold.wait()

    agents = {}
    async with raw_server(told(AGENT)) as good, raw_server(silent) as slow, raw_server(told("", "500 X")) as bad:
        agents |= {"a": good, "b": slow, "c": bad, "gone": good}
        async with Client() as client:
            watch = Watch(lambda: ["a", "b", "c", "d"], client, lambda: agents, clock=Clock())
            await asyncio.wait_for(watch.step(), 20)
            known = {name: watch.signals(name).latest.get("rss_bytes") for name in "abcd"}
            assert known == {"a": 5e9, "b": None, "c": None, "d": None}
            assert set(watch.trouble) == {"b", "c"}
            up = next(level for level in watch.families() if level.name.endswith("node_agent_up"))
            assert [up.values[name,] for name in "abc"] == [1, 0, 0]
            agents["c"] = good
            del agents["b"]
            with caplog.at_level(logging.INFO, "ebbtide.watch"):
                await watch.step()
            hold.set()
    assert watch.trouble == {}
    assert "node c: its agent answers again" in caplog.text


async def test_a_leak_becomes_a_verdict_a_log_line_and_metrics(caplog):
    """A day and a half of a node, sample by sample, through the loop's own step."""
    clock = Clock()
    day = replace(DECAY, seed=1, hours=38.0)
    memory = [0.0]

    class Told:
        async def get_text(self, url, **bounds):
            return f"ebbtide_agent_tree_rss_bytes {memory[0]}\nebbtide_agent_memory_limit_bytes 68e9\n"

    watch = Watch(lambda: ["a"], Told(), lambda: {"a": "http://agent"}, clock=clock)
    await watch.step()
    with caplog.at_level(logging.INFO, "ebbtide.watch"):
        for node, _ in samples(day):
            clock.now = 1000.0 + node.at
            memory[0] = node.rss_bytes
            watch.looked("a", look(node.running, node.waiting, node.kv_used))
            if node.ttft_s is not None:
                first = node.ttft_s * (500 + FIXED_TOKENS)
                watch.observe("a", Heard(prompt_tokens=500, first_token_s=first, gap_s=node.gap_s))
            if node.at < 34 * 3600:
                watch._records["a"].diagnosed_at = clock.now
            await watch.step()
    held = watch.diagnosis("a")
    assert held.verdict is Verdict.MEMORY_GROWTH_WITH_DRIFT
    assert held.projected_limit_s == pytest.approx((68e9 - memory[0]) / 0.25 / 2**30 * 3600, rel=0.2)
    assert "node a: memory_growth_with_drift, was " in caplog.text
    shown = {level.name: level.values for level in watch.families()}
    verdicts = {labels[1]: value for labels, value in shown["ebbtide_node_diagnosis"].items()}
    assert {name for name, value in verdicts.items() if value} == {"memory_growth_with_drift"}
    assert set(verdicts) == {str(one) for one in Verdict}
    assert shown["ebbtide_node_rss_bytes"]["a",] == pytest.approx(memory[0])
    assert shown["ebbtide_node_gap_drift_ratio"]["a",] > 1.01
    assert shown["ebbtide_node_relay_drift_ratio"] == {}, "unknown is not shown"
    told = trend(watch)("a")
    assert told is not None
    assert (
        told.verdict
        == "memory growth with drift: memory grows and the node slows down: local decay that a restart ends"
    )
    assert (told.limit_s, told.rss_bytes_an_hour) == (held.projected_limit_s, held.rss_slope_bytes_per_hour)
    assert told.evidence[1].endswith("MiB/h against 0 (flat, over 6 h)")
    sizes = [size for _, size in told.rss_bytes]
    assert 40 < len(sizes) <= 60, "hours in so many points"
    hours = (told.rss_bytes[-1][0] - told.rss_bytes[0][0]) / 3600
    assert sizes[-1] - sizes[0] == pytest.approx(0.25 * 2**30 * hours, rel=0.1)


async def test_what_is_told_of_a_node_that_is_well_is_no_warning():
    clock = Clock()

    class Told:
        async def get_text(self, url, **bounds):
            return "ebbtide_agent_tree_rss_bytes 5e9\n"

    watch = Watch(lambda: ["a", "b"], Told(), lambda: {"a": "http://agent"}, clock=clock)
    of = trend(watch)
    assert of("a") is None
    for _ in range(3):
        await watch.step()
        clock.now += 60
    assert of("b") is None, "nothing is known of its memory, and nothing of its speed"
    held = of("a")
    assert held is not None
    assert (held.verdict, held.rss_bytes_an_hour, [size for _, size in held.rss_bytes]) == ("", None, [5e9, 5e9])
    watch._records["a"].course.now = Diagnosis(verdict=Verdict.STEADY, rss_bytes=5e9)
    steady = of("a")
    assert steady is not None
    assert steady.verdict == ""


async def test_the_record_of_a_node_that_went_is_dropped():
    nodes = ["a", "b"]
    async with Client() as client:
        watch = Watch(lambda: nodes, client, clock=Clock())
        await watch.step()
        kept = watch.signals("b")
        nodes.remove("a")
        await watch.step()
    assert watch.signals("a") is None
    assert watch.signals("b") is kept
    assert math.isfinite(watch.diagnosis("b").at)
