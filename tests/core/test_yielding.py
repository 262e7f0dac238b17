"""How batch makes way for chat on one node: who is taken back, when batch begins, and that it always gets through."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.budget import Permit
from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.core.node import Facts, Load, ModelFacts, Node, Spec
from router.core.pace import Past
from router.core.placement import Run, Situation, TakeBack, Wait, WaitReason, place
from router.core.yielding import FOR_CHAT, LOSSES_MOST, SMALL_TOKENS, TRICKLE, Begin, Policy, begin, victims

CHAT, BATCH = Workload.INTERACTIVE, Workload.BATCH
POLICY = Policy()


def call(workload: Workload, prompt: int, output: int = 32, **fields: object) -> Call:
    said = {
        "id": "c",
        "endpoint": ENDPOINTS["completions"],
        "model": "m",
        "body": b"{}",
        "prompt_tokens": prompt,
        "output_tokens": output,
        "workload": workload,
        "reason": Reason.DEFAULT if workload is CHAT else Reason.JOB,
        "stream": True,
    }
    return Call(**{**said, **fields})


def make_node(pools: Iterable[Workload] = Workload, *, tokens: int = 100_000, sequences: int = 8) -> Node:
    node = Node(Spec(name="a", url="http://h", pools=frozenset(pools)))
    node.seen(Facts(models={"m": ModelFacts(context=32768)}, tokens=tokens, sequences=sequences), Load(), 0.0)
    return node


def learnt(*, kept: float | None = None, residue_s: float = 0.05) -> Node:
    """A node that reads 200 tokens in 10 ms and 20,000 in 2 s, writes one in 5 ms, and hears from chat each second."""
    node = make_node()
    for second in range(6):
        node.pace.read_quietly(200, 0.010, chat=True)
        node.pace.read_quietly(20_000, 2.0, chat=False)
        node.pace.wrote(10, 0.05)
        node.pace.chat_came(float(second))
        node.pace.took(200, 0.010 + residue_s)
    node.pace._kept = kept
    return node


LONG, SHORT = call(BATCH, 20_000), call(CHAT, 200)


def test_a_long_prompt_that_is_read_is_taken_back_and_one_that_writes_is_left() -> None:
    node = learnt()
    writing = node.hold(call(BATCH, 20_000), 10.0, Past())
    node.spoke(writing, 12.0, streamed=True)
    reading = node.hold(call(BATCH, 20_000), 12.0, Past())
    assert victims(SHORT, node, POLICY, 12.5) == (reading,)
    assert place(SHORT, [node], 12.5, Situation()) == TakeBack(node, (reading,))


def test_a_prompt_that_is_nearly_read_is_left() -> None:
    node = learnt()
    node.hold(call(BATCH, 20_000), 10.0, Past())
    assert victims(SHORT, node, Policy(ttft_p95_s=0.5), 11.6) == (), "0.4 s are left, and 0.5 may be waited"
    assert victims(SHORT, node, Policy(ttft_p95_s=0.3), 11.6) != ()


def test_what_is_read_in_one_step_is_left() -> None:
    node = learnt()
    node.hold(call(BATCH, SMALL_TOKENS), 10.0, Past())
    assert victims(SHORT, node, POLICY, 10.0) == ()


def test_with_no_room_the_newest_and_least_written_goes_first() -> None:
    node = make_node(tokens=None, sequences=3)
    old, new, newest = (node.hold(call(BATCH, 100), float(at), Past()) for at in range(3))
    for permit, at in ((old, 3.0), (newest, 4.0), (new, 5.0)):
        node.spoke(permit, at, streamed=True)
    assert victims(SHORT, node, POLICY, 6.0) == (new,), "its first token came last"
    old.firm = new.firm = newest.firm = True
    assert victims(SHORT, node, POLICY, 6.0) is None


def test_nobody_is_taken_back_for_room_that_would_not_be_enough() -> None:
    node = make_node(tokens=1000)
    node.hold(call(CHAT, 900, 50), 0.0)
    node.hold(call(BATCH, 40, 5), 0.0, Past())
    assert victims(call(CHAT, 500), node, POLICY, 1.0) is None
    assert place(call(CHAT, 500), [node], 1.0, Situation()) == Wait(WaitReason.NO_ROOM)


def test_batch_begins_when_nobody_chats_and_one_long_prompt_at_a_time() -> None:
    node = learnt()
    assert begin(LONG, node, None, POLICY, 10.0) == Begin()
    node.spoke(node.hold(LONG, 10.0, Past()), 12.0, streamed=True)
    assert begin(LONG, node, None, POLICY, 12.0) == Begin(), "one writes, the next is read"
    node.hold(LONG, 12.0, Past())
    assert begin(LONG, node, None, POLICY, 12.1) == Begin(WaitReason.BATCH_PREFILL)


def test_batch_waits_for_chat_that_is_read_or_written() -> None:
    node = learnt()
    chat = node.hold(SHORT, 10.0)
    assert begin(LONG, node, None, POLICY, 10.0) == Begin(WaitReason.CHAT_PREFILL)
    node.spoke(chat, 10.01, streamed=True)
    assert begin(LONG, node, None, POLICY, 10.1) == Begin(WaitReason.CHAT_DECODE)
    assert begin(call(BATCH, 100), node, None, POLICY, 10.1).reason is None, "5 ms fit between two tokens"


def test_a_node_without_chat_in_its_pools_is_filled() -> None:
    node = make_node([BATCH])
    for _ in range(3):
        node.hold(LONG, 0.0, Past())
    assert begin(LONG, node, None, POLICY, 0.0) == Begin()


def test_where_nothing_is_kept_batch_waits_for_a_likely_pause() -> None:
    node = learnt(kept=0.0)
    assert begin(LONG, node, None, POLICY, 5.1) == Begin(WaitReason.CHAT_EXPECTED), "2 s of silence, chat each second"
    assert begin(LONG, node, None, POLICY, 15.0) == Begin(), "ten seconds of silence make two more likely"


def test_an_objective_below_one_step_leaves_batch_the_trickle() -> None:
    node, policy = learnt(kept=1.0, residue_s=0.5), Policy(ttft_p95_s=0.1)
    assert begin(LONG, node, None, policy, 5.1) == Begin(WaitReason.CHAT_EXPECTED)
    node.trickle_s = 2.5
    assert begin(LONG, node, None, policy, 5.1) == Begin(firm=True)


def test_who_lost_enough_or_is_due_is_not_taken_back() -> None:
    node, past = learnt(), Past("a")
    past.times, past.losses = 3, LOSSES_MOST
    chat = node.hold(SHORT, 10.0)
    assert begin(LONG, node, past, POLICY, 10.0) == Begin(WaitReason.CHAT_PREFILL), "never into a chat's prompt"
    node.spoke(chat, 10.01, streamed=True)
    assert begin(LONG, node, past, POLICY, 10.1) == Begin(firm=True)
    due = Past()
    due.urgent = True
    assert begin(LONG, node, due, POLICY, 10.1) == Begin(firm=True)


def test_a_line_that_becomes_due_while_it_is_read_is_left() -> None:
    node, past = learnt(), Past()
    reading = node.hold(LONG, 10.0, past)
    assert victims(SHORT, node, POLICY, 10.5) == (reading,)
    past.urgent = True
    assert victims(SHORT, node, POLICY, 10.5) == ()


@dataclass
class World:
    """One engine that reads one batch prompt after another, in steps; chat comes as told, batch is always there."""

    keeps: bool = True
    whole_s: float = 2.0
    step_s: float = 0.05
    node: Node = field(default_factory=lambda: make_node(sequences=10_000))
    now: float = 0.0
    done: int = 0
    takes: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    wasted_s: float = 0.0

    def __post_init__(self) -> None:
        facts = self.node.facts
        self.node.facts = msgspec.structs.replace(facts, engine="vllm" if self.keeps else "openai")
        self.chats: list[tuple[float, Permit]] = []
        self.permit: Permit | None = None
        self.reason, self.looked_at = WaitReason.NO_ROOM, 0.0
        self.next_line()

    def next_line(self) -> None:
        self.past, self.permit, self.left = Past(), None, self.whole_s

    def run(self, arrivals: list[float], chat_s: float, seconds: float) -> None:
        """Each chat writes for `chat_s`."""
        coming = deque(arrivals)
        while self.now < seconds:
            self.now += self.step_s
            for ends, chat in [one for one in self.chats if one[0] <= self.now]:
                self.chats.remove((ends, chat))
                with chat:
                    pass
            while coming and coming[0] <= self.now:
                coming.popleft()
                self.chat_comes(chat_s)
            if self.permit is None:
                self.batch_asks()
            else:
                self.batch_is_read(self.permit)

    def chat_comes(self, chat_s: float) -> None:
        decision = place(SHORT, [self.node], self.now, Situation())
        if isinstance(decision, TakeBack):
            for victim in decision.victims:
                self.node.take_back(victim, self.now)
            if not self.keeps:
                self.wasted_s += self.whole_s - self.left
                self.left = self.whole_s
            self.permit = None
        chat = self.node.hold(SHORT, self.now)
        self.waited.append(self.step_s if self.permit is None else self.left)
        self.node.spoke(chat, self.now + 0.01, streamed=True)
        self.chats.append((self.now + chat_s, chat))

    def batch_asks(self) -> None:
        node = self.node
        decision = place(LONG, [node], self.now, Situation(past=self.past))
        if isinstance(decision, Run):
            if decision.firm:
                node.trickle_s = max(0.0, node.trickle_s - (node.pace.left_s(20_000, self.past) or 0.0))
            self.permit = node.hold(LONG, self.now, self.past)
            self.permit.firm = decision.firm
        elif isinstance(decision, Wait):
            if self.reason in FOR_CHAT:
                node.trickle_s += TRICKLE * (self.now - self.looked_at)
            self.reason, self.looked_at = decision.reason, self.now

    def batch_is_read(self, permit: Permit) -> None:
        self.left -= self.step_s
        if self.left <= 0:
            self.node.spoke(permit, self.now, streamed=True)
            with permit:
                pass
            self.done += 1
            self.takes.append(self.past.times)
            self.next_line()


def test_beside_chat_with_pauses_batch_gets_nearly_all_of_them() -> None:
    world = World()
    world.run([float(second) for second in range(1, 400)], 0.3, 400)
    assert world.done * world.whole_s > 0.85 * 400 * 0.7
    assert max(world.waited) <= 2 * world.step_s, "what pauses give is not given a second time, at chat's cost"


@pytest.mark.parametrize(("engine", "left"), [("vllm", 0.5), ("openai", 2.0)])
def test_what_was_read_in_a_pause_and_kept_counts_against_the_trickle(engine: str, left: float) -> None:
    node = make_node(sequences=10)
    node.facts = msgspec.structs.replace(node.facts, engine=engine)
    node.trickle_s = 2.0
    with node.hold(LONG, 0.0, Past()) as permit:
        node.take_back(permit, 1.5)
    assert node.trickle_s == pytest.approx(left)


@pytest.mark.parametrize(("firm", "left"), [(False, 0.5), (True, 2.0)])
def test_a_line_read_in_a_pause_counts_too_and_one_the_trickle_paid_for_not_twice(firm: bool, left: float) -> None:
    node = make_node(sequences=10)
    node.trickle_s = 2.0
    with node.hold(LONG, 0.0, Past()) as permit:
        permit.firm = firm
        node.spoke(permit, 1.5, streamed=True)
    assert node.trickle_s == pytest.approx(left)


@pytest.mark.parametrize("keeps", [True, False])
def test_chat_without_a_pause_leaves_batch_a_trickle(keeps: bool) -> None:
    world = World(keeps=keeps)
    world.run([second / 4 for second in range(1, 4 * 600)], 0.6, 600)
    assert world.done * world.whole_s >= 0.02 * 600
    hurt = sum(wait > world.step_s for wait in world.waited) / len(world.waited)
    assert hurt <= 0.05, "within what a p95 objective bears"


def test_bursts_do_not_keep_a_long_line_from_its_end() -> None:
    """Chat for 5 s in every 20, a line that needs 25 s, and an engine that keeps nothing."""
    world = World(keeps=False, whole_s=25.0)
    bursts = [20.0 * burst + second / 2 for burst in range(140) for second in range(10)]
    world.run(bursts, 0.5, 2800)
    assert world.done >= 4, "a line that outlasts every pause lives on the trickle"
    assert max(world.takes) <= LOSSES_MOST
    assert world.wasted_s < 0.3 * world.done * world.whole_s


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.floats(0.05, 20), min_size=1, max_size=40),
    chat_s=st.floats(0.1, 3),
    keeps=st.booleans(),
    whole_s=st.floats(0.2, 8),
)
def test_whatever_chat_does_batch_gets_through_and_nobody_is_left_behind(
    gaps: list[float], chat_s: float, keeps: bool, whole_s: float
) -> None:
    arrivals, now = [], 0.0
    while now < 500:
        for gap in gaps:
            now += gap
            arrivals.append(now)
    world = World(keeps=keeps, whole_s=whole_s)
    world.run(arrivals, chat_s, 500)
    assert world.done >= 1
    assert max(world.takes) <= 200
    budget = world.node.budget
    assert budget.chats == sum(permit.workload is CHAT for permit in budget)
    assert budget.prefilling == sum(permit.spoke_at is None for permit in budget)
