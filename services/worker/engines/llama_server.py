"""The child process of the `llama` engine: llama.cpp's server, on loopback only.

`python -m headrace.worker.engines.llama_server --model FILE --alias NAME …` prints `READY` and the port once it
listens. The kernel's default action ends it on SIGTERM, at once and whatever the C++ threads are doing; it has no
state to save.
"""

import argparse
import importlib
import os
import signal
import threading
from typing import Any, Final
from urllib.parse import urlsplit

__all__ = ["READY", "main"]

READY: Final = "headrace-llama-server listening on port"
"""The line that says it can be asked; the port follows."""

_BATCH_TOKENS: Final = 256
"""Prompt tokens read in one step. Between steps the other requests get a token each, and progress is reported."""
_PROMPT_CACHE_MIB: Final = 256
"""Host memory for prompts of idle slots; llama.cpp's own default is 8 GiB."""


def main(argv: list[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="headrace.worker.engines.llama_server", description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="name of the model in answers")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (default)")
    parser.add_argument("--ctx", type=int, required=True, help="tokens of the KV cache, shared by all slots")
    parser.add_argument("--slots", type=int, required=True, help="requests run at once")
    parser.add_argument("--threads", type=int, required=True, help="threads; more than idle cores make it crawl")
    args = parser.parse_args(argv)

    xllamacpp: Any = importlib.import_module("xllamacpp")  # here and not above, as the parent imports READY
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {args.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_ctx = args.ctx
    params.n_parallel = args.slots
    params.kv_unified = True
    params.n_batch = _BATCH_TOKENS
    params.n_ubatch = _BATCH_TOKENS
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.cors_origins = ""
    server = xllamacpp.Server(params)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # llama.cpp's log thread writes lines in parts; one write that begins a line of its own cannot land inside another.
    os.write(1, f"\n{READY} {urlsplit(server.listening_address).port}\n".encode())
    threading.Event().wait()


if __name__ == "__main__":
    main()
