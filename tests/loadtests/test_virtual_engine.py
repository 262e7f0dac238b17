"""The engine models keep the rules they name: one test a rule."""

import random

import pytest

from loadtests.colocation.virtual.ask import CHAT
from loadtests.colocation.virtual.blocks import Part
from loadtests.colocation.virtual.engine import Engine
from tests.loadtests.stage import Stage


def test_a_step_costs_what_the_formula_says():
    stage = Stage(e=1e-6, c=0.002, d=1e-5).ask("x", 100, 3).play()
    prefill = 0.01 + 0.001 * 100 + 1e-6 * 100 * 50
    assert stage.spoke_at["x"] == pytest.approx(prefill)
    assert stage.ended_at["x"] == pytest.approx(prefill + 2 * (0.01 + 0.002) + 1e-5 * (100 + 101))


def test_a_prompt_is_read_in_chunks():
    assert Stage().ask("x", 250).play().spoke_at["x"] == pytest.approx(0.11 + 0.11 + 0.06)


def test_a_half_read_prompt_takes_the_whole_budget_of_every_step():
    stage = Stage().ask("long", 1000).ask("chat", 10, t=0.05).play()
    assert stage.spoke_at["long"] == pytest.approx(1.10)
    assert stage.spoke_at["chat"] == pytest.approx(1.12)


def test_priority_does_not_change_that():
    stage = Stage(priority=True).ask("long", 1000, priority=10).ask("chat", 10, t=0.05).play()
    assert stage.spoke_at["chat"] == pytest.approx(1.12)


def test_what_is_left_of_a_step_goes_to_who_waits():
    stage = Stage().ask("x", 10).ask("first", 60, t=0.001).ask("second", 60, t=0.002).play()
    assert stage.spoke_at["first"] == pytest.approx(0.02 + 0.11)
    assert stage.spoke_at["second"] == pytest.approx(0.02 + 0.11 + 0.03)


def test_a_threshold_lets_a_chat_share_the_step_but_not_while_the_prompt_is_alone():
    stage = Stage(threshold=50).ask("long", 1000).ask("chat", 10, t=0.05).play()
    assert stage.spoke_at["chat"] == pytest.approx(0.11 + 0.01 + 0.05 + 0.01)


def test_priority_orders_those_who_wait():
    stage = Stage(priority=True).ask("running", 300)
    stage.ask("batch", 100, t=0.01, priority=10).ask("chat", 100, t=0.02).play()
    assert stage.spoke_at["chat"] < stage.spoke_at["batch"]


def test_no_more_run_than_there_are_sequences():
    stage = Stage(seqs=1).ask("first", 10, 50).ask("second", 10, t=0.001).play()
    assert stage.spoke_at["second"] == pytest.approx(stage.ended_at["first"] + 0.02)


def test_nobody_is_admitted_whose_prompt_does_not_fit_and_nobody_overtakes_it():
    stage = Stage(kv_tokens=320).ask("first", 160, 40).ask("large", 200, t=0.001).ask("small", 10, t=0.002).play()
    assert stage.spoke_at["large"] > stage.ended_at["first"]
    assert stage.spoke_at["small"] >= stage.spoke_at["large"]


def test_an_abort_is_applied_when_the_step_ends():
    stage = Stage().ask("long", 1000).abort("long", 0.15).ask("chat", 10, t=0.15).play()
    assert "long" not in stage.spoke_at
    assert stage.spoke_at["chat"] == pytest.approx(0.22 + 0.02)


def test_an_aborted_prompt_goes_on_from_what_the_prefix_cache_holds():
    stage = Stage().ask("long", 1000).abort("long", 0.5).ask("long", 1000, t=0.6).play()
    kept = 500 // 16 * 16  # five steps had run, the fifth to its end
    left = 1000 - kept
    assert stage.spoke_at["long"] == pytest.approx(0.6 + 6 * 0.01 + 0.001 * left)


def test_a_whole_prompt_that_is_cached_is_read_again_in_its_last_block_alone():
    stage = Stage().ask("x", 320).ask("x", 320, t=1.0).play()
    assert stage.spoke_at["x"] == pytest.approx(1.0 + 0.01 + 0.016)


def test_a_shared_beginning_is_read_once():
    shared = (Part((CHAT, "first"), 0, 10),)
    stage = Stage().ask("first", 320).ask("second", 260, t=1.0, shared=shared).play()
    assert stage.spoke_at["second"] == pytest.approx(1.0 + 0.01 + 0.1)


def test_the_last_that_runs_is_preempted_when_blocks_run_short_and_computes_again():
    stage = Stage(kv_tokens=160).ask("first", 48, 60).ask("last", 48, 60, t=0.001).play()
    assert stage.engine.preempted == 1
    assert stage.ended_at["first"] < stage.ended_at["last"]
    assert stage.seqs["first"].ask.spent == 48 + 60 - 1
    assert stage.seqs["last"].ask.spent > 48 + 60 - 1


def test_with_priorities_the_worst_is_preempted():
    stage = Stage(kv_tokens=160, priority=True).ask("batch", 48, 60, priority=10).ask("chat", 48, 60, t=0.001).play()
    assert stage.engine.preempted == 1
    assert stage.seqs["chat"].ask.spent == 48 + 60 - 1


def test_metrics_are_those_of_the_last_step_that_ended():
    stage = Stage().ask("x", 100, 2).look(0.05).look(0.115).play()
    assert stage.loads == [(0, 0, 0.0), (1, 0, pytest.approx(7 / 1000))]


def test_reading_and_detokenising_take_their_time():
    stage = Stage(ingest_s=0.0156, token_s=0.001).ask("x", 100, 2).play()
    assert stage.spoke_at["x"] == pytest.approx(0.0156 + 0.11)
    assert stage.ended_at["x"] == pytest.approx(0.0156 + 0.11 + 0.01 + 0.001)


class _StepByStep(Engine):
    """Takes every step alone."""

    def _spare(self):
        return 1


@pytest.mark.parametrize("seed", range(5))
def test_a_leap_is_the_same_as_its_steps(seed):
    dice = random.Random(seed)
    asks = [
        (n, dice.randrange(1, 300), dice.randrange(1, 80), dice.random() * 3, dice.random() < 0.2) for n in range(25)
    ]
    stages = [Stage(kind, kv_tokens=2400, d=1e-6, c=1e-4) for kind in (None, _StepByStep)]
    for stage in stages:
        for name, prompt, output, t, leaves in asks:
            stage.ask(name, prompt, output, t=t)
            if leaves:
                stage.abort(name, t + 0.4)
        stage.play()
    leaping, stepping = stages
    assert leaping.ended_at.keys() == stepping.ended_at.keys()
    for name, at in leaping.ended_at.items():
        assert at == pytest.approx(stepping.ended_at[name], abs=1e-6)
        assert leaping.spoke_at[name] == pytest.approx(stepping.spoke_at[name], abs=1e-6)
        stalls = [stage.seqs[name].ask.stall for stage in stages]
        assert stalls[0] == pytest.approx(stalls[1], abs=1e-3)
    assert leaping.engine.blocks.held == stepping.engine.blocks.held == 0


def test_sglang_reads_prompts_or_decodes_never_both():
    stage = Stage(engine="sglang").ask("chat", 10, 100).ask("long", 500, t=0.105).play()
    assert stage.seqs["chat"].ask.stall == pytest.approx(5 * 0.11 + 0.01)


def test_sglang_has_one_half_read_prompt():
    stage = Stage(engine="sglang").ask("long", 1000).ask("chat", 10, t=0.05).play()
    assert stage.spoke_at["chat"] == pytest.approx(1.12)


def test_llamacpp_fills_each_step_slot_by_slot():
    stage = Stage(engine="llamacpp", seqs=2).ask("long", 1000).ask("chat", 10, t=0.05).play()
    assert stage.spoke_at["chat"] == pytest.approx(1.12)


def test_llamacpp_lets_those_wait_who_find_no_slot():
    stage = Stage(engine="llamacpp", seqs=1).ask("first", 10, 50).ask("second", 10, t=0.001).play()
    assert stage.spoke_at["second"] == pytest.approx(stage.ended_at["first"] + 0.02)


def test_llamacpp_goes_on_where_a_slot_was_left():
    stage = Stage(engine="llamacpp", seqs=2).ask("long", 1000).abort("long", 0.5).ask("long", 1000, t=0.6).play()
    assert stage.spoke_at["long"] == pytest.approx(0.6 + 5 * 0.11)
