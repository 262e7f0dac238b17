"""Runs scenarios on the Python `openai` SDK, whatever its version, and prints one JSON line for each.

    python openai_client.py BASE KEY USER [SCENARIO...]

BASE is the router without `/v1`. A scenario reports plain facts; judging them is the caller's work.
"""

import io
import threading
import time

import openai
from facts import BASE, KEY, USER, failed, run, scenario, tried, until_busy

SAY = [{"role": "user", "content": "hello"}]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=20)


def chat(model="tiny", api=client, **fields):
    made = api.chat.completions.create(model=model, messages=SAY, user=fields.pop("user", USER), **fields)
    return {"kind": type(made).__name__, "text": made.choices[0].message.content, "request_id": made._request_id}


def streamed(model="tiny", api=client, **fields):
    """Text, usage and number of chunks of a stream; an exception keeps what came before it."""
    facts = {"text": "", "chunks": 0, "usage": None, "empty": 0, "odd": 0}
    began = time.monotonic()
    try:
        with api.chat.completions.create(model=model, messages=SAY, user=USER, stream=True, **fields) as chunks:
            for chunk in chunks:
                facts["chunks"] += 1
                facts["odd"] += chunk.choices is None
                facts["empty"] += chunk.choices == []
                facts["usage"] = chunk.usage.total_tokens if chunk.usage else facts["usage"]
                facts["text"] += "".join(choice.delta.content or "" for choice in chunk.choices or [])
    except openai.OpenAIError as error:
        facts |= failed(error)
    except Exception as error:  # noqa: BLE001 - 2.x lets its transport's errors through
        facts |= {"error": [type(error).__name__], "message": str(error), "code": None}
    return facts | {"seconds": time.monotonic() - began}


def embedded(**fields):
    made = client.embeddings.create(model="tiny", input="hello", user=USER, **fields)
    return list(made.data[0].embedding)


@scenario
def plain():
    return tried(chat)


@scenario
def without_v1():
    return tried(lambda: chat(api=client.copy(base_url=BASE)))


@scenario
def models():
    return {model.id: model.model_dump() for model in client.models.list()}


@scenario
def model_by_name():
    return tried(lambda: client.models.retrieve("org/name").model_dump())


@scenario
def unknown_model():
    return {
        "retrieve": tried(lambda: client.models.retrieve("org/nope").model_dump()),
        "chat": tried(lambda: chat("nope")),
    }


@scenario
def request_ids():
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=SAY, stream=True)
    raw.parse().close()
    return {
        "chat": chat()["request_id"],
        "embeddings": client.embeddings.create(model="tiny", input="x")._request_id,
        "models": client.models.list()._request_id,
        "stream": raw.headers.get("x-request-id"),
        "error": tried(lambda: chat("nope"))["request_id"],
        "refused": tried(lambda: chat("refused"))["request_id"],
    }


@scenario
def extras():
    fields = {"extra_body": {"priority": 5, "foo": {"bar": [1, None]}}, "extra_query": {"q": "1"}}
    return tried(lambda: chat(user=f"{USER}-extras", **fields))


@scenario
def gzipped():
    return {"whole": tried(lambda: chat("relayed")), "stream": streamed("relayed")}


@scenario
def embeddings():
    return {"default": embedded(), "float": embedded(encoding_format="float")}


@scenario
def prompts():
    shapes = {"text": "a", "texts": ["a", "b"], "ids": [1, 2], "lists": [[1, 2], [3]]}
    made = {name: client.completions.create(model="tiny", prompt=prompt) for name, prompt in shapes.items()}
    return {name: [choice.index for choice in answer.choices] for name, answer in made.items()}


@scenario
def tiers():
    facts = {}
    for tier in ("flex", "priority"):
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=SAY, service_tier=tier)
        facts[tier] = raw.headers.get("x-ebbtide-workload")
    body = {"service_tier": "fast"}
    facts["fast"] = tried(
        lambda: {"kind": type(client.responses.create(model="tiny", input="x", extra_body=body)).__name__}
    )
    return facts


@scenario
def left_while_queued():
    with client.chat.completions.create(model="held", messages=SAY, user=f"{USER}-holder", stream=True) as held:
        next(iter(held))
        return tried(lambda: chat("held", user=f"{USER}-left", timeout=0.2))


@scenario
def tokenize():
    body = {"model": "tiny", "prompt": "hello there"}
    root = client.copy(base_url=BASE)
    return {
        "v1": client.post("/tokenize", body=body, cast_to=object),
        "root": root.post("/tokenize", body=body, cast_to=object),
    }


@scenario
def background():
    made = client.responses.create(model="tiny", input="x", background=True)
    fetched = [client.responses.retrieve(made.id).id for _ in range(6)]
    cancelled = tried(lambda: {"status": client.responses.cancel(made.id).status})
    unknown = tried(lambda: {"status": client.responses.retrieve("resp_unknown").status})
    return {"status": made.status, "id": made.id, "fetched": fetched, "cancelled": cancelled, "unknown": unknown}


@scenario
def earlier_response():
    turns = []
    for _ in range(3):
        first = client.responses.create(model="tiny", input="x")
        turns.append(tried(lambda: {"id": client.responses.create(
            model="tiny", input="y", previous_response_id=first.id  # noqa: B023
        ).id}))  # fmt: skip
    return {"turns": turns}


@scenario
def transcription():
    sound = ("a.wav", io.BytesIO(b"RIFF" + bytes(2000)), "audio/wav")
    return {"text": client.audio.transcriptions.create(model="tiny", file=sound, language="en").text}


@scenario
def stream():
    return streamed("paced")


@scenario
def linger():
    return streamed("linger")


@scenario
def cut():
    return {name: streamed(name) for name in ("cut", "reset", "cut-inside")}


@scenario
def slow():
    return streamed("slow")


@scenario
def dirty():
    return streamed("dirty")


@scenario
def odd_bytes():
    return {"crlf": streamed("crlf"), "utf8": streamed("utf8")}


@scenario
def usage():
    return {"asked": streamed(stream_options={"include_usage": True}), "not": streamed()}


@scenario
def stream_refused():
    return streamed("refused")


@scenario
def second_node():
    return {"whole": tried(lambda: chat("pair")), "stream": streamed("pair")}


def response_events(model):
    facts = {"events": [], "numbers": []}
    try:
        for event in client.responses.create(model=model, input="x", stream=True):
            facts["events"].append(event.type)
            facts["numbers"].append(getattr(event, "sequence_number", None))
    except openai.OpenAIError as error:
        facts |= failed(error)
    return facts


@scenario
def responses_stream():
    facts = response_events("tiny")
    with client.responses.stream(model="tiny", input="x") as events:
        facts["helper"] = [event.type for event in events]
        facts["final"] = events.get_final_response().output_text
    return facts


@scenario
def responses_cut():
    return tried(lambda: response_events("cut"))


@scenario
def leave():
    chunks = client.chat.completions.create(model="endless", messages=SAY, user=f"{USER}-leave", stream=True)
    for count, _ in enumerate(chunks):
        if count == 3:
            break
    chunks.close()
    left = time.monotonic()
    time.sleep(1.0)
    return {"left": left}


@scenario
def error_shapes():
    return {name: tried(lambda: chat(name)) for name in ("refused", "flat", "detail", "string", "html")}  # noqa: B023


@scenario
def too_long():
    facts = {name: tried(lambda: chat(name)) for name in ("long-vllm", "long-sglang", "long-llamacpp")}  # noqa: B023
    say = [{"role": "user", "content": "many words " * 400}]
    return facts | {"ours": tried(lambda: {"made": client.chat.completions.create(model="short", messages=say).id})}


@scenario
def wrong_key():
    return {"bad": tried(lambda: chat(api=client.copy(api_key="wrong"))), "none": tried(lambda: chat(
        extra_headers={"Authorization": openai.Omit()}))}  # fmt: skip


@scenario
def wrong_requests():
    patient = client.copy(max_retries=2)
    return {
        "method": tried(lambda: {"got": patient.get("/chat/completions", cast_to=object)}),
        "path": tried(lambda: {"got": patient.post("/nope", body={}, cast_to=object)}),
        "model": tried(lambda: chat("nope", api=patient)),
        "media": tried(lambda: chat(api=patient, extra_headers={"Content-Type": "text/plain"})),
    }


@scenario
def asked_to_wait():
    holder = threading.Thread(target=lambda: tried(lambda: chat("narrow", user=f"{USER}-holder-2")))
    holder.start()
    until_busy("narrow")
    answered = tried(lambda: chat("narrow", user=f"{USER}-again", api=client.copy(max_retries=2)))
    holder.join()
    return answered


@scenario
def final_errors():
    patient = client.copy(max_retries=2)
    names = ("quota", "unimplemented")
    return {name: tried(lambda: chat(name, api=patient, user=f"{USER}-{name}")) for name in names}  # noqa: B023


@scenario
def never_answered():
    return tried(lambda: chat("never"))


run()
