"""Runs scenarios on the `anthropic` SDK and prints one JSON line for each.

python anthropic_client.py BASE KEY USER [SCENARIO...]
"""

import json
import sys

import anthropic

BASE, KEY, USER, *CHOSEN = sys.argv[1:]
SAY = [{"role": "user", "content": "hello"}]
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def made(**options):
    return anthropic.Anthropic(base_url=BASE, max_retries=0, timeout=20, **options)


def asked(client, model="tiny"):
    try:
        answer = client.messages.create(model=model, max_tokens=5, messages=SAY)
    except anthropic.APIStatusError as error:
        return {"error": type(error).__name__, "status_code": error.status_code, "body": error.body}
    return {"kind": type(answer).__name__, "text": answer.content[0].text, "stop": answer.stop_reason}


@scenario
def ways_in():
    return {
        "auth_token": asked(made(auth_token=KEY)),
        "api_key": asked(made(api_key=KEY)),
        "x-api-key": asked(
            made(auth_token="ignored", default_headers={"Authorization": anthropic.Omit(), "x-api-key": KEY})
        ),
    }


@scenario
def errors():
    client = made(auth_token=KEY)
    return {
        "unknown": asked(client, "nope"),
        "refused": asked(client, "refused"),
        "wrong_key": asked(made(auth_token="wrong")),
    }


@scenario
def counted():
    return {"tokens": made(auth_token=KEY).messages.count_tokens(model="tiny", messages=SAY).input_tokens}


@scenario
def streamed():
    events = []
    for event in made(auth_token=KEY).messages.create(model="tiny", max_tokens=5, messages=SAY, stream=True):
        events.append(event.type)
    with made(auth_token=KEY).messages.stream(model="tiny", max_tokens=5, messages=SAY) as stream:
        final = stream.get_final_message()
    return {"events": events, "text": final.content[0].text, "stop": final.stop_reason}


@scenario
def cut():
    events = []
    try:
        for event in made(auth_token=KEY).messages.create(model="cut", max_tokens=5, messages=SAY, stream=True):
            events.append(event.type)
    except Exception as error:  # noqa: BLE001 - which one is the fact asked for
        return {"error": type(error).__name__, "message": str(error), "events": events}
    return {"error": None, "events": events}


for name in CHOSEN or SCENARIOS:
    try:
        result = SCENARIOS[name]()
    except Exception as error:  # noqa: BLE001 - a scenario that breaks is a result too
        result = {"broke": f"{type(error).__name__}: {error}"}
    print(json.dumps({"scenario": name, "result": result}, default=str), flush=True)
