"""chairlift's server with a streaming client for each request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from driver import Answer, Request, Settings, serve
from server_process import ServerError, ServerProcess, events, free_port

import chairlift


class ChairliftServer:
    """Options are flags of ``chairlift serve`` without their dashes; true stands for a flag without a value."""

    def __init__(self, settings: Settings) -> None:
        port = free_port()
        flags = {
            "dtype": "bfloat16",
            "max-model-len": 1024,
            "max-num-seqs": settings.max_num_seqs,
            "num-threads": settings.cores,
            "kv-cache-memory-bytes": 2 * 1024**3,
            "no-enable-prefix-caching": True,
            **({"quantization": "int8"} if settings.precision == "int8" else {}),
            **settings.options,
        }
        command = [
            *(sys.executable, "-m", "chairlift", "serve", str(Path(settings.model) / "safetensors")),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
        ]
        for name, value in flags.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self.server = ServerProcess(command, port)
        self.description = f"chairlift {chairlift.__version__}, server, streaming clients"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        bodies = [
            {
                "model": "model",
                "prompt": request.prompt,
                "max_tokens": request.out,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for request in requests
        ]
        return [self._answer(body) for body in self.server.post("/v1/completions", bodies)]

    def _answer(self, body: bytes) -> Answer:
        received = events(body)
        usages = [event["usage"] for event in received if event.get("usage")]
        if not usages:
            raise ServerError(f"a stream of {len(received)} events without usage: {body[-300:]!r}")
        return Answer(usages[-1]["completion_tokens"], usages[-1]["prompt_tokens"])

    def close(self) -> None:
        self.server.close()


if __name__ == "__main__":
    serve(ChairliftServer)
