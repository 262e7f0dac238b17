"""What is learnt of a model from the usage it reports."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.call import Usage
from router.core.estimate import HISTORY, OUTPUT_UNKNOWN, Estimate, Estimates

LIMIT = 16_384


def taught(ratio: float, *, samples: int = 50, seed: int = 7) -> Estimate:
    """An Estimate after `samples` prompts of a model whose tokenizer makes `ratio` of our count, give or take 3 %."""
    estimate, chance = Estimate(), random.Random(seed)
    for _ in range(samples):
        counted = chance.randint(300, 20_000)
        estimate.learn(counted, Usage(round(counted * ratio * chance.uniform(0.97, 1.03)), 100), None)
    return estimate


def test_a_new_model_is_taken_at_our_count():
    estimate = Estimate()
    assert estimate.ratio == 1.0
    assert estimate.prompt(1000) == 1000
    assert 1000 < estimate.upper(1000) <= 1200


@pytest.mark.parametrize("ratio", [0.65, 1.35])
def test_fifty_samples_teach_the_ratio(ratio):
    estimate = taught(ratio)
    assert estimate.ratio == pytest.approx(ratio, rel=0.02)
    assert ratio <= estimate.upper(10_000) / 10_000 <= ratio * 1.04


def test_a_thrifty_tokenizer_is_not_refused_what_fits():
    estimate = taught(0.65)
    counted = round(0.95 * LIMIT / 0.65)
    assert estimate.prompt(counted) < LIMIT
    assert estimate.upper(counted) < LIMIT


def test_a_lavish_tokenizer_is_not_sent_what_does_not_fit():
    estimate = taught(1.35)
    assert estimate.upper(round(0.95 * LIMIT)) > LIMIT
    assert estimate.upper(round(0.99 * LIMIT / 1.35 * 1.03)) > 0.99 * LIMIT


def test_short_prompts_with_a_long_template_do_not_spoil_long_ones():
    estimate = taught(1.0)
    for _ in range(500):
        estimate.learn(10, Usage(60, 5), None)
        estimate.learn(4000, Usage(4050, 5), None)
    assert estimate.upper(10_000) <= 10_400
    assert estimate.ratio < 1.05


def test_output_is_a_guess_until_there_is_history():
    estimate = Estimate()
    for length in range(1, 8):
        estimate.learn(10, Usage(10, length), None)
    assert estimate.output(None) == OUTPUT_UNKNOWN
    estimate.learn(10, Usage(10, 8), None)
    assert estimate.output(None) == 8
    assert estimate.output(5000) == 5000
    assert estimate.output(0) == 0


def test_output_covers_nine_in_ten():
    estimate = Estimate()
    for length in range(1, 101):
        estimate.learn(10, Usage(10, length), None)
    assert 90 <= estimate.output(None) <= 91


def test_a_cut_answer_says_nothing_of_its_length():
    estimate = taught(1.0, samples=0)
    for _ in range(20):
        estimate.learn(10, Usage(10, 16), 16)
    assert estimate.output(None) == OUTPUT_UNKNOWN
    for _ in range(20):
        estimate.learn(10, Usage(10, 300), 4096)
    assert estimate.output(None) == 300


def test_old_answers_are_forgotten():
    estimate = Estimate()
    for _ in range(HISTORY):
        estimate.learn(10, Usage(10, 4000), None)
    for _ in range(HISTORY):
        estimate.learn(10, Usage(10, 40), None)
    assert estimate.output(None) == 40


numbers = st.integers(min_value=-(10**12), max_value=10**12)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.none() | numbers), max_size=60), st.integers(0, 10**9))
def test_nothing_a_node_reports_leads_out_of_bounds(samples, counted):
    estimate = Estimate()
    for ours, prompt, completion, asked in samples:
        estimate.learn(ours, Usage(prompt, completion), asked)
    assert 0.1 <= estimate.ratio <= 10
    assert 0 <= estimate.prompt(counted) <= 10 * counted + 1
    assert estimate.prompt(counted) <= estimate.upper(counted) <= 12 * counted + 1
    assert 0 < estimate.output(None) < 2**31


def test_models_are_kept_apart_and_the_longest_unused_forgotten():
    estimates = Estimates(most=2)
    first = estimates.of("a")
    assert estimates.of("b") is not first
    assert estimates.of("a") is first
    estimates.of("c")
    assert len(estimates) == 2
    assert estimates.of("a") is first


def test_a_model_in_use_is_never_forgotten_for_names_that_come_and_go():
    estimates = Estimates(most=4)
    used = estimates.of("m")
    for number in range(20):
        estimates.of(f"unknown {number}")
        assert estimates.of("m") is used
    assert len(estimates) == 4
