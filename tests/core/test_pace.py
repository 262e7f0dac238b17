"""What a node's calls show of it: how fast it reads, what a take-back costs, how often chat comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.pace import OBJECTIVE, Pace, Past
from router.core.recent import Recent
from router.core.yielding import LOSSES_MOST

seconds = st.floats(0, 1e4)
lengths = st.integers(0, 200_000)


def read(pace: Pace, prompt_tokens: int, took_s: float, times: int = 5, *, chat: bool = False) -> None:
    for _ in range(times):
        pace.read_quietly(prompt_tokens, took_s, chat=chat)


def test_nothing_is_known_before_anything_was_seen() -> None:
    pace = Pace()
    assert (pace.prefill_s(1000), pace.unloaded_s, pace.gap_s, pace.kept, pace.objective_s(None)) == (None,) * 5
    assert pace.residue_s == 0.0
    assert pace.silence(60, 0.0) == 1.0


def test_reading_is_learnt_by_length() -> None:
    pace = Pace()
    read(pace, 200, 0.010)
    read(pace, 20_000, 2.7)
    assert pace.prefill_s(210) == pytest.approx(0.0105)
    assert pace.prefill_s(20_000) == pytest.approx(2.7)
    assert pace.prefill_s(30_000) == pytest.approx(2.7 * 1.5), "the nearest length speaks for one not seen"


def test_auto_is_a_multiple_of_the_unloaded_first_token_or_what_a_step_allows() -> None:
    pace = Pace()
    read(pace, 200, 0.010, chat=True)
    assert pace.objective_s(None) == pytest.approx(OBJECTIVE * 0.010)
    assert pace.objective_s(0.4) == 0.4
    for _ in range(5):
        pace.took(200, 0.110)
    assert pace.residue_s == pytest.approx(0.1)
    assert pace.objective_s(None) == pytest.approx(0.11)


def test_a_cache_that_holds_is_noticed() -> None:
    pace, past = Pace(), Past()
    read(pace, 20_000, 2.7)
    assert pace.lost(20_000, 1.5, past) == 0.0, "nothing is known to be lost"
    assert past.read_s == 1.5
    pace.resumed(20_000, 1.25, past)
    assert pace.kept == pytest.approx(1.0 - 0.05 / 1.5)
    assert pace.lost(20_000, 1.35, Past()) == pytest.approx(20_000 * 0.5 * (1 - pace.kept), rel=0.01)


def test_a_node_that_keeps_nothing_is_noticed_even_if_nothing_gets_through() -> None:
    pace, past = Pace(), Past()
    read(pace, 20_000, 2.7, times=8)
    for _ in range(14):
        pace.lost(20_000, 1.0, past)
    assert pace.kept is not None
    assert pace.kept < 0.2
    assert past.read_s < 1.0
    assert past.losses >= 3.0


def test_a_prompt_never_read_in_one_go_is_judged_by_its_parts() -> None:
    pace, past = Pace(), Past()
    for _ in range(3):
        pace.lost(20_000, 0.9, past)
    pace.resumed(20_000, 0.3, past)
    assert pace.prefill_s(20_000) == pytest.approx(3.0)


def test_prompts_the_cache_had_say_nothing_of_one_it_has_not() -> None:
    pace, past = Pace(), Past()
    read(pace, 20_000, 0.2)
    for _ in range(6):
        pace.lost(20_000, 1.0, past)
    assert (past.losses, pace.kept) == (0.0, None)
    assert pace.left_s(20_000, past) == pytest.approx(6.0), "it takes at least as long again"
    pace.resumed(20_000, 1.5, past)
    assert pace.kept == pytest.approx(0.75), "it took far longer than the others, and still little of it was read again"
    assert pace.prefill_s(20_000) > 0.2


def test_without_a_cache_the_second_take_back_is_the_last() -> None:
    pace, past = Pace(), Past()
    pace.lost(20_000, 1.0, past, keeps=False)
    assert past.losses < LOSSES_MOST
    pace.lost(20_000, 1.0, past, keeps=False)
    assert past.losses >= LOSSES_MOST


def test_what_one_node_read_of_a_prompt_is_for_nothing_at_another() -> None:
    pace, past = Pace(), Past()
    read(pace, 20_000, 2.0)
    pace.lost(20_000, 0.5, past)
    past.moves("a", 2.0)
    assert (past.node, past.read_s, past.losses) == ("a", 0.5, 0.0), "the first to read it"
    past.moves("a", 2.0)
    assert past.read_s == 0.5
    past.moves("b", 2.0)
    assert (past.node, past.read_s, past.spent_s) == ("b", 0.0, 0.0)
    assert past.losses == pytest.approx(0.25)
    pace.lost(20_000, 1.5, past)
    past.moves("a", None)
    assert past.losses == pytest.approx(1.25), "of a length nobody knows it counts whole"


def test_silence_is_as_likely_as_the_pauses_so_far() -> None:
    pace = Pace()
    for second in range(20):
        pace.chat_came(float(second))
    assert pace.silence(1.0, 19.0) == pytest.approx(0.368, abs=0.01)
    assert pace.silence(1.0, 119.0) > 0.99, "a long pause makes another likely"


@given(st.lists(st.tuples(lengths, seconds)), st.lists(st.tuples(lengths, seconds)), lengths)
def test_figures_stay_figures(quiet: list[tuple[int, float]], parts: list[tuple[int, float]], prompt: int) -> None:
    pace, past = Pace(), Past()
    for length, took_s in quiet:
        pace.read_quietly(length, took_s, chat=True)
    for length, took_s in parts:
        assert 0 <= pace.lost(length, took_s, past) <= length
        pace.resumed(length, took_s, past)
    assert pace.kept is None or 0 <= pace.kept <= 1
    assert past.read_s <= past.spent_s + 1e-6
    whole, left = pace.known_s(prompt), pace.left_s(prompt, past)
    assert (whole is None) == (left is None)
    assert whole is None or left is None or 0 <= left <= max(whole, past.read_s)


@given(st.lists(st.floats(0, 100), min_size=3, max_size=40), st.floats(0, 1))
def test_a_quantile_is_one_of_the_last(values: list[float], share: float) -> None:
    recent = Recent(16)
    for value in values:
        recent.add(value)
    assert recent.quantile(share) in values[-16:]


def test_auto_is_judged_p95_for_p95() -> None:
    pace = Pace()
    for number in range(20):
        read(pace, 4000 if number >= 18 else 200, 0.4 if number >= 18 else 0.02, times=1, chat=True)
    assert pace.unloaded_s == pytest.approx(0.02)
    assert pace.objective_s(None) == pytest.approx(OBJECTIVE * 0.4), "long prompts are late already when alone"


def test_a_short_answer_bears_less_beside_it_than_a_long_one() -> None:
    brief, wordy = Pace(), Pace()
    assert brief.stall_s is None
    for _ in range(5):
        brief.wrote(10, 0.2)
        wordy.wrote(10, 0.2)
        brief.answered(10)
        wordy.answered(400)
    assert brief.stall_s == pytest.approx(2.0 * 0.02 * 10)
    assert wordy.stall_s == pytest.approx(40 * brief.stall_s)
