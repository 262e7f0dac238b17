"""The last hour in slots: what is counted, what is forgotten, what it may cost."""

from types import SimpleNamespace
from typing import Any

from router.core.account import Account
from router.core.call import ENDPOINTS, Call, Outcome, Reason, Usage, Workload
from router.core.events import Events, Topic
from router.core.placement import WaitReason
from router.dispatch.history import MOST_KINDS, SLOT_S, SLOTS, History, Kind, Tally

CHAT = Workload.INTERACTIVE


class Time:
    def __init__(self) -> None:
        self.at = 1_000_020.0

    def __call__(self) -> float:
        return self.at


def account(
    first_s: float | None = 0.1, *, node: str = "a", model: str = "m", outcome: Outcome = Outcome.COMPLETED
) -> Account:
    call = Call(
        id="c",
        endpoint=ENDPOINTS["chat/completions"],
        model=model,
        body=b"",
        prompt_tokens=1,
        output_tokens=1,
        workload=CHAT,
        reason=Reason.DEFAULT,
        caller="ann",
    )
    return Account(call, outcome, place=node, first_token_s=first_s, usage=Usage(5, 7))


def whole(history: History) -> Tally:
    tally = Tally()
    for slot in history.recent():
        tally.add(slot.sum(lambda kind: True))
    return tally


def test_calls_failures_tokens_and_first_tokens_are_counted():
    history = History(Time())
    for number in range(1, 101):
        history.ended(account(number / 100))
    history.ended(account(None, outcome=Outcome.TIMED_OUT))
    history.ended(account(None, outcome=Outcome.CLIENT_LEFT))
    tally = whole(history)
    assert (tally.calls, tally.failed, tally.output_tokens) == (102, 1, 714)
    for share in (0.5, 0.95):
        found = tally.quantile_s(share)
        assert found is not None
        assert abs(found / share - 1) < 0.05
    assert Tally().quantile_s(0.5) is None


def test_five_minutes_are_now_and_an_hour_is_kept():
    time = Time()
    history = History(time)
    history.ended(account())
    time.at += 301 + SLOT_S
    assert whole(history).calls == 0
    assert len(history.slots()) == 1
    time.at += SLOTS * SLOT_S
    assert history.slots() == []
    for _ in range(2 * SLOTS):
        history.ended(account())
        time.at += SLOT_S
    assert len(history.slots()) <= SLOTS


def test_strangers_cannot_make_it_grow():
    history = History(Time())
    for number in range(1000):
        history.ended(account(model=f"model-{number}" + "x" * 1000))
    kinds = history.now().kinds
    assert len(kinds) == MOST_KINDS + 1
    assert sum(tally.calls for tally in kinds.values()) == 1000
    assert max(len(model) for _, model, _, _ in kinds) <= 128


def test_waits_are_seen_by_reason():
    history = History(Time())
    waiter: Any = SimpleNamespace(call=account().call, reason=WaitReason.NO_ROOM)
    history.look([waiter, waiter])
    history.look([])
    slot = history.now()
    assert slot.looks == 2
    assert {(wait.reason, wait.caller): seen for wait, seen in slot.waits.items()} == {("no_room", "ann"): 2}


def test_a_minute_becomes_a_point_of_the_nodes_trail():
    time = Time()
    history = History(time)
    for first_s in (0.1, 0.2, 0.3):
        history.ended(account(first_s))
        time.at += SLOT_S
    history.ended(account(node="relay"))
    time.at += 60
    history.ended(account(node="b"))
    ((_, seconds),) = history.trail("a")
    assert seconds is not None
    assert abs(seconds / 0.2 - 1) < 0.05
    assert history.trail("relay") == []
    time.at += SLOTS * SLOT_S
    assert history.trail("a") == []


def test_a_sum_takes_what_is_wanted():
    history = History(Time())
    history.ended(account(node="a"))
    history.ended(account(node="b"))
    wanted: list[Kind] = []
    tally = history.now().sum(lambda kind: kind.node == "b" and not wanted.append(kind))
    assert (tally.calls, [kind.node for kind in wanted]) == (1, ["b"])


def test_the_ring_of_events_forgets_the_oldest_and_numbers_go_on():
    events = Events(Time(), most=3)
    for number in range(5):
        events.add(Topic.NODE, f"{number}" + "x" * 1000, node="a")
    assert [(entry.number, entry.text[0]) for entry in events] == [(3, "2"), (4, "3"), (5, "4")]
    assert max(len(entry.text) for entry in events) == 512
    assert events.last == 5


def test_a_storm_of_take_backs_pushes_nothing_else_out():
    events = Events(Time(), most=4)
    events.add(Topic.NODE, "ready → down: refused", node="a")
    for number in range(9):
        events.add(Topic.TAKE_BACK, f"took back {number}")
    events.add(Topic.OPERATOR, "ops asked to drain node a")
    assert [entry.number for entry in events] == [1, 9, 10, 11]
