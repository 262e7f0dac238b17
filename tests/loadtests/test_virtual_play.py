"""The virtual loop, what is asked and when, the bounds, and whole plays."""

import asyncio
import time

import pytest

from loadtests.colocation.virtual import bounds, cases, clock, fit, report, traces
from loadtests.colocation.virtual.__main__ import main
from loadtests.colocation.virtual.ask import CHAT, Ask
from loadtests.colocation.virtual.check import Run, modelled
from loadtests.colocation.virtual.profiles import PROFILES, Profile, Slo
from loadtests.colocation.virtual.score import kept
from loadtests.colocation.virtual.traces import Row

PLAIN = Profile(name="plain", a=0.01, b=0.001, c=0.0, kv_tokens=16_000, seqs=4)
TINY = cases.Setting(folder=traces.SAMPLE, workload="sample", fleet="F1", load=0.4, minutes=3.0, warm_s=20.0)


def test_the_clock_leaps():
    async def sleepy():
        loop = asyncio.get_running_loop()
        order = []

        async def sleeper(name, seconds):
            await asyncio.sleep(seconds)
            order.append((name, round(loop.time(), 6)))

        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.1), sleeper("between", 60))
        return order

    began = time.perf_counter()
    assert clock.run(sleepy()) == [("early", 0.1), ("between", 60.0), ("late", 3600.0)]
    assert time.perf_counter() - began < 5


def test_a_loop_that_waits_for_nothing_says_so():
    async def forever():
        await asyncio.get_running_loop().create_future()

    loop = clock.VirtualLoop()
    try:
        with pytest.raises(clock.StuckError):
            loop.run_until_complete(forever())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()


def test_timeouts_are_virtual():
    async def slow():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(10)
        return asyncio.get_running_loop().time()

    assert clock.run(slow()) == pytest.approx(5)


# What is asked

ROWS = [Row(float(t), 100, 10) for t in range(1000)]


def test_thinning_leaves_times_alone_and_is_seeded():
    chosen = traces.thinned(ROWS, 0.3, seed=1)
    assert chosen == traces.thinned(ROWS, 0.3, seed=1)
    assert chosen != traces.thinned(ROWS, 0.3, seed=2)
    assert {row.t for _, _, row in chosen} <= {row.t for row in ROWS}
    assert 230 < len(chosen) < 370


def test_more_than_a_trace_has_is_made_of_moved_copies():
    chosen = traces.thinned(ROWS, 2.5, seed=1)
    assert {copy for copy, _, _ in chosen} == {0, 1, 2}
    assert 2300 < len(chosen) < 2700
    assert max(row.t for _, _, row in chosen) < 1000
    assert [row.t for _, _, row in chosen] == sorted(row.t for _, _, row in chosen)


def test_a_curve_shapes_the_load():
    chosen = traces.thinned(ROWS, 1.0, seed=1, shape=(0.0, 1.0))
    assert min(row.t for _, _, row in chosen) >= 500
    assert len(chosen) == 500


def test_shared_beginnings_are_the_ancestors_own_blocks():
    rows = [Row(0, 100, 1), Row(1, 200, 1, parent=0, shared=64), Row(2, 300, 1, parent=1, shared=160)]
    asks = traces.chats([(0, number, row) for number, row in enumerate(rows)], rows)
    parts = [(part.owner[1][1], part.first, part.last) for part in asks[2].chain[:-1]]
    assert parts == [(0, 0, 4), (1, 4, 10)]
    assert asks[2].chain[-1].first == 10


def test_the_backlog_never_runs_dry_and_repeats_no_document():
    lines = traces.backlog([Row(0, 100, 10), Row(0, 10**6, 10)], most=1000, seed=1)
    asks = [next(lines) for _ in range(50)]
    assert {ask.prompt for ask in asks} == {100}
    assert len({ask.chain for ask in asks}) == 50


# Bounds


def test_a_node_holds_as_many_chats_as_the_formula_says():
    slo = Slo(ttft=1.0, tpot=0.02)
    chat = bounds.Shape(prompt=100.0, prompt2=0.0, output=10.0)
    assert bounds.chat_rate(PLAIN, slo, chat) == pytest.approx((1 - 0.01 / 0.02) / 0.1)


def test_a_node_holds_no_more_chats_than_it_has_sequences():
    chat = bounds.Shape(prompt=0.001, prompt2=0.0, output=1000.0)
    assert bounds.chat_rate(PLAIN, Slo(ttft=1.0, tpot=0.02), chat) == pytest.approx(4 / (1000 * 0.01), rel=1e-3)


def test_batch_gets_what_chat_leaves_of_the_fleet():
    assert bounds.fluid([0.0, 2.0, 99.0], [2.0, 2.0], [100.0, 100.0]) == pytest.approx((200 + 100 + 0) / 3)


def test_chat_goes_first_to_nodes_that_lose_least_by_it():
    assert bounds.fluid([1.0], [1.0, 1.0], [100.0, 10.0]) == pytest.approx(100)


def test_arrivals_are_counted_by_the_minute():
    assert bounds.binned([10, 70, 80, 500], 0, 120) == [1 / 60, 2 / 60]


def test_the_timetable_gives_chat_no_more_nodes_than_it_needs():
    met = [[0, 0, 0, 0], [10, 10, 50, 10], [10, 10, 100, 10]]
    assert bounds.timetable(met, 0.0, target=130) == [1, 1, 2, 1]
    assert bounds.timetable(met, 0.0, target=80) == [0, 0, 2, 0]
    assert bounds.timetable(met, 5.0, target=80) in ([1, 1, 1, 1], [2, 2, 2, 2])


def test_constants_are_found_again():
    points = [(n, 1e-4 * n + 5e-9 * n * n / 2) for n in (100, 1000, 5000, 20000)]
    assert fit.solve(points) == (pytest.approx(1e-4), pytest.approx(5e-9))


# Plays


def case(policy, value=0.0):
    return cases.run(cases.Case(setting=TINY, seed=1, policy=policy, value=value))


def test_a_play_is_the_same_every_time():
    assert case("ebbtide") == case("ebbtide")


@pytest.mark.parametrize(
    ("policy", "value"),
    [
        ("chat alone", 0),
        ("direct", 8),
        ("priority + threshold", 256),
        ("saturation gate", 0.34),
        ("probabilistic gate", 8),
        ("static split", 2),
        ("hindsight partition", 1),
        ("prototype", 16),
        ("ebbtide", 0),
    ],
)
def test_every_policy_plays_and_accounts_for_every_chat(policy, value):
    score = case(policy, value)
    assert score.chats > 100
    assert score.refused + score.unfinished <= score.chats
    assert (score.good > 0) == (policy != "chat alone")
    one_line = 30_000 / 160
    assert score.good <= score.computed + 2 * one_line
    assert 0 <= score.waste < 0.5


def test_without_control_batch_is_felt_and_with_take_back_hardly():
    alone, direct, prototype = case("chat alone"), case("direct", 8), case("prototype", 16)
    assert direct.ttft_p95 > 3 * alone.ttft_p95
    assert prototype.ttft_p95 < 2 * alone.ttft_p95
    assert prototype.attained > direct.attained


def test_batch_stays_under_the_bound():
    assert cases.fluid(TINY, 1) <= sum(cases.batch_rates(TINY))


def test_a_chat_is_kept_when_both_times_are_and_a_refused_one_never_is():
    slo = Slo(ttft=1.0, tpot=0.1)
    ask = Ask(1, CHAT, 100, 11, due=5.0)
    assert not kept(ask, slo)
    ask.first_at, ask.ended_at = 6.0, 7.0
    assert kept(ask, slo)
    ask.ended_at = 7.1
    assert not kept(ask, slo)
    ask.first_at, ask.ended_at = 6.1, 6.5
    assert not kept(ask, slo)


def test_take_back_by_the_caller_helps_in_the_model_too():
    tiny = PROFILES["tiny-vllm"]
    without = modelled(tiny, Run("no control", 4.0, 1), 30.0, 1)
    taken = modelled(tiny, Run("take-back", 4.0, 1, takes_back=True), 30.0, 1)
    assert taken.ttft_p95 < without.ttft_p95 / 5
    assert 0 < taken.batch < without.batch


def test_one_command_writes_the_report(tmp_path, capsys):
    few = ["--only", "chat alone", "--only", "ebbtide", "--value", "0", "--seeds", "1", "--minutes", "1"]
    few += ["--fleet", "F1", "--load", "0.4"]
    main([*few, "--out", str(tmp_path)])
    assert "| ebbtide |" in capsys.readouterr().out
    assert "fluid bound" in (tmp_path / "report.md").read_text().lower()
    assert (tmp_path / "report.json").stat().st_size > 500


def test_the_best_setting_is_the_most_batch_within_a_point_of_chat_alone():
    score = case("chat alone")

    def line(value, attained, good):
        one = {**score.told(), "attained": attained, "good": good}
        return report.Line("x", "knob", value, [type(score)(**one)])

    lines = [line(1, 0.99, 100), line(2, 0.985, 200), line(3, 0.9, 900)]
    assert report.best(lines, alone=0.99).value == 2
    assert report.best(lines, alone=1.5).value == 1
