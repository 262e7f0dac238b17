"""How a batch ends: its result files are made from rows, and it becomes final with them.

Rule 1: each line is in one file once. Lines are written in order; the bytes, the files' sizes and the last line written
change in one transaction, so a crash anywhere resumes at the next line.
Rule 2: one transaction reads at most 500 lines and writes about 1 MiB. Bodies are spliced in as the nodes sent them.
Rule 3: the files show, the state becomes final and the webhook is put in the outbox in one transaction.
"""

from collections.abc import Sequence

import msgspec
from sqlalchemy import RowMapping, insert, not_, select, update

from router.core.job import BATCH_TRANSITIONS, BatchEvent, BatchState, JobState, request_id
from router.jobs.schema import CHUNK_BYTES, batches, chunks, deliveries, files, jobs, results
from router.jobs.store.database import Database, Query, Transaction
from router.jobs.store.rows import BatchRow, Event, Prefix, batch_row, new_id
from router.jobs.store.shelf import is_state, locked
from router.jobs.store.wakes import Topic

PAGE_LINES = 500
"""Lines read in one step."""

EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")

UNFINISHED = batches.c.completed + batches.c.failed + batches.c.stopped < batches.c.total
"""Batches with lines that have no end yet."""
ENDING = is_state(batches.c.state, BatchState.FINALIZING) | (
    is_state(batches.c.state, BatchState.CANCELLING) & batches.c.validated_at.is_not(None)
)
"""Batches on their way to a final state."""


async def announce(database: Database, tx: Transaction, batch: BatchRow) -> Event:
    """Tell that a batch is final: the bell, and the outbox if it has a webhook."""
    tx.wake(Topic.ENDED)
    now = await tx.now()
    if batch.webhook is not None:
        row = {
            "id": new_id(Prefix.EVENT),
            "batch_id": batch.id,
            "url": batch.webhook,
            "type": f"batch.{batch.state}",
            "created_at": int(now),
            "due_at": now,
        }
        await tx.run(
            database.insert(deliveries).values(**row).on_conflict_do_nothing(index_elements=["batch_id", "type"])
        )
    return Event(
        batch_id=batch.id,
        caller=batch.caller,
        state=batch.state,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        seconds=max(0.0, now - batch.created_at),
    )


async def write_page(database: Database, tx: Transaction, number: int) -> Event | None:
    """One step towards a batch's end; the event once it is final. Nothing if another router is at it."""
    ready = (batches.c.number == number, ENDING, not_(UNFINISHED))
    batch = await tx.first(locked(select(batches).where(*ready), skip=True))
    if batch is None:
        return None
    page = [] if batch["errors"] else await tx.all(_page(number, batch["written_line"]))
    if not page:
        return await _end(database, tx, batch)
    page = _within(page)
    last = page[-1]["line"]
    bodies = await tx.all(
        select(results).where(results.c.batch == number, results.c.line.between(page[0]["line"], last))
    )
    found = {row["line"]: row for row in bodies}
    lines = {"output": bytearray(), "error": bytearray()}
    for job in page:
        lines["output" if job["state"] == JobState.DONE else "error"] += _line(batch["id"], job, found.get(job["line"]))
    written: dict[str, object] = {"written_line": last}
    for kind, data in lines.items():
        if data:
            written[kind] = await _append(tx, batch, kind, data)
    await tx.run(update(batches).where(batches.c.number == number).values(**written))
    return None


def _page(number: int, after: int) -> Query:
    """The next lines with the length of their results, bodies left out."""
    joined = jobs.outerjoin(results, (results.c.batch == jobs.c.batch) & (results.c.line == jobs.c.line))
    columns = jobs.c.line, jobs.c.custom_id, jobs.c.state, results.c.bytes
    query = select(*columns).select_from(joined).where(jobs.c.batch == number, jobs.c.line > after)
    return query.order_by(jobs.c.line).limit(PAGE_LINES)


def _within(page: Sequence[RowMapping]) -> Sequence[RowMapping]:
    """As many lines from the first as hold about 1 MiB, one at least."""
    size = 0
    for index, row in enumerate(page):
        size += (row["bytes"] or 0) + 256
        if size > CHUNK_BYTES and index:
            return page[:index]
    return page


def _line(batch_id: str, job: RowMapping, result: RowMapping | None) -> bytes:
    """One line of a result file, with its newline."""
    head = b'{"id":"%b","custom_id":%b,"response":' % (
        request_id(batch_id, job["line"]).encode(),
        msgspec.json.encode(job["custom_id"]),
    )
    if result is not None and result["status"] is not None:
        name = msgspec.json.encode(result["request_id"] or request_id(batch_id, job["line"]))
        answer = b'{"status_code":%d,"request_id":%b,"body":%b}' % (result["status"], name, result["body"])
        return head + answer + b',"error":null}\n'
    if result is not None:
        code, message = result["error_code"], result["error_message"]
    else:
        code, message = EXPIRED if job["state"] == JobState.EXPIRED else CANCELLED
    return head + b'null,"error":' + msgspec.json.encode({"code": code, "message": message}) + b"}\n"


async def _append(tx: Transaction, batch: RowMapping, kind: str, data: bytearray) -> int:
    """Add bytes to the batch's output or error file, made with the first of them; its number."""
    number: int | None = batch[kind]
    start = 0
    if number is None:
        row = {
            "id": new_id(Prefix.FILE),
            "caller": batch["caller"],
            "purpose": "batch_output",
            "filename": f"{batch['id']}_{kind}.jsonl",
            "created_at": int(await tx.now()),
            "state": "writing",
        }
        number = int(await tx.scalar(insert(files).values(**row).returning(files.c.number)))
    else:
        start = int(await tx.scalar(select(files.c.bytes).where(files.c.number == number)))
    view = memoryview(data)
    rows = [
        {"file": number, "start": start + at, "data": bytes(view[at : at + CHUNK_BYTES])}
        for at in range(0, len(data), CHUNK_BYTES)
    ]
    await tx.run(insert(chunks), rows)
    await tx.run(update(files).where(files.c.number == number).values(bytes=start + len(data)))
    return number


async def _end(database: Database, tx: Transaction, batch: RowMapping) -> Event:
    """Every line is written: show the files and make the batch final."""
    now = int(await tx.now())
    event = BatchEvent.WRITTEN
    if batch["late"] and BatchEvent.WRITTEN_LATE in BATCH_TRANSITIONS[BatchState(batch["state"])]:
        event = BatchEvent.WRITTEN_LATE
    state = BATCH_TRANSITIONS[BatchState(batch["state"])][event]
    values: dict[str, object] = {"state": state, f"{state}_at": now, "waiting": None}
    for kind in ("output", "error"):
        if batch[kind] is not None:
            values[f"{kind}_file_id"] = await _show(tx, batch, batch[kind], now)
    ended = await tx.first(
        update(batches).where(batches.c.number == batch["number"]).values(**values).returning(batches)
    )
    assert ended is not None
    return await announce(database, tx, batch_row(ended))


async def _show(tx: Transaction, batch: RowMapping, number: int, now: int) -> str:
    kept_s = batch["output_expires_s"]
    values = {"state": "ready", "created_at": now, "expires_at": None if kept_s is None else now + kept_s}
    shown = update(files).where(files.c.number == number).values(**values)
    return str(await tx.scalar(shown.returning(files.c.id)))
