"""Restarting the engine of a node that GPUStack runs.

Rules: `restart` stops and starts the one instance where it is; `replace` deletes it, and is for a node whose machine is
suspect: one that did not come back when it was restarted. Neither drains: nothing may be sent there any more when they
are called, for a deleted engine goes on serving until its agent comes by. Of one model one instance at a time, and none
while another of its instances is not ready or it is being restarted as a whole. A model as a whole is never restarted
from here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from router.core.node import Node
from router.errors import ProbeFailed, RecycleFailed
from router.fleet.gpustack.api import Gpustack, Instance

LEAVE_S = 5.0
"""What nobody takes up for so long must not be taken for done."""
LOOK_S = 0.25
"""Time between two looks at it."""
RUNNING, FAILED, UNKNOWN = "running", "error", ""
MESSAGE = "restarted by Ebbtide"


class Restarts:
    """Restarts and replacements by `server`, to be called with a node.

    `within_s` bounds the wait until it runs again, `leave_s` that until it is seen not running.
    """

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
        self._suspects: set[int] = set()

    async def __call__(self, node: Node) -> None:
        """Restart the node's instance where it is, or replace it if that failed the last time. Raises RecycleFailed."""
        with _told():
            suspect = (await self._instance(node.spec.url)).id in self._suspects
        await (self.replace if suspect else self.restart)(node.spec.url)

    async def restart(self, url: str) -> None:
        """Restart the instance whose engine is there; done when GPUStack says it runs. Raises RecycleFailed.

        That it answers is for the caller to see: GPUStack asks less of it.
        """
        with _told():
            instance = await self._instance(url)
            with self._alone(instance):
                await self._check(instance)
                row = await self._server.row(instance.id)
                if row is None:
                    raise RecycleFailed(f"GPUStack no longer has the instance {instance.name}")
                await self._server.reschedule({**row, "id": instance.id}, MESSAGE)
                left, back = self._leave_s, self._within_s
                await self._until(instance, lambda state: state not in (RUNNING, UNKNOWN), left, "begin to restart")
                self._suspects.add(instance.id)
                await self._until(instance, lambda state: state == RUNNING, back, "run again")
                self._suspects.discard(instance.id)

    async def replace(self, url: str) -> None:
        """Delete the instance whose engine is there; GPUStack starts another one where there is room.

        Done when it is deleted: what replaces it is another node. Raises RecycleFailed.
        """
        with _told():
            instance = await self._instance(url)
            with self._alone(instance):
                await self._check(instance)
                await self._server.delete(instance.id)
                self._suspects.discard(instance.id)

    async def _instance(self, url: str) -> Instance:
        for instance in await self._server.instances():
            if instance.placed and instance.url == url:
                return instance
        raise RecycleFailed(f"GPUStack has no instance at {url}")

    @contextmanager
    def _alone(self, instance: Instance) -> Iterator[None]:
        if instance.model_id in self._models:
            raise RecycleFailed(f"another instance of {instance.model_name} is being restarted")
        self._models.add(instance.model_id)
        self._server.restarting.add(instance.id)
        try:
            yield
        finally:
            self._models.discard(instance.model_id)
            self._server.restarting.discard(instance.id)

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
