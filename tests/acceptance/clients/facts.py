"""What the scripts for the Python `openai` SDK share: facts of a call or its exception, and the scenarios that are run.

    python SCRIPT BASE KEY USER [SCENARIO...]

BASE is the router without `/v1`. A scenario reports plain facts as one JSON line; judging them is the caller's work.
"""

import json
import sys
import time
from urllib.request import urlopen

import openai

BASE, KEY, USER, *CHOSEN = sys.argv[1:]
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def failed(error):
    """Facts of an exception."""
    names = ("status_code", "code", "type", "param", "message", "request_id")
    facts = {name: getattr(error, name, None) for name in names}
    body = getattr(error, "body", None)
    facts["message"] = body.get("message") if isinstance(body, dict) else facts["message"]
    return {"error": [kind.__name__ for kind in type(error).__mro__], **facts}


def tried(call):
    """What a call gives, or the facts of its exception, and the seconds it took."""
    began = time.monotonic()
    try:
        result = call()
    except openai.OpenAIError as error:
        result = failed(error)
    return result | {"seconds": time.monotonic() - began}


def until_busy(node):
    """Waits until a call runs on a node, as the router counts it."""
    sample = f'ebbtide_node_running{{node="{node}",workload="interactive"}} 1.0'
    until = time.monotonic() + 5
    while sample not in urlopen(f"{BASE}/metrics").read().decode():
        if time.monotonic() > until:
            raise TimeoutError(f"no call reached {node}")
        time.sleep(0.02)


def run():
    """Runs the scenarios named, all when none is."""
    for name in CHOSEN or SCENARIOS:
        try:
            result = SCENARIOS[name]()
        except Exception as error:  # noqa: BLE001 - a scenario that breaks is a result too
            result = {"broke": f"{type(error).__name__}: {error}"}
        print(json.dumps({"scenario": name, "result": result}, default=str), flush=True)
