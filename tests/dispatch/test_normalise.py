import json

import pytest

from router.dispatch.normalise import complaint, status_inside

VLLM_LONG = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens, which exceeds"
    " this limit even without any output tokens."
)


def shaped(status, raw, field="messages"):
    return json.loads(complaint(status, raw, field).encode())["error"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422, 429, 500, 501, 503])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html><body><h1>Bad gateway</h1></body></html>",
        b'{"detail":"Not Found"}',
        b'{"detail":[{"loc":["body"],"msg":"bad"}]}',
        b'{"error":"Unauthorized"}',
        b'{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}',
        b'{"error":{"message":"no","type":"BadRequestError","param":"x","code":400}}',
        b'{"error":{"message":"no","type":null,"param":null,"code":null}}',
        b'{"error":null}',
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"error":{"message":{"a":1},"code":4.5,"param":7}}',
    ],
)
def test_every_shape_of_error_leaves_in_openais(status, raw):
    error = shaped(status, raw)
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or (isinstance(error["code"], str) and not error["code"].isdigit())


@pytest.mark.parametrize(
    ("raw", "context"),
    [
        (
            json.dumps(
                {"error": {"message": VLLM_LONG, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
            ),
            4096,
        ),
        (
            json.dumps(
                {
                    "error": {
                        "code": 400,
                        "message": "request (5000 tokens) exceeds the available context size (2048 tokens), try it",
                        "type": "exceed_context_size_error",
                        "n_prompt_tokens": 5000,
                        "n_ctx": 2048,
                    }
                }
            ),
            2048,
        ),
        (
            json.dumps(
                {
                    "object": "error",
                    "message": "The input (5000 tokens) is longer than the model's context length (1024 tokens).",
                    "type": "BadRequestError",
                    "code": 400,
                }
            ),
            1024,
        ),
        (json.dumps({"error": {"message": "the input length exceeds the context length"}}), None),
    ],
)
def test_a_prompt_that_is_too_long_reads_the_same_whoever_refused(raw, context):
    error = shaped(400, raw.encode())
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    wanted = "This model's maximum context length is" + ("" if context is None else f" {context} tokens.")
    assert error["message"].startswith(wanted)


def test_a_model_the_node_does_not_know_is_model_not_found():
    raw = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}'
    assert shaped(404, raw) == {
        "message": "The model `x` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_openais_own_words_are_kept():
    raw = b'{"error":{"message":"slow","type":"tokens","param":null,"code":"rate_limit_exceeded"}}'
    assert shaped(429, raw) == {"message": "slow", "type": "tokens", "param": None, "code": "rate_limit_exceeded"}


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"error":{"message":"x","code":400}}', 400),
        (b'{"error":{"message":"x","code":"invalid"}}', 500),
        (b'{"error":{"message":"x"}}', 500),
        (b"not json", 500),
        (b'{"error":{"message":"x","code":99999}}', 500),
    ],
)
def test_an_error_events_code_is_its_status(raw, status):
    assert status_inside(raw) == status
