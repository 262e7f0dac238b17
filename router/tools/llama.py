"""One llama.cpp server on the CPU, as a node to try Ebbtide with: `python -m router.tools.llama --model FILE --port N`.

Rules: `--context` is what each slot sees; llama.cpp is given the whole and divides it. `--batch` is the most prompt
tokens of one step. A step cannot be interrupted, so it is how long a chat may wait behind a document: with one thread
and SmolLM2-135M 12 s at llama.cpp's own 2048, under 1 s at 128.
"""

import argparse
import signal
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m router.tools.llama", description="One llama.cpp server.")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--name", default="model", help="the model's public name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1, help="calls answered at the same time")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each slot")
    parser.add_argument("--batch", type=int, default=128, help="most prompt tokens of one step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--template", type=Path, help="a chat template to use instead of the model's own")
    parser.add_argument("--embeddings", action="store_true", help="answer /v1/embeddings too")
    return parser.parse_args(argv)


def serve(options: argparse.Namespace) -> None:
    """Load the model and answer until SIGTERM."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.name}
    params.hostnames, params.port = [options.host], options.port
    params.n_parallel, params.n_ctx = options.slots, options.slots * options.context
    params.n_batch = params.n_ubatch = options.batch
    params.cpuparams.n_threads = options.threads
    params.endpoint_metrics = params.endpoint_slots = params.offline = True
    if options.template is not None:
        params.chat_template = options.template.read_text()
    if options.embeddings:
        params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    serve(parse())
