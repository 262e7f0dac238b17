"""Waiters that leave at one moment: between its cancellation and its next turn a waiter is still in the queue."""

import asyncio

import pytest

from tests.dispatch.test_admission import ask, make_admission, make_call, make_node, waiting


@pytest.mark.parametrize("leaving", [(0,), (0, 1), (1, 0), (0, 1, 2), (2, 1, 0)])
async def test_room_that_comes_back_as_waiters_leave_goes_to_who_stays(leaving):
    node = make_node()
    admission = make_admission(node)
    held = await ask(admission, make_call())
    tasks = [asyncio.create_task(ask(admission, make_call(id=f"req_{number}"))) for number in range(4)]
    await waiting(admission, 4)
    for number in leaving:
        tasks[number].cancel()
    with held.permit:
        pass
    admission.changed()
    first = next(task for number, task in enumerate(tasks) if number not in leaving)
    granted = await first
    assert node.budget.held().sequences == 1
    with granted.permit:
        pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert node.budget.held().sequences == 0
    assert not admission.waiters()


async def test_waiters_that_all_leave_take_no_room_with_them():
    node = make_node()
    admission = make_admission(node)
    held = await ask(admission, make_call())
    tasks = [asyncio.create_task(ask(admission, make_call(id=f"req_{number}"))) for number in range(5)]
    await waiting(admission, 5)
    with held.permit:
        pass
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert node.budget.held().sequences == 0
    assert not admission.waiters()
