import asyncio
from contextlib import ExitStack

import pytest

from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.core.node import Facts, Load, ModelFacts, Node, Sign, Spec
from router.core.placement import RelayCause, Situation
from router.dispatch.admission import Admission, Limits
from router.dispatch.grant import Grant, RelayGrant
from router.errors import ContextTooLong, ModelNotFound, NotFound, Overloaded, RequestTimeout

BOTH = frozenset(Workload)


def make_call(workload=Workload.INTERACTIVE, **fields):
    told = {
        "id": "req_1",
        "endpoint": ENDPOINTS["chat/completions"],
        "model": "m",
        "body": b"{}",
        "prompt_tokens": 100,
        "output_tokens": 100,
        "workload": workload,
        "reason": Reason.DEFAULT,
        "least_tokens": 100,
    }
    return Call(**(told | fields))


def make_node(name="a", *, sequences=1, context=8192, pools=BOTH, reserve=0.0):
    node = Node(Spec(name=name, url="http://127.0.0.1:1", pools=pools), reserve=reserve)
    node.seen(Facts(models={"m": ModelFacts(context=context)}, sequences=sequences), Load(), 0.0)
    return node


def make_admission(*nodes, patience_s=5.0, queue_calls=100, queue_bytes=10**6):
    limits = Limits(patience_s=patience_s, queue_calls=queue_calls, queue_bytes=queue_bytes)
    clock = asyncio.get_running_loop().time
    return Admission(nodes, dict.fromkeys(Workload, limits), clock, lambda *_: None)


async def ask(admission, call, **situation):
    return await admission.grant(call, Situation(**situation), asyncio.get_running_loop().time())


async def waiting(admission, count):
    """Let tasks run until that many wait."""
    for _ in range(100):
        if len(admission.waiters()) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{len(admission.waiters())} wait, not {count}")


async def test_a_call_that_fits_runs_at_once_and_its_room_returns():
    node = make_node()
    granted = await ask(make_admission(node), make_call())
    assert isinstance(granted, Grant)
    assert granted.node is node
    assert node.budget.held().sequences == 1
    with granted.permit:
        pass
    assert node.budget.held().sequences == 0


async def test_waiters_are_served_in_order_of_arrival():
    node = make_node()
    admission = make_admission(node)
    first = await ask(admission, make_call())
    order = []

    async def run(number):
        granted = await ask(admission, make_call(id=f"req_{number}"))
        with granted.permit:
            order.append(number)
        admission.changed()

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(run(number)))
        await waiting(admission, number + 1)
    with first.permit:
        pass
    admission.changed()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_interactive_waiters_come_before_batch_waiters():
    node = make_node()
    admission = make_admission(node)
    first = await ask(admission, make_call())
    order = []

    async def run(workload):
        granted = await ask(admission, make_call(workload))
        with granted.permit:
            order.append(workload)
        admission.changed()

    batch = asyncio.create_task(run(Workload.BATCH))
    await waiting(admission, 1)
    chat = asyncio.create_task(run(Workload.INTERACTIVE))
    await waiting(admission, 2)
    with first.permit:
        pass
    admission.changed()
    await asyncio.gather(batch, chat)
    assert order == [Workload.INTERACTIVE, Workload.BATCH]


async def test_a_newcomer_does_not_overtake_a_waiter_for_the_same_model():
    node = make_node(sequences=2)
    admission = make_admission(node)
    with ExitStack() as held:
        held.enter_context((await ask(admission, make_call())).permit)
        large = asyncio.create_task(ask(admission, make_call(sequences=2)))
        await waiting(admission, 1)
        small = asyncio.create_task(ask(admission, make_call()))
        await waiting(admission, 2)
    admission.changed()
    granted = await large
    assert not small.done()
    with granted.permit:
        pass
    admission.changed()
    with (await small).permit:
        pass


async def test_batch_leaves_the_reserve_to_chat():
    node = make_node(sequences=4, reserve=0.25)
    admission = make_admission(node)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context((await ask(admission, make_call(Workload.BATCH))).permit)
        fourth = asyncio.create_task(ask(admission, make_call(Workload.BATCH)))
        await waiting(admission, 1)
        held.enter_context((await ask(admission, make_call())).permit)
        assert not fourth.done()
    admission.changed()
    with (await fourth).permit:
        pass


async def test_patience_ends_in_overloaded_with_a_retry_after():
    node = make_node()
    admission = make_admission(node, patience_s=0.05)
    with (await ask(admission, make_call())).permit, pytest.raises(Overloaded) as refused:
        await ask(admission, make_call())
    assert 1 <= refused.value.retry_after_s <= 60
    assert admission.waiters() == []


async def test_patience_ends_in_the_relay_where_one_is_mapped():
    admission = make_admission(make_node(), patience_s=0.05)
    with (await ask(admission, make_call())).permit:
        assert await ask(admission, make_call(), relay=True) == RelayGrant(RelayCause.NO_ROOM)


async def test_the_clients_own_deadline_ends_its_wait():
    admission = make_admission(make_node())
    with (await ask(admission, make_call())).permit, pytest.raises(RequestTimeout):
        await ask(admission, make_call(deadline_s=0.05))


async def test_a_waiter_that_leaves_is_forgotten_and_blocks_nobody():
    node = make_node()
    admission = make_admission(node)
    with (await ask(admission, make_call())).permit:
        leaving = asyncio.create_task(ask(admission, make_call()))
        await waiting(admission, 1)
        staying = asyncio.create_task(ask(admission, make_call()))
        await waiting(admission, 2)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert len(admission.waiters()) == 1
    admission.changed()
    with (await staying).permit:
        pass
    assert node.budget.held().sequences == 0


async def test_room_granted_to_somebody_who_left_is_given_back():
    node = make_node()
    admission = make_admission(node)
    permit = (await ask(admission, make_call())).permit
    leaving = asyncio.create_task(ask(admission, make_call()))
    await waiting(admission, 1)
    with permit:
        pass
    admission.changed()
    assert node.budget.held().sequences == 1, "granted, not yet picked up"
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert node.budget.held().sequences == 0


async def test_the_queue_is_bounded_in_calls():
    admission = make_admission(make_node(), queue_calls=1)
    with (await ask(admission, make_call())).permit:
        waiter = asyncio.create_task(ask(admission, make_call()))
        await waiting(admission, 1)
        with pytest.raises(Overloaded):
            await ask(admission, make_call())
        assert await ask(admission, make_call(), relay=True) == RelayGrant(RelayCause.NO_ROOM)
        waiter.cancel()
        await asyncio.wait([waiter])


async def test_the_queue_is_bounded_in_bytes_and_its_count_returns_to_zero():
    seen = []
    node = make_node()
    limits = Limits(patience_s=5, queue_calls=1000, queue_bytes=10 * 2**20)
    admission = Admission(
        [node], dict.fromkeys(Workload, limits), asyncio.get_running_loop().time, lambda *row: seen.append(row)
    )
    body = b"x" * 2**20
    with (await ask(admission, make_call())).permit:
        tasks = [asyncio.create_task(ask(admission, make_call(body=body))) for _ in range(100)]
        await waiting(admission, 10)
        done, pending = await asyncio.wait(tasks, timeout=0)
        refused, left = [task.exception() for task in done], list(pending)
        assert len(refused) == 90
        assert all(isinstance(error, Overloaded) for error in refused)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
    assert seen[-1] == (Workload.INTERACTIVE, 0, 0)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "unknown"}, ModelNotFound),
        ({"prompt_tokens": 9000, "least_tokens": 9000}, ContextTooLong),
        ({"bound_to": "gone"}, NotFound),
    ],
)
async def test_what_no_node_can_ever_answer_is_refused_at_once(fields, error):
    admission = make_admission(make_node())
    with pytest.raises(error):
        await ask(admission, make_call(**fields))


async def test_a_refusing_node_is_asked_again_when_its_moment_comes():
    node = make_node()
    admission = make_admission(node)
    node.observe(Sign.REFUSED, asyncio.get_running_loop().time(), "503")
    began = asyncio.get_running_loop().time()
    with (await ask(admission, make_call())).permit:
        waited = asyncio.get_running_loop().time() - began
    assert 0.3 < waited < 3.0


async def test_closing_refuses_who_waits_and_who_comes():
    admission = make_admission(make_node())
    with (await ask(admission, make_call())).permit:
        waiter = asyncio.create_task(ask(admission, make_call()))
        await waiting(admission, 1)
        admission.close()
        with pytest.raises(Overloaded):
            await waiter
        with pytest.raises(Overloaded):
            await ask(admission, make_call())
