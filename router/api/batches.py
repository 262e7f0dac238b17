"""Batches: jobs handed over in a file, as OpenAI's Batch API. A caller sees its own and no others.

What is ours and not OpenAI's stands under the key `ebbtide` of a batch, so that OpenAI's object stays as it is.
"""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.api.asks import chosen, kept_s, missing, required, text, too_long, whole, whole_in_text, wrong_type
from router.api.desk import Desk, Visit
from router.api.files import over_quota, page
from router.api.ops import json_response
from router.core.job import BATCH_FINAL, BatchState, window_seconds
from router.errors import BadRequest, NotFound
from router.jobs.checks import BATCHED, batched
from router.jobs.store import BatchRow, NewBatch, Pace, Tokens

ENDPOINTS = tuple(f"/v1/{name}" for name in BATCHED)
PRIORITIES = (-10, 10)
PAGE = (1, 100)
METADATA = (16, 64, 512)
"""Most pairs, and most characters of a key and of a value."""
SAME_WITHIN_S = 60.0
"""An SDK's retry of a create that made a batch this recently gets that batch."""


class Batches:
    """`/batches` and what is below it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[BaseRoute]:
        """Paths without version."""
        serve = self._desk.serve
        return [
            Route("/batches", serve(self.create), methods=["POST"]),
            Route("/batches", serve(self.listed), methods=["GET"]),
            Route("/batches/{id}", serve(self.one), methods=["GET"]),
            Route("/batches/{id}/cancel", serve(self.cancel), methods=["POST"]),
        ]

    async def create(self, visit: Visit) -> Response:
        """Write a batch down; its lines are checked afterwards."""
        desk, told = self._desk, await visit.told()
        new = _asked(visit, told)
        webhook = told.get("webhook")
        url = desk.webhook(visit.caller, None if webhook is None else text("webhook", webhook, 2048))
        await self._check_input(visit.caller, new.input_file_id)
        await self._check_quota(visit.caller)
        row = await desk.store.create_batch(NewBatch(**{**_fields(new), "webhook": url}))
        return json_response(batch_object(row))

    async def listed(self, visit: Visit) -> Response:
        """One page of batches, newest first."""
        limit = whole_in_text("limit", visit.query.get("limit", "20"), *PAGE)
        after = visit.query.get("after") or None
        rows, more = await self._desk.store.batches(visit.caller, limit=limit, after=after)
        return json_response(page([batch_object(row) for row in rows], more=more))

    async def one(self, visit: Visit) -> Response:
        """One batch, with an estimate of its end."""
        store = self._desk.store
        row = await store.batch(visit.caller, visit.id)
        if row is None:
            raise _no_such_batch(visit.id)
        pace = await store.pace(row) if row.state is BatchState.IN_PROGRESS else None
        return json_response(batch_object(row, pace, self._desk.clock()))

    async def cancel(self, visit: Visit) -> Response:
        """Stop a batch; what is done stays."""
        await visit.body()
        try:
            return json_response(batch_object(await self._desk.store.cancel_batch(visit.caller, visit.id)))
        except NotFound:
            raise _no_such_batch(visit.id) from None

    async def _check_input(self, caller: str, file_id: str) -> None:
        """An unknown file is told by the batch (SDKs poll for that); a known one that is no input, at once."""
        file = await self._desk.store.file(caller, file_id)
        if file is not None and file.purpose != "batch":
            message = f"The file {file.id} has the purpose '{file.purpose}'. The input of a batch must have 'batch'."
            raise BadRequest(message, param="input_file_id", code="invalid_value")

    async def _check_quota(self, caller: str) -> None:
        most = self._desk.quota(caller).batches
        if most is None:
            return
        held = (await self._desk.store.held(caller)).batches
        if held >= most:
            raise over_quota(f"You have {held} batches that have not ended, and may have {most}.")


def _asked(visit: Visit, told: Mapping[str, Any]) -> NewBatch:
    input_file_id = required(told, "input_file_id")
    endpoint = required(told, "endpoint")
    if batched(endpoint) is None:
        chosen("endpoint", endpoint, ENDPOINTS)
    window = required(told, "completion_window")
    retried = visit.heading.retried
    key = visit.header("idempotency-key")
    priority = told.get("priority")
    return NewBatch(
        caller=visit.caller,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=window,
        window_s=_window_s(window),
        metadata=_metadata(told.get("metadata")),
        output_expires_s=kept_s("output_expires_after", told.get("output_expires_after")),
        priority=0 if priority is None else whole("priority", priority, *PRIORITIES),
        idempotency_key=text("idempotency-key", key, 255) if key else None,
        same_within_s=SAME_WITHIN_S if retried else None,
    )
