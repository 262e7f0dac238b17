"""Restarting the engine of a node that GPUStack runs.

Rules: `restart` stops and starts the one instance where it is; `replace` deletes it, and is for a node whose machine is
suspect. Neither drains: nothing may be sent there any more when they are called, for a deleted engine goes on serving
until its agent comes by. Of one model one instance at a time, and none while another of its instances is not ready or
it is being restarted as a whole. A model as a whole is never restarted from here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from router.errors import ProbeFailed, RecycleFailed
from router.fleet.gpustack.api import Gpustack, Instance, node_name

LEAVE_S = 5.0
"""Longest wait until the instance is seen not running: what nobody takes up must not be taken for done."""
LOOK_S = 0.25
"""Time between two looks at it."""
RUNNING, FAILED, UNKNOWN = "running", "error", ""
MESSAGE = "restarted by Ebbtide"


class Restarts:
    """Restarts and replacements by `server`. `within_s` bounds one, from the word to GPUStack to running again."""

    def __init__(
        self,
        server: Gpustack,
        *,
        within_s: float = 600.0,
        leave_s: float = LEAVE_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._server = server
        self._within_s = within_s
        self._leave_s = leave_s
        self._sleep = sleep
        self._models: set[int] = set()

    async def restart(self, node: str) -> None:
        """Restart the instance that is that node; done when GPUStack says it runs. Raises RecycleFailed.

        That it answers is for the caller to see: GPUStack asks less of it.
        """
        with _told():
            instance = await self._instance(node)
            with self._alone(instance):
                await self._check(instance)
                row = await self._server.row(instance.id)
                if row is None:
                    raise RecycleFailed(f"GPUStack no longer has the instance {instance.name}")
                await self._server.reschedule({**row, "id": instance.id}, MESSAGE)
                left, back = self._leave_s, self._within_s
                await self._until(instance, lambda state: state not in (RUNNING, UNKNOWN), left, "begin to restart")
                await self._until(instance, lambda state: state == RUNNING, back, "run again")

    async def replace(self, node: str) -> None:
        """Delete the instance that is that node; GPUStack starts another one where there is room.

        Done when it is deleted: what replaces it is another node. Raises RecycleFailed.
        """
        with _told():
            instance = await self._instance(node)
            with self._alone(instance):
                await self._check(instance)
                await self._server.delete(instance.id)

    async def _instance(self, node: str) -> Instance:
        for instance in await self._server.instances():
            if node_name(instance) == node:
                return instance
        raise RecycleFailed(f"GPUStack has no instance that is the node {node}")

    @contextmanager
    def _alone(self, instance: Instance) -> Iterator[None]:
        if instance.model_id in self._models:
            raise RecycleFailed(f"another instance of {instance.model_name} is being restarted")
        self._models.add(instance.model_id)
        try:
            yield
        finally:
            self._models.discard(instance.model_id)

    async def _check(self, instance: Instance) -> None:
        model = await self._server.model(instance.model_id)
        if model.restarting_since is not None:
            raise RecycleFailed(f"GPUStack is restarting all of {instance.model_name}")
        if model.ready_replicas + (instance.state != RUNNING) < model.replicas:
            ready = f"{model.ready_replicas} of {model.replicas}"
            raise RecycleFailed(f"only {ready} instances of {instance.model_name} are ready")

    async def _until(self, instance: Instance, there: Callable[[str], bool], within_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not there(state := await self._state(instance)):
                    if state == FAILED:
                        raise RecycleFailed(f"the instance {instance.name} failed while it was restarted")
                    await self._sleep(LOOK_S)
        except TimeoutError:
            raise RecycleFailed(f"the instance {instance.name} did not {what} within {within_s:g} s") from None

    async def _state(self, instance: Instance) -> str:
        """Its state as GPUStack tells it; UNKNOWN while that does not answer, which is no reason to give up."""
        try:
            row = await self._server.row(instance.id)
        except ProbeFailed as error:
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            return UNKNOWN
        if row is None:
            raise RecycleFailed(f"GPUStack deleted the instance {instance.name} while it was restarted")
        return str(row.get("state"))


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ProbeFailed as error:
        raise RecycleFailed(str(error)) from error
