"""Batches: jobs handed over in a file, as OpenAI's Batch API. A caller sees its own and no others.

What is ours and not OpenAI's stands under the key `ebbtide` of a batch, so that OpenAI's object stays as it is.
"""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from router.api.asks import kept_s, required, text, whole, whole_in_text, wrong_type, wrong_value
from router.api.desk import Desk, Visit
from router.api.files import over_quota, page
from router.api.ops import json_response
from router.core.job import BatchState, window_seconds
from router.core.wellformed import well_formed
from router.errors import BadRequest, NotFound
from router.jobs.checks import BATCHED, batched
from router.jobs.store import BatchRow, NewBatch, Pace, Tokens

ENDPOINTS = tuple(f"/v1/{name}" for name in BATCHED)
PRIORITIES = (-10, 10)
PAGE = (1, 100)
MOST_URL = 2048
"""Most characters of a webhook's URL."""
METADATA = (16, 64, 512)
"""Most pairs, and most characters of a key and of a value."""
_TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip
SAME_WITHIN_S = 60.0
"""An SDK's retry of a create that made a batch this recently gets that batch."""


class Batches:
    """`/batches` and what is below it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[BaseRoute]:
        """Paths without version."""
        route = self._desk.route
        return [
            route("/batches", POST=self.create, GET=self.listed),
            route("/batches/{id}", GET=self.one),
            route("/batches/{id}/cancel", POST=self.cancel),
        ]

    async def create(self, visit: Visit) -> Response:
        """Write a batch down; its lines are checked afterwards."""
        told = await visit.told()
        desk = self._desk
        new = _asked(visit, told, desk.webhook(visit.caller, _webhook(told.get("webhook"))), desk.bounds.output_s)
        await self._check_input(visit.caller, new.input_file_id)
        await self._check_quota(visit.caller)
        return json_response(batch_object(await self._desk.store.create_batch(new)))

    async def listed(self, visit: Visit) -> Response:
        """One page of batches, newest first."""
        limit = whole_in_text("limit", visit.query.get("limit", "20"), *PAGE)
        after = visit.query.get("after") or None
        rows, more = await self._desk.store.batches(visit.caller, limit=limit, after=after)
        return json_response(page([batch_object(row) for row in rows], more=more))

    async def one(self, visit: Visit) -> Response:
        """One batch, with an estimate of its end."""
        watched = await self._desk.store.watched(visit.caller, visit.id)
        if watched is None:
            raise _no_such_batch(visit.id)
        row = watched[0]
        pace = watched[1] if row.state is BatchState.IN_PROGRESS else None
        ends_at = None if pace is None else _ends_at(row, pace, self._desk.clock())
        waits_for = self._desk.waits(row, 0 if pace is None else pace.running) or _turn(pace)
        return json_response(batch_object(row, ends_at, waits_for))

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


def batch_object(row: BatchRow, ends_at: int | None = None, waits_for: str | None = None) -> dict[str, Any]:
    """OpenAI's Batch, every key there and null when unset, and ours under `ebbtide`."""
    told: dict[str, Any] = {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.model,
        "errors": {"object": "list", "data": list(row.errors)} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.state,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
    }
    told |= {name: getattr(row, name) for name in _TIMES}
    told |= {
        "request_counts": {"total": row.total, "completed": row.completed, "failed": row.failed},
        "usage": _usage(row.tokens),
        "metadata": row.metadata,
        "ebbtide": {
            "priority": row.priority,
            "progress": _progress(row),
            "estimated_completion_at": ends_at,
            "waiting_reason": waits_for,
        },
    }
    return told


def _usage(tokens: Tokens) -> dict[str, Any]:
    return {
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.input + tokens.output,
    }


def _progress(row: BatchRow) -> float:
    """Lines that have an answer, as a part of all."""
    return round((row.completed + row.failed) / row.total, 4) if row.total else 0.0


def _ends_at(row: BatchRow, pace: Pace, now: float) -> int | None:
    """When all lines will have an answer if the routers go on as in the last minute; None while nothing moves."""
    if not pace.done_last:
        return None
    left = row.total - row.completed - row.failed
    return math.ceil(now + (pace.ahead + left) * pace.window_s / pace.done_last)


def _turn(pace: Pace | None) -> str | None:
    """That others go first, if that is all there is to say."""
    if pace is None or pace.running or not pace.ahead:
        return None
    lines = "1 line" if pace.ahead == 1 else f"{pace.ahead} lines"
    return f"{lines} of batches that are due earlier go first."


def _asked(visit: Visit, told: Mapping[str, Any], webhook: str | None, output_s: int | None) -> NewBatch:
    input_file_id = required(told, "input_file_id")
    endpoint = required(told, "endpoint")
    if batched(endpoint) is None:
        raise wrong_value("endpoint", endpoint, ENDPOINTS)
    window = required(told, "completion_window")
    key, priority = visit.header("idempotency-key"), told.get("priority")
    return NewBatch(
        caller=visit.caller,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=window,
        window_s=_window_s(window),
        metadata=_metadata(told.get("metadata")),
        output_expires_s=kept_s("output_expires_after", told.get("output_expires_after")) or output_s,
        priority=0 if priority is None else whole("priority", priority, *PRIORITIES),
        webhook=webhook,
        idempotency_key=text("idempotency-key", key, 255) if key else None,
        same_within_s=SAME_WITHIN_S if visit.heading.retried else None,
    )


def _webhook(told: object) -> str | None:
    """A URL, or an object that holds one."""
    if told is None:
        return None
    if type(told) is not dict:
        return text("webhook", told, MOST_URL)
    url = required(told, "url", MOST_URL, within="webhook")
    if others := sorted(told.keys() - {"url"}):
        param = f"webhook.{others[0][:64]}"
        raise BadRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    return url


def _window_s(window: str) -> int:
    try:
        return window_seconds(window)
    except ValueError as error:
        message = f"Invalid 'completion_window'. {error}"
        raise BadRequest(message, param="completion_window", code="invalid_value") from None


def _metadata(told: object) -> dict[str, str] | None:
    """At most 16 pairs of texts."""
    if told is None:
        return None
    if type(told) is not dict:
        raise wrong_type("metadata", "an object", told)
    pairs, key_characters, value_characters = METADATA
    if len(told) > pairs:
        wanted = f"Expected an object with at most {pairs} properties, but got {len(told)} instead."
        message = f"Invalid 'metadata': too many properties. {wanted}"
        raise BadRequest(message, param="metadata", code="object_above_max_properties")
    for key, value in told.items():
        param = f"metadata.{key[:key_characters]}"
        if not key or len(key) > key_characters or not well_formed(key):
            message = f"Invalid '{param}': the key must have 1 to {key_characters} characters without NUL."
            raise BadRequest(message, param=param, code="invalid_value")
        if value != "":
            text(param, value, value_characters)
    return told


def _no_such_batch(batch_id: str) -> NotFound:
    return NotFound(f"No batch found with id '{batch_id[:128]}'.")
