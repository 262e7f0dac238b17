"""Room is held for a block and given back: never negative, never above capacity, the reserve left alone."""

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from router.core.budget import Budget, Permit, Room, kept_back
from router.core.call import Workload

CHAT, BATCH = Workload.INTERACTIVE, Workload.BATCH
rooms = st.builds(Room, st.integers(0, 120), st.integers(1, 5))
workloads = st.sampled_from(Workload)
capacities = st.none() | st.integers(1, 100)


class Holding(RuleBasedStateMachine):
    """Permits come and go, others come and go, and at the end everything is there again."""

    permits: Bundle[Permit] = Bundle("permits")

    @initialize(tokens=capacities, sequences=st.none() | st.integers(1, 8), reserve=st.floats(0, 1))
    def begin(self, tokens: int | None, sequences: int | None, reserve: float) -> None:
        self.budget = Budget(tokens, sequences, reserve)
        self.open: list[Permit] = []

    @rule(target=permits, room=rooms, workload=workloads)
    def take(self, room: Room, workload: Workload) -> Permit:
        before = self.budget.held()
        fits = self.budget.fits(room, workload)
        permit = (self.budget if fits else Budget()).hold(room, workload)
        if fits:
            self.open.append(permit)
            self._within(self.budget.held())
            self._reserve_is_kept(workload)
        else:
            assert self.budget.held() == before
        return permit

    @rule(permit=consumes(permits), twice=st.booleans())
    def give_back(self, permit: Permit, twice: bool) -> None:
        for _ in range(1 + twice):
            with permit:
                pass
        if permit in self.open:
            self.open.remove(permit)

    @rule(foreign=st.builds(Room, st.integers(0, 150), st.integers(0, 10)))
    def others(self, foreign: Room) -> None:
        self.budget.foreign = foreign

    @rule(room=rooms)
    def chat_is_never_worse_off_than_batch(self, room: Room) -> None:
        assert self.budget.fits(room, CHAT) or not self.budget.fits(room, BATCH)

    def _within(self, held: Room) -> None:
        foreign = self.budget.foreign
        assert self.budget.tokens is None or held.tokens + foreign.tokens <= self.budget.tokens
        assert self.budget.sequences is None or held.sequences + foreign.sequences <= self.budget.sequences

    def _reserve_is_kept(self, workload: Workload) -> None:
        batch = [permit for permit in self.open if permit.workload is BATCH]
        if workload is not BATCH or len(batch) < 2 or not self.budget.reserve:
            return
        held = self.budget.held(BATCH)
        for used, capacity in ((held.tokens, self.budget.tokens), (held.sequences, self.budget.sequences)):
            if capacity is not None:
                largest = max(
                    permit.room.tokens if capacity is self.budget.tokens else permit.room.sequences for permit in batch
                )
                assert used <= max(capacity - kept_back(capacity, self.budget.reserve), largest)

    @invariant()
    def the_sum_of_permits_is_held(self) -> None:
        if not hasattr(self, "open"):
            return
        assert set(self.budget) == set(self.open)
        for workload in (None, *Workload):
            mine = [permit.room for permit in self.open if workload in (None, permit.workload)]
            total = Room(sum(room.tokens for room in mine), sum(room.sequences for room in mine))
            assert self.budget.held(workload) == total
            assert total.tokens >= 0
            assert total.sequences >= 0
        assert self.budget.used() >= 0

    def teardown(self) -> None:
        for permit in list(getattr(self, "open", ())):
            self.give_back(permit, twice=True)
        if hasattr(self, "open"):
            assert self.budget.held() == Room(0, 0)
            assert not list(self.budget)


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_block_that_fails_gives_back_too() -> None:
    budget = Budget(100, 4)
    with contextlib.suppress(KeyError), budget.hold(Room(10, 1), CHAT):
        assert budget.held() == Room(10, 1)
        raise KeyError
    assert budget.held() == Room(0, 0)


def test_an_unknown_capacity_does_not_limit() -> None:
    budget = Budget(None, None, reserve=0.5)
    assert budget.fits(Room(10**9, 10**6), BATCH)
    assert budget.used() == 0


def test_a_call_larger_than_the_node_takes_all_of_it() -> None:
    budget = Budget(100, 4)
    assert budget.fits(Room(500, 9), CHAT)
    with budget.hold(Room(500, 9), CHAT):
        assert budget.held() == Room(100, 4)
        assert not budget.fits(Room(1, 1), CHAT)


def test_batch_leaves_the_reserve_to_chat() -> None:
    budget = Budget(100, 4, reserve=0.25)
    with budget.hold(Room(70, 1), BATCH):
        assert budget.fits(Room(5, 1), BATCH)
        assert not budget.fits(Room(6, 1), BATCH)
        assert budget.fits(Room(30, 1), CHAT)
    with budget.hold(Room(1, 3), BATCH):
        assert not budget.fits(Room(1, 1), BATCH)
        assert budget.fits(Room(1, 1), CHAT)


def test_a_batch_call_larger_than_its_share_runs_alone_among_batch() -> None:
    budget = Budget(100, None, reserve=0.25)
    assert budget.fits(Room(90, 1), BATCH)
    with budget.hold(Room(10, 1), BATCH):
        assert not budget.fits(Room(90, 1), BATCH)
    with budget.hold(Room(90, 1), BATCH):
        assert not budget.fits(Room(1, 1), BATCH)
        assert budget.fits(Room(10, 1), CHAT)


def test_what_others_run_counts_as_taken() -> None:
    budget = Budget(100, 4)
    budget.foreign = Room(95, 3)
    assert budget.fits(Room(5, 1), CHAT)
    assert not budget.fits(Room(6, 1), CHAT)
    assert not budget.fits(Room(1, 2), CHAT)
    budget.foreign = Room(300, 9)
    assert not budget.fits(Room(1, 1), CHAT)
    assert budget.used() == 3.0


@pytest.mark.parametrize(
    ("capacity", "reserve", "kept"),
    [(100, 0.0, 0), (100, 0.25, 25), (101, 0.25, 26), (4, 0.25, 1), (1, 0.25, 0), (2, 0.99, 1), (100, 1.0, 99)],
)
def test_the_reserve_is_rounded_up_and_never_everything(capacity: int, reserve: float, kept: int) -> None:
    assert kept_back(capacity, reserve) == kept


@pytest.mark.parametrize("capacity", [{"tokens": 0}, {"sequences": 0}])
@pytest.mark.parametrize("workload", Workload)
def test_nothing_fits_into_nothing(capacity: dict[str, int], workload: Workload) -> None:
    assert not Budget(**capacity, reserve=0.25).fits(Room(1, 1), workload)
