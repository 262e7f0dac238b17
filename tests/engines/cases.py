"""Calls whose two forms are compared, by path and name. Seeded; small enough for a slot of 512 tokens."""

from typing import Any

Cases = dict[str, dict[str, dict[str, Any]]]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Name one sea."}], "max_tokens": 6, "temperature": 0, "seed": 7},
    COMPLETIONS: {"prompt": "The tide comes", "max_tokens": 5, "temperature": 0, "seed": 7},
    RESPONSES: {"input": "Name one sea.", "max_output_tokens": 6, "temperature": 0, "store": False},
    EMBEDDINGS: {"input": "The tide"},
}
"""What every case asks, unless it says otherwise."""


def tool(name: str) -> dict[str, Any]:
    unit = {"type": "string", "enum": ["C", "F"]}
    shape = {"type": "object", "properties": {"unit": unit}, "required": ["unit"], "additionalProperties": False}
    return {"name": name, "parameters": shape, "strict": True}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool(name)} for name in names]


SEA = {
    "type": "object",
    "properties": {"salty": {"type": "boolean"}},
    "required": ["salty"],
    "additionalProperties": False,
}
FORCED = {"tools": tools("weather"), "tool_choice": {"type": "function", "function": {"name": "weather"}}}
WARM = {"temperature": 0.9, "n": 2}
EITHER: Cases = {
    CHAT: {
        "plain": {},
        "several": WARM,
        "logprobs": {"logprobs": True},
        "top logprobs": {"logprobs": True, "top_logprobs": 3},
        "several with logprobs": {**WARM, "logprobs": True, "top_logprobs": 2, "max_tokens": 4},
        "schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "sea", "schema": SEA}},
            "max_tokens": 30,
        },
        "stop": {"stop": ["a", "e"], "max_tokens": 20},
        "one token": {"max_tokens": 1},
        "prefilled": {
            "messages": [{"role": "user", "content": "Name one sea."}, {"role": "assistant", "content": "The"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "refused": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}},
    },
    COMPLETIONS: {
        "plain": {},
        "two prompts": {"prompt": ["The tide", "The moon is"]},
        "several": WARM,
        "several of two": {**WARM, "prompt": ["The tide", "The moon is"], "logprobs": 1},
        "logprobs": {"logprobs": 2},
        "echo": {"echo": True},
        "echo with logprobs": {"echo": True, "logprobs": 2},
        "stop": {"stop": ["a", "e"], "max_tokens": 20},
        "ids": {"prompt": [[5, 6], [7, 8]]},
        "schema": {"response_format": {"type": "json_object"}},
    },
    RESPONSES: {
        "plain": {},
        "instructions": {"instructions": "Be brief."},
        "messages": {"input": [{"role": "user", "content": "hi"}]},
        "schema": {"text": {"format": {"type": "json_schema", "name": "sea", "schema": SEA}}},
    },
    EMBEDDINGS: {
        "plain": {},
        "several": {"input": ["The tide", "The moon"]},
        "base64": {"encoding_format": "base64"},
    },
}
LLAMACPP: Cases = {
    CHAT: {
        "ended": {"logit_bias": [[2, 8]], "logprobs": True, "max_tokens": 12},
        "logprobs beside tools": {**FORCED, "logprobs": True, "max_tokens": 2},
        "reasoning": {"chat_template_kwargs": {"begin": "<think>\n"}},
        "call cut off": {**FORCED, "max_tokens": 9, "chat_template_kwargs": {"begin": "<tool_call>\n"}},
        "reasoning and call": {
            **FORCED,
            "tool_choice": "required",
            "max_tokens": 40,
            "chat_template_kwargs": {"begin": "<think>\nhm\n</think>\n\n<tool_call>\n"},
        },
    },
    COMPLETIONS: {"probabilities": {"n_probs": 2}},
    RESPONSES: {
        "call": {
            "tools": [{"type": "function", **tool("weather")}],
            "tool_choice": "required",
            "max_output_tokens": 40,
            "chat_template_kwargs": {"begin": "<tool_call>\n"},
        },
    },
    EMBEDDINGS: {},
}
VLLM: Cases = {
    CHAT: {
        "object": {"response_format": {"type": "json_object"}},
        "no tool": {"tools": tools("weather"), "tool_choice": "none"},
        "stop ids": {"stop_token_ids": list(range(3, 400)), "max_tokens": 20},
        "stop kept": {"stop": ["a", "e"], "max_tokens": 20, "include_stop_str_in_output": True},
        "ids": {"return_token_ids": True},
        "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": True},
        "echo": {"echo": True},
        "prompt's logprobs": {"prompt_logprobs": 1},
        "forced": {**FORCED, "max_tokens": 120, "temperature": 1},
        "forced, several": {**FORCED, **WARM, "max_tokens": 120, "logprobs": True},
        "any": {"tools": tools("weather", "tide"), "tool_choice": "required", "max_tokens": 120, "temperature": 1},
        "call cut off": {**FORCED, "max_tokens": 9},
        "too cold": {"temperature": -3},
    },
    COMPLETIONS: {
        "stop ids": {"stop_token_ids": list(range(3, 400)), "max_tokens": 20},
        "ids returned": {"return_token_ids": True},
        "echo alone": {"echo": True, "max_tokens": 0, "logprobs": 1},
        "prompt's logprobs": {"prompt_logprobs": 1},
    },
    RESPONSES: {
        "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        "reasoning": {"reasoning": {"effort": "low"}},
    },
    EMBEDDINGS: {},
}


SPARED = {
    CHAT: {"plain", "several", "logprobs", "one token"},
    COMPLETIONS: {"plain", "several", "logprobs", "echo", "stop", "ids"},
    RESPONSES: {"instructions", "messages"},
    EMBEDDINGS: {"plain"},
}
"""What a slow engine is not asked, since other cases show it as well."""


def of(engine: Cases, path: str) -> dict[str, dict[str, Any]]:
    """Every case of an engine's endpoint, complete but for the model."""
    spared = SPARED[path] if engine is LLAMACPP else set()
    cases = {**EITHER[path], **engine[path]}
    return {name: {**ASKED[path], **fields} for name, fields in cases.items() if name not in spared}
