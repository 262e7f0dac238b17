"""Unwraps webhook events with the Python `openai` SDK, whatever its version.

    python webhook_client.py < events

Reads one JSON object a line, `headers`, `body` and `secret`, and prints what came of each: the event's type and the
batch's id, or the name of the exception.
"""

import json
import sys

import openai

client = openai.OpenAI(api_key="none")
for line in sys.stdin:
    told = json.loads(line)
    try:
        event = client.webhooks.unwrap(told["body"], told["headers"], secret=told["secret"])
        print(json.dumps([event.type, event.data.id]))
    except (openai.OpenAIError, ValueError) as error:
        print(json.dumps([type(error).__name__]))
