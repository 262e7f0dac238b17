"""Files, uploads and batches on the Python `openai` SDK, whatever its version. See `facts` for how it is run."""

import hashlib
import io
import json
import pathlib
import tempfile
import time

import openai
from facts import BASE, KEY, USER, run, scenario, tried

CHAT = "/v1/chat/completions"
ENDED_S = 40
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=20)
patient = client.copy(max_retries=2)


def line(custom_id, model="tiny", **more):
    messages = [{"role": "user", "content": f"{USER} {custom_id}"}]
    body = {"model": model, "messages": messages, "max_tokens": 3} | more.pop("body", {})
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | more


def without(custom_id, *path):
    told = line(custom_id)
    inner = told
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return told


def jsonl(*lines):
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def stored(content, name="in.jsonl", purpose="batch", **more):
    return client.files.create(file=(name, io.BytesIO(content)), purpose=purpose, **more)


def began(*lines, **more):
    file_id = more.pop("file_id", None) or stored(jsonl(*lines)).id
    told = {"endpoint": CHAT, "completion_window": "24h"} | more
    return client.batches.create(input_file_id=file_id, **told)


def until(batch, reached):
    deadline = time.monotonic() + ENDED_S
    while not reached(batch := client.batches.retrieve(batch.id)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{batch.id} is {batch.status}: {batch.request_counts}")
        time.sleep(0.05)
    return batch


def ended(batch):
    return until(batch, lambda now: now.status in ("completed", "failed", "expired", "cancelled"))


def lines_of(file_id):
    return [json.loads(told) for told in client.files.content(file_id).text.splitlines()] if file_id else []


def told(batch):
    """The batch and both its files."""
    return {
        "batch": batch.model_dump(),
        "output": lines_of(batch.output_file_id),
        "errors": lines_of(batch.error_file_id),
    }


# Files


@scenario
def file_created():
    with tempfile.TemporaryDirectory() as home:
        path = pathlib.Path(home) / "night.jsonl"
        path.write_bytes(jsonl(line("a")))
        with path.open("rb") as file:
            made = client.files.create(file=file, purpose="batch")
    return {"file": made.model_dump(), "size": len(jsonl(line("a")))}


@scenario
def file_sent_in_pieces():
    content = jsonl(line("a")) + b'{"x":"' + b"y" * 3_000_000 + b'"}\n'
    made = stored(content)
    got = client.files.content(made.id).content
    return {"name": made.filename, "sizes": [len(content), made.bytes], "same": got == content}


@scenario
def file_expires():
    after = {"anchor": "created_at", "seconds": 7200}
    made = stored(b"x", "a.txt", "user_data", expires_after=after)
    wrong = [tried(lambda: {"made": stored(b"x", "a.txt", "user_data", expires_after=after | {"seconds": s}).id})  # noqa: B023
             for s in (60, 2_592_001)]  # fmt: skip
    return {"seconds": made.expires_at - made.created_at, "wrong": wrong}


@scenario
def files_listed():
    made = [stored(b"x", f"{number}.txt", "user_data").id for number in range(3)] + [stored(jsonl(line("a"))).id]
    pages = list(client.files.list(limit=2).iter_pages())
    one = client.files.list(limit=1)
    return {
        "made": made,
        "by_two": [file.id for file in client.files.list(limit=2)],
        "at_once": [file.id for file in client.files.list()],
        "more": [page.has_more for page in pages],
        "ascending": [file.id for file in client.files.list(order="asc", limit=2)],
        "purposes": [file.purpose for file in client.files.list(purpose="user_data", limit=2)],
        "first": one.data[0].id,
        "after": [file.id for file in client.files.list(after=one.data[0].id)],
    }


@scenario
def file_content():
    content = '{"a":"ü \u2028 你好"}\r\n\n{"b":2}\n'.encode()
    made = stored(content, "n\u00e4cht.jsonl")
    got = client.files.content(made.id)
    return {
        "same": hashlib.sha256(got.content).digest() == hashlib.sha256(content).digest(),
        "text": got.text == content.decode(),
        "lines": [json.loads(each) for each in client.files.content(made.id).iter_lines() if each.startswith('{"b')],
        "disposition": got.response.headers["content-disposition"],
    }


@scenario
def file_deleted():
    made = stored(b"x", "a.txt", "user_data")
    return {"first": client.files.delete(made.id).model_dump(), "second": tried(
        lambda: {"got": client.files.delete(made.id).deleted})}  # fmt: skip


@scenario
def unknown_file():
    asked = {"retrieve": client.files.retrieve, "content": client.files.content, "delete": client.files.delete}
    return {name: tried(lambda: {"got": str(ask("file-nope"))}) for name, ask in asked.items()}  # noqa: B023


@scenario
def wrong_files():
    good = jsonl(line("a"))
    wrong = {"name": (good, "in.txt"), "empty": (b"", "in.jsonl"), "first": (b"rubbish\n" + good, "in.jsonl")}
    facts = {name: tried(lambda: {"made": stored(*told).id}) for name, told in wrong.items()}  # noqa: B023
    return facts | {"later": tried(lambda: {"made": stored(good + b"rubbish\n").status})}


@scenario
def waited():
    made = stored(jsonl(line("a")))
    return tried(lambda: {"status": client.files.wait_for_processing(made.id).status})


@scenario
def uploaded_in_parts():
    content = jsonl(*(line(str(number), body={"user": "x" * 5000}) for number in range(12)))
    told = {"filename": "long.jsonl", "bytes": len(content), "mime_type": "application/jsonl", "purpose": "batch"}
    size = len(content) // 3 + 1
    made = client.uploads.upload_file_chunked(file=content, part_size=size, **told)

    def halves(**more):
        upload = client.uploads.create(**told)
        part = client.uploads.parts.create(upload.id, data=content[: more.pop("size", len(content))])
        return client.uploads.complete(upload.id, part_ids=[part.id], **more).model_dump()

    return {
        "upload": made.model_dump(),
        "size": len(content),
        "same": client.files.content(made.file.id).content == content,
        "md5": halves(md5=hashlib.md5(content).hexdigest()),
        "short": tried(lambda: halves(size=10)),
        "wrong_md5": tried(lambda: halves(md5="0" * 32)),
        "too_long": tried(lambda: {"made": client.uploads.create(**told | {"bytes": 200 * 2**20 + 1}).id}),
    }


# Batches


@scenario
def batch_seen_through():
    lines = [line("good"), line("bad", body={"max_tokens": -1}), line("better")]
    kept = {"anchor": "created_at", "seconds": 7200}
    made = began(*lines, metadata={"night": "5"}, output_expires_after=kept)
    done = ended(made)
    output = client.files.retrieve(done.output_file_id)
    facts = {"created": made.model_dump(), "kept": output.expires_at - output.created_at, "purpose": output.purpose}
    return facts | told(done)


@scenario
def batch_of_failures():
    return told(ended(began(*(line(str(number), body={"max_tokens": -1}) for number in range(3)))))


@scenario
def batches_refused_later():
    good = line("good")
    wrong = {
        "json": [good, b"rubbish"],
        "missing": [without(str(at), key) for at, key in enumerate(("custom_id", "method", "url", "body"))],
        "url": [good, line("a", url="/v1/embeddings")],
        "stream": [line("a", body={"stream": True})],
        "unknown_model": [line("a", model="nope")],
        "no_model": [without("a", "body", "model")],
        "no_messages": [without("a", "body", "messages")],
        "twice": [good, line("b"), good],
    }
    made = {name: began(*lines) for name, lines in wrong.items()} | {"file": began(file_id="file-nope")}
    statuses = {name: batch.status for name, batch in made.items()}
    return {"created": statuses} | {name: told(ended(batch)) for name, batch in made.items()}


@scenario
def batches_refused_at_once():
    file_id = stored(jsonl(line("a"))).id
    wrong = {
        "endpoint": {"endpoint": "/v1/invalid"},
        "metadata": {"metadata": {"a": [1]}},
        "window": {"completion_window": "soon"},
    }
    return {name: tried(lambda: {"made": began(file_id=file_id, **more).id}) for name, more in wrong.items()}  # noqa: B023


def half_done(**more):
    """A batch of which three lines are done and the others never will be."""
    lines = [line(f"fast-{number}") for number in range(3)] + [line(f"slow-{number}", "slow") for number in range(4)]
    return until(began(*lines, **more), lambda now: now.request_counts.completed == 3)


@scenario
def batch_cancelled():
    batch = half_done()
    first = client.batches.cancel(batch.id)
    again = client.batches.cancel(batch.id)
    done = ended(batch)
    return told(done) | {
        "first": first.model_dump(),
        "again": again.status,
        "after": client.batches.cancel(batch.id).status,
    }


@scenario
def cancelled_too_late():
    made = {"completed": began(line("a")), "failed": began(line("a", model="nope"))}
    for batch in made.values():
        ended(batch)
    return {name: tried(lambda: {"got": patient.batches.cancel(batch.id).status}) for name, batch in made.items()}  # noqa: B023


@scenario
def batch_expired():
    return told(ended(half_done(completion_window="61m")))


@scenario
def batches_listed():
    made = [began(line("a")).id for _ in range(3)]
    listed = list(client.batches.list(limit=1))
    unknown = tried(lambda: {"got": client.batches.retrieve("batch_nope").status})
    return {
        "made": made,
        "listed": [batch.id for batch in listed],
        "times": [batch.created_at for batch in listed if batch.completion_window == "24h"],
        "at_once": [batch.id for batch in client.batches.list(limit=100)],
        "unknown": unknown,
    }


@scenario
def input_deleted():
    file = stored(jsonl(*(line(str(number), "paced") for number in range(3))))
    batch = until(began(file_id=file.id), lambda now: now.status == "in_progress")
    deleted = client.files.delete(file.id).deleted
    return {"deleted": deleted} | told(ended(batch))


run()
