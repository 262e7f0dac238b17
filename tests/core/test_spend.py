"""The relay's account: what is charged when, which cap is met, and that a day rolls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.call import ENDPOINTS, Call, Reason, Usage, Workload
from router.core.spend import SLOT_S, Cap, Price, Spend

NOW = 1_800_000_000.0
DAY = 86_400


def call(prompt=1000, output=1000, *, job=False, **changed):
    whole = {
        "id": "req_1",
        "endpoint": ENDPOINTS["chat/completions"],
        "model": "big",
        "body": b"{}",
        "prompt_tokens": prompt,
        "output_tokens": output,
        "workload": Workload.BATCH if job else Workload.INTERACTIVE,
        "reason": Reason.JOB if job else Reason.STREAM,
    }
    return Call(**{**whole, **changed})


def spend(usd=10.0, share=1.0):
    return Spend({"big": Price(input=1000.0, output=3000.0)}, usd, share)


def test_a_call_is_estimated_by_its_tokens_over_all_its_sequences():
    account = spend()
    assert account.estimate(call(1000, 1000)) == pytest.approx(4.0)
    assert account.estimate(call(1000, 1000, sequences=2)) == pytest.approx(7.0)
    assert account.estimate(call(1000, 0)) == pytest.approx(1.0)
    assert account.estimate(call(1000, 1000, sequences=0)) == 0.0, "looking at a response costs nothing"
    assert account.estimate(call(model="free")) == 0.0


def test_the_cap_counts_what_is_under_way_and_what_was_saved_comes_back():
    account = spend(10.0)
    charges = []
    while account.reached(call(), NOW) is None:
        charges.append(account.charge(call(), NOW))
    assert (len(charges), account.day(NOW)) == (2, pytest.approx(8.0))
    assert account.reached(call(), NOW) is Cap.DAY
    account.settle(charges[0], account.cost("big", Usage(1000, 100)))
    assert account.day(NOW) == pytest.approx(5.3)
    assert account.reached(call(), NOW) is None


def test_batches_have_a_share_and_people_the_rest():
    account = spend(10.0, share=0.5)
    account.charge(call(job=True), NOW)
    assert account.reached(call(job=True), NOW) is Cap.BATCHES
    assert account.reached(call(), NOW) is None
    account.charge(call(), NOW)
    assert (account.day(NOW), account.day(NOW, batch=True)) == (pytest.approx(8.0), pytest.approx(4.0))
    assert account.reached(call(), NOW) is Cap.DAY


def test_a_cap_of_nothing_lets_only_free_calls_out():
    account = spend(0.0)
    assert account.reached(call(), NOW) is Cap.DAY
    assert account.reached(call(model="free"), NOW) is None


def test_a_day_rolls():
    account = spend(10.0)
    for hour in range(0, 24, 6):
        account.charge(call(500, 500), NOW + hour * 3600)
    assert account.reached(call(), NOW + DAY - 1) is Cap.DAY
    assert account.day(NOW + DAY - SLOT_S) == pytest.approx(8.0)
    assert account.day(NOW + DAY + SLOT_S) == pytest.approx(6.0)
    assert account.reached(call(), NOW + DAY + SLOT_S) is None
    assert account.day(NOW + 3 * DAY) == 0.0


def test_what_is_written_down_is_known_by_another():
    one, other = spend(), spend()
    charge = one.charge(call(), NOW)
    written = one.take()
    assert one.take() == {}
    other.charge(call(), NOW)
    other.know(written)
    assert other.day(NOW) == pytest.approx(8.0)
    one.settle(charge, 1.0)
    one.know(written)
    assert one.day(NOW) == pytest.approx(1.0), "what came since stays on top"
    lost = one.take()
    one.put_back(lost)
    one.know(written)
    assert one.day(NOW) == pytest.approx(1.0)


steps = st.lists(
    st.tuples(st.sampled_from("csw"), st.floats(0, 5), st.integers(0, DAY // 4), st.booleans()), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_sums_are_the_sum_of_their_parts(steps):
    """Whatever order charges, settlements and writings come in, a day's sum is that of its charges."""
    account, now = spend(1e9), NOW
    written, out, ended = {}, [], []
    for kind, usd, later, job in steps:
        if kind == "c":
            out.append(account.charge(call(job=job), now))
        elif kind == "s" and out:
            charge = out.pop(0)
            account.settle(charge, usd)
            ended.append((charge, usd))
        elif kind == "w":
            for key, more in account.take().items():
                written[key] = written.get(key, 0.0) + more
            account.know(written)
            now += later
    oldest = int(now) // SLOT_S - 144
    parts = [*((charge, charge.usd) for charge in out), *ended]
    for kinds, told in (((True,), account.day(now, batch=True)), ((True, False), account.day(now))):
        due = [usd for charge, usd in parts if charge.batch in kinds and charge.slot >= oldest]
        assert told == pytest.approx(sum(due), abs=1e-6)
