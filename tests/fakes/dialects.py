"""What each engine tells a probe: models, facts, load and health, in the engine's own words.

`surface(node, path)` answers GET requests; names, units and oddities (strings in labels, missing metrics, HTTP 501) are
those of the recorded answers of vLLM 0.32 and llama.cpp and of the sources of SGLang and Ollama.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.fakes.plain import error_body

if TYPE_CHECKING:
    from tests.fakes.node import FakeNode

CREATED = 1_795_964_362
#: The error shape each engine speaks.
SHAPES = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "ollama": "openai", "openai": "openai"}


@dataclass(frozen=True)
class Page:
    """One answer to a probe; the body is bytes or JSON."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def text(body: str, **headers: str) -> Page:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Page(body.encode(), content_type="text/plain; version=0.0.4; charset=utf-8", headers=pairs)


def surface(node: "FakeNode", path: str) -> Page | None:
    """The page at `path`, or None where this engine has none."""
    if path == "/metrics" and node.metrics is not None:
        return _set_metrics(node.metrics)
    page = _ENGINES[node.dialect].get(path)
    return page(node) if page else None


def _set_metrics(metrics: "str | int | Callable[[], str]") -> Page:
    if isinstance(metrics, int):
        return Page(b"", status=metrics, content_type="text/plain")
    return text(metrics() if callable(metrics) else metrics)


def health(node: "FakeNode") -> Page:
    if node.health == 200:
        return Page({"status": "ok"}) if node.dialect == "llamacpp" else Page(b"", content_type="text/plain")
    if node.dialect == "llamacpp":
        said = {"code": node.health, "message": "Loading model", "type": "unavailable_error"}
        return Page({"error": said}, status=node.health)
    return Page(b"", status=node.health, content_type="text/plain")


def _models(node: "FakeNode", extra: Callable[[str], dict[str, Any]]) -> Page:
    data = [{"id": name, "object": "model", "created": CREATED, **extra(name)} for name in node.models]
    return Page({"object": "list", "data": data})


# vLLM


def _vllm_model(node: "FakeNode") -> Callable[[str], dict[str, Any]]:
    return lambda name: {
        "owned_by": "vllm",
        "root": name,
        "parent": None,
        "max_model_len": node.context,
        "permission": [],
    }


def vllm_metrics(node: "FakeNode") -> str:
    """The gauges and counters routing reads; `metric_names` renames one, or drops it with None."""
    labels = f'engine="0",model_name="{node.models[0] if node.models else ""}"'
    values = {
        "vllm:num_requests_running": node.running,
        "vllm:num_requests_waiting": node.waiting,
        "vllm:kv_cache_usage_perc": node.kv_usage,
        "vllm:num_preemptions_total": 0,
        "vllm:prompt_tokens_total": node.prompt_tokens_total,
        "vllm:generation_tokens_total": node.generation_tokens_total,
    }
    lines = [f"{name}{{{labels}}} {float(value)}" for key, value in values.items() if (name := _renamed(node, key))]
    if info := _renamed(node, "vllm:cache_config_info"):
        config = {
            "block_size": 16,
            "num_gpu_blocks": node.kv_tokens // 16,
            "cache_dtype": "auto",
            "sliding_window": None,
        }
        config |= {"kv_cache_size_tokens": node.kv_tokens, "kv_cache_max_concurrency": node.kv_tokens / node.context}
        said = ",".join(f'{key}="{value}"' for key, value in config.items())
        lines.append(f'{info}{{engine="0",{said}}} 1.0')
    lines += [f"process_resident_memory_bytes {float(node.rss)}", f"process_start_time_seconds {float(CREATED)}"]
    return "\n".join(lines) + "\n"


def _renamed(node: "FakeNode", name: str) -> str | None:
    return node.metric_names.get(name, name)


# SGLang


def sglang_metrics(node: "FakeNode") -> str:
    labels = f'model_name="{node.models[0]}"'
    values = {
        "sglang:num_running_reqs": node.running,
        "sglang:num_queue_reqs": node.waiting,
        "sglang:token_usage": node.kv_usage,
        "sglang:max_total_num_tokens": node.kv_tokens,
        "sglang:context_len": node.context,
        "sglang:prompt_tokens_total": node.prompt_tokens_total,
        "sglang:generation_tokens_total": node.generation_tokens_total,
    }
    return "".join(f"{name}{{{labels}}} {float(v)}\n" for key, v in values.items() if (name := _renamed(node, key)))


def _sglang_info(node: "FakeNode") -> Page:
    return Page(
        {
            "model_path": node.models[0],
            "served_model_name": node.models[0],
            "max_total_num_tokens": node.kv_tokens,
            "max_req_input_len": node.context - 6,
            "context_length": node.context,
            "max_running_requests": node.slots or 256,
            "version": "0.5.23",
            "internal_states": [{"effective_max_running_requests_per_dp": node.slots or 256}],
        }
    )


def _sglang_loads(node: "FakeNode") -> Page:
    load = {
        "dp_rank": 0,
        "num_running_reqs": node.running,
        "num_waiting_reqs": node.waiting,
        "num_total_reqs": node.running + node.waiting,
        "num_used_tokens": int(node.kv_usage * node.kv_tokens),
        "max_total_num_tokens": node.kv_tokens,
        "token_usage": node.kv_usage,
        "gen_throughput": 0.0,
    }
    return Page({"timestamp": "2026-08-21T00:00:00+00:00", "version": "0.5.23", "dp_rank_count": 1, "loads": [load]})


# llama.cpp


def llamacpp_metrics(node: "FakeNode") -> str:
    values = {
        "llamacpp:prompt_tokens_total": node.prompt_tokens_total,
        "llamacpp:prompt_tokens_cached_total": 0,
        "llamacpp:tokens_predicted_total": node.generation_tokens_total,
        "llamacpp:prompt_tokens_seconds": 0,
        "llamacpp:requests_processing": node.running,
        "llamacpp:requests_deferred": node.waiting,
    }
    return "".join(f"{name} {value}\n" for key, value in values.items() if (name := _renamed(node, key)))


def _llamacpp_model(node: "FakeNode") -> Callable[[str], dict[str, Any]]:
    meta = {
        "vocab_type": 2,
        "n_vocab": 49152,
        "n_ctx": node.context,
        "n_ctx_train": node.context * 4,
        "n_params": 134515008,
    }
    return lambda name: {"owned_by": "llamacpp", "aliases": [name], "meta": meta}


def _props(node: "FakeNode") -> Page:
    settings = {"params": {"max_tokens": -1}, "n_ctx": node.context}
    flags = {"endpoint_slots": True, "endpoint_metrics": True, "is_sleeping": False, "build_info": "b0-fake"}
    return Page(
        {"default_generation_settings": settings, "total_slots": node.slots or 4, "model_path": "m.gguf", **flags}
    )


def _slots(node: "FakeNode") -> Page:
    total = node.slots or 4
    busy = [
        {"n_prompt_tokens": 10, "next_token": [{"n_decoded": 1}]} if at < node.running else {} for at in range(total)
    ]
    slots = [
        {"id": at, "n_ctx": node.context, "speculative": False, "is_processing": at < node.running, **busy[at]}
        for at in range(total)
    ]
    return Page(slots)


# Ollama


def _ps(node: "FakeNode") -> Page:
    size = {"size": 5_137_025_024, "size_vram": 5_137_025_024, "context_length": node.context}
    return Page({"models": [{"name": name, "model": name, "digest": "0", **size} for name in node.models]})


def _tags(node: "FakeNode") -> Page:
    return Page(
        {"models": [{"name": name, "model": name, "size": 5_137_025_024, "digest": "0"} for name in node.models]}
    )


_PageOf = Callable[["FakeNode"], Page]
_ENGINES: dict[str, dict[str, _PageOf]] = {
    "vllm": {
        "/health": health,
        "/ping": health,
        "/version": lambda node: Page({"version": node.version}),
        "/load": lambda node: Page({"server_load": 0}),
        "/v1/models": lambda node: _models(node, _vllm_model(node)),
        "/metrics": lambda node: text(vllm_metrics(node)),
    },
    "sglang": {
        "/health": health,
        "/server_info": _sglang_info,
        "/get_server_info": _sglang_info,
        "/model_info": lambda node: Page({"model_path": node.models[0], "is_generation": True}),
        "/get_model_info": lambda node: Page({"model_path": node.models[0], "is_generation": True}),
        "/v1/loads": _sglang_loads,
        "/v1/models": lambda node: _models(node, lambda _: {"owned_by": "sglang", "max_model_len": node.context}),
        "/metrics": lambda node: text(sglang_metrics(node)),
    },
    "llamacpp": {
        "/health": health,
        "/v1/health": health,
        "/props": _props,
        "/slots": _slots,
        "/v1/models": lambda node: _models(node, _llamacpp_model(node)),
        "/metrics": lambda node: text(llamacpp_metrics(node), Process_Start_Time_Unix=str(CREATED)),
    },
    "ollama": {
        "/": lambda _: text("Ollama is running"),
        "/api/version": lambda _: Page({"version": "0.33.0"}),
        "/api/ps": _ps,
        "/api/tags": _tags,
        "/v1/models": lambda node: _models(node, lambda _: {"owned_by": "library"}),
    },
    "openai": {"/v1/models": lambda node: _models(node, lambda _: {"owned_by": "relay"})},
}


def refusal(node: "FakeNode", status: int, message: str, param: str | None = None) -> Page:
    """An error as this node's engine words it."""
    content_type, body = error_body(SHAPES[node.dialect], status, message, param)
    return Page(body, status=status, content_type=content_type)
