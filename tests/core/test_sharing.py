"""Chat and batch over several nodes: where a chat is read in time, what is taken back, what left-over chats bear."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.core.node import Facts, Load, ModelFacts, Node, Spec
from router.core.pace import Past
from router.core.placement import FAITHFUL, Run, Situation, TakeBack, Wait, WaitReason, packing_order, place
from router.core.yielding import STRETCH, Policy

CHAT, BATCH = Workload.INTERACTIVE, Workload.BATCH
STATED = Policy(ttft_p95_s=1.0)


def call(workload: Workload, prompt: int) -> Call:
    return Call(
        id="c",
        endpoint=ENDPOINTS["completions"],
        model="m",
        body=b"{}",
        prompt_tokens=prompt,
        output_tokens=32,
        workload=workload,
        reason=Reason.DEFAULT,
        stream=True,
    )


def learnt(name: str, *, answer: int = 200) -> Node:
    """A node that reads 10,000 tokens in a second, writes one in 20 ms, and whose answers are so long."""
    node = Node(Spec(name=name, url="http://h", pools=frozenset(Workload)))
    node.seen(Facts(models={"m": ModelFacts(context=131_072)}, tokens=1_000_000, sequences=64), Load(), 0.0)
    for _ in range(5):
        node.pace.read_quietly(2000, 0.2, chat=True)
        node.pace.read_quietly(30_000, 3.0, chat=False)
        node.pace.wrote(10, 0.2)
        node.pace.answered(answer)
        node.pace.chat_came(0.0)
    return node


def placed(nodes: list[Node], prompt: int, *, packed: int = 1, now: float = 10.0) -> str:
    decision = place(call(CHAT, prompt), nodes, now, Situation(packed=packed, policy=STATED))
    assert isinstance(decision, Run | TakeBack)
    return decision.node.name


def test_a_chat_goes_on_where_prompts_before_it_are_not_too_long_for_its_objective() -> None:
    nodes = [learnt("a"), learnt("b")]
    for _ in range(3):
        nodes[0].hold(call(CHAT, 2000), 10.0)
    assert placed(nodes, 2000) == "a", "0.6 s are to be read, and 0.2 s of its own"
    nodes[0].hold(call(CHAT, 3000), 10.0)
    assert placed(nodes, 2000) == "b"


def test_where_answers_are_short_little_is_read_beside_them() -> None:
    nodes = [learnt("a", answer=8), learnt("b", answer=8)]
    writing = nodes[0].hold(call(CHAT, 100), 9.0)
    nodes[0].spoke(writing, 9.1, streamed=True)
    assert placed(nodes, 2000) == "a", "0.2 s stretch eight tokens of 20 ms to no more than three times"
    assert placed(nodes, 4000) == "b"


def test_with_no_node_in_time_the_soonest_is_taken() -> None:
    nodes = [learnt("a"), learnt("b"), learnt("c")]
    for node, unread in zip(nodes, (30_000, 12_000, 20_000), strict=True):
        node.hold(call(CHAT, unread), 10.0)
    assert placed(nodes, 2000, packed=3) == "b"


def test_a_node_that_is_opened_is_the_one_whose_batch_has_read_least() -> None:
    nodes = [learnt("a"), learnt("b"), learnt("c")]
    for began_at, node in zip((1.0, 9.0, 5.0), nodes, strict=True):
        node.hold(call(BATCH, 30_000), began_at, Past())
    assert [node.name for node in packing_order(nodes)] == ["b", "c", "a"]


@pytest.mark.parametrize(("written_s", "begins"), [(2.0, False), (4.0, True)])
def test_batch_begins_beside_chats_left_over_once_they_have_written_for_long(written_s: float, *, begins: bool) -> None:
    chatting, left = learnt("a"), learnt("b")
    chatting.spoke(chatting.hold(call(CHAT, 100), 0.0), 0.1, streamed=True)
    left.spoke(left.hold(call(CHAT, 100), 9.9), 10.0, streamed=True)
    decision = place(
        call(BATCH, 30_000), [chatting, left], 10.0 + written_s, Situation(packed=1, policy=STATED, past=Past())
    )
    assert decision == Run(left) if begins else isinstance(decision, Wait)


def test_nothing_begins_beside_a_chat_left_over_that_is_still_read() -> None:
    chatting, left = learnt("a"), learnt("b")
    chatting.spoke(chatting.hold(call(CHAT, 100), 0.0), 0.1, streamed=True)
    left.hold(call(CHAT, 100), 0.0)
    decision = place(call(BATCH, 30_000), [chatting, left], 99.0, Situation(packed=1, policy=STATED, past=Past()))
    assert isinstance(decision, Wait)
    assert decision.reason is WaitReason.CHAT_PREFILL


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(600, 60_000)), max_size=30))
def test_an_answer_left_over_is_never_stretched_beyond_what_it_bears(tries: list[tuple[float, int]]) -> None:
    """However often batch begins beside it: of its time so far and the reading to come, a share stays its own."""
    chatting, left = learnt("a"), learnt("b")
    chatting.spoke(chatting.hold(call(CHAT, 100), 0.0), 0.1, streamed=True)
    answer = left.hold(call(CHAT, 100), 0.0)
    left.spoke(answer, 0.1, streamed=True)
    now, stalled_s = 0.1, 0.0
    for later, prompt in tries:
        now += later
        decision = place(call(BATCH, prompt), [chatting, left], now, Situation(packed=1, policy=STATED, past=Past()))
        if isinstance(decision, Run) and decision.node is left:
            read_s = left.pace.prefill_s(prompt) or 0.0
            own_s = now - 0.1 - stalled_s
            stalled_s += read_s
            assert stalled_s <= (STRETCH - 1.0) * own_s + 1e-6
            left.spoke(left.hold(call(BATCH, prompt), now, Past()), now + read_s, streamed=False)
            now += read_s


def taken_back(node: Node, *, read_s: float = 1.0) -> Past:
    """What a line has behind it that was read there for so long, until 10.0."""
    past = Past()
    node.take_back(node.hold(call(BATCH, 30_000), 10.0 - read_s, past), 10.0)
    return past


@pytest.mark.parametrize(("others", "waits_s"), [(False, 1.0), (True, FAITHFUL)])
def test_a_line_read_in_part_waits_for_its_node_and_longer_while_others_use_the_rest(
    waits_s: float, *, others: bool
) -> None:
    chatting, free = learnt("a"), learnt("b")
    past = taken_back(chatting)
    chatting.spoke(chatting.hold(call(CHAT, 100), 10.0), 10.1, streamed=True)
    situation = Situation(packed=1, policy=STATED, past=past, others=others)
    soon = place(call(BATCH, 30_000), [chatting, free], 10.0 + 0.9 * waits_s, situation)
    assert isinstance(soon, Wait)
    assert place(call(BATCH, 30_000), [chatting, free], 10.0 + 1.1 * waits_s, situation) == Run(free)
    past.urgent = True
    assert place(call(BATCH, 30_000), [chatting, free], 10.1, situation) == Run(free, firm=True), (
        "its window is about to close"
    )


def test_what_another_node_read_shortens_nothing_here_and_says_nothing_of_what_is_kept() -> None:
    here, there = learnt("a"), learnt("b")
    line, past = call(BATCH, 30_000), taken_back(there)
    assert there.left_s(line, past) == pytest.approx(2.0)
    assert here.left_s(line, past) == pytest.approx(3.0)
    before = past.losses
    here.spoke(here.hold(line, 20.0, past), 23.0, streamed=True)
    assert here.pace.kept is None
    assert past.losses - before == pytest.approx(1 / 3)


def test_an_answer_is_spared_what_was_taken_back_beside_it() -> None:
    node = learnt("a")
    answer = node.hold(call(CHAT, 100), 0.0)
    node.spoke(answer, 0.1, streamed=True)
    reading = node.hold(call(BATCH, 30_000), 10.0, Past())
    assert answer.stalled_s == pytest.approx(3.0)
    node.take_back(reading, 11.0)
    assert answer.stalled_s == pytest.approx(1.0)
