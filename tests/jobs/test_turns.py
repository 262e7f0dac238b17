"""Whose turn it is among the lines held here."""

from hypothesis import given
from hypothesis import strategies as st

from router.jobs.store import JobRow
from router.jobs.turns import FEW, Held, Pace, Turns

RETRIES = 5


def held(line: int = 1, attempts: int = 0) -> Held:
    return Held(
        JobRow(
            batch=1,
            batch_id="batch_1",
            line=line,
            custom_id=f"r{line}",
            caller="",
            endpoint="/v1/chat/completions",
            input=1,
            offset=0,
            length=10,
            model="tiny",
            prefix=0,
            size=1,
            attempts=attempts,
            returns=0,
            node=None,
            epoch=1,
            expires_at=0,
        ),
        0.0,
    )


def taken(turns: Turns) -> list[Held]:
    found = []
    while (one := turns.take()) is not None:
        found.append(one)
    return found


def turns_of(*attempts: int) -> tuple[Turns, list[Held]]:
    turns = Turns(RETRIES)
    lines = [held(number, count) for number, count in enumerate(attempts)]
    for one in lines:
        turns.add(one)
    return turns, lines


def test_lines_go_in_the_order_they_were_claimed():
    turns, lines = turns_of(0, 1, 0)
    assert taken(turns) == lines
    assert len(turns) == 0


def test_lines_in_doubt_run_few_at_once_beside_others():
    turns, lines = turns_of(*[2] * (FEW + 3), 0, 0)
    assert taken(turns) == [*lines[:FEW], *lines[-2:]]
    turns.done(lines[0])
    assert taken(turns) == [lines[FEW]]


def test_a_line_near_its_last_attempt_runs_without_another_in_doubt():
    turns, lines = turns_of(3, 4, 0)
    assert taken(turns) == [lines[0], lines[2]]
    assert turns.take() is None
    turns.done(lines[0])
    assert taken(turns) == [lines[1]]


def test_a_line_that_is_dropped_does_not_come():
    turns, lines = turns_of(0, 2, 0)
    turns.drop(lines[0])
    turns.drop(lines[1])
    assert taken(turns) == [lines[2]]


@given(st.lists(st.integers(0, RETRIES - 1), max_size=30), st.randoms())
def test_whatever_ends_first_everybody_has_a_turn_and_whoever_must_be_alone_is(attempts, random):
    turns, lines = turns_of(*attempts)
    running: set[Held] = set()
    seen: list[Held] = []
    while len(seen) < len(lines):
        new = taken(turns)
        running.update(new)
        seen += new
        doubted = [one for one in running if one.job.attempts >= 2]
        assert len(doubted) <= FEW
        assert len(doubted) == 1 or all(one.job.attempts < 3 for one in doubted)
        assert running
        one = random.choice(sorted(running, key=lambda held: held.job.line))
        running.discard(one)
        turns.done(one)
    assert sorted(one.job.line for one in seen) == list(range(len(lines)))


def test_pace_is_of_the_last_second():
    pace = Pace()
    for _ in range(5):
        pace.count(10.2)
    assert (pace.of(10.9), pace.of(11.5), pace.of(12.0)) == (5, 5, 0)
    pace.count(11.9)
    assert pace.of(11.9) == 5
