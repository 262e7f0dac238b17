"""Recorded shapes of event streams, shortened."""

ROLE = b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'  # fmt: skip  # noqa: E501
STOP = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'  # fmt: skip  # noqa: E501
USAGE = (
    b'data: {"id":"c","model":"m","choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def token(text: bytes, index: int = 0) -> bytes:
    return b'data: {"id":"c","model":"m","choices":[{"index":%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n' % (index, text)  # fmt: skip  # noqa: E501


def data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def named(name: bytes, payload: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"


VLLM_CHAT = (
    ROLE + token(b"Hel") + token("lo \u2028 \u4f60\u597d\U0001f30d".encode()) + token(b"!") + STOP + USAGE + DONE
)
LLAMACPP_CHAT = (
    data(b'{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"model":"m"}')
    + data(b'{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}],"model":"m"}')
    + data(b'{"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"model":"m"}')
    + data(b'{"choices":[],"model":"m","usage":{"completion_tokens":1,"prompt_tokens":7},"timings":{}}')
    + DONE
)
COMPLETION = (
    data(
        b'{"id":"t","object":"text_completion","choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}]}'
    )
    + data(
        b'{"id":"t","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":null}'
    )
    + DONE
)
RESPONSES = (
    named(
        b"response.created",
        b'{"type":"response.created","sequence_number":0,"response":{"id":"resp_1","model":"m","error":null}}',
    )
    + named(b"response.in_progress", b'{"type":"response.in_progress","sequence_number":1,"response":{"id":"resp_1"}}')
    + named(b"response.output_text.delta", b'{"type":"response.output_text.delta","sequence_number":2,"delta":"Hi"}')
    + named(
        b"response.completed",
        b'{"type":"response.completed","sequence_number":3,"response":{"id":"resp_1","model":"m",'
        b'"usage":{"input_tokens":7,"output_tokens":3}}}',
    )
)
MESSAGES = (
    named(
        b"message_start",
        b'{"type":"message_start","message":{"id":"msg_1","model":"m","usage":{"input_tokens":7,"output_tokens":0}}}',
    )
    + named(
        b"content_block_start", b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'
    )
    + named(b"ping", b'{"type":"ping"}')
    + named(
        b"content_block_delta", b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}'
    )
    + named(b"content_block_stop", b'{"type":"content_block_stop","index":0}')
    + named(
        b"message_delta", b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}'
    )
    + named(b"message_stop", b'{"type":"message_stop"}')
)
