"""llama.cpp's server, asked for all requests at once."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from driver import Answer, Request, Settings, serve
from server_process import ServerProcess, free_port

BINARY = Path(os.environ.get("PEERS_ROOT", "peers")) / "llamacpp" / "build" / "bin" / "llama-server"
MODELS = {"bf16": "bf16.gguf", "int8": "q8_0.gguf"}
SLOTS = 16  # the quickest of 8, 16, 32 and 64 for the request set on two cores
TOKENS_PER_SLOT = 1024


class LlamaCpp:
    """Options: ``slots``, and ``arguments``, a list of further flags of ``llama-server``."""

    def __init__(self, settings: Settings) -> None:
        slots = min(settings.max_num_seqs, settings.options.get("slots", SLOTS))
        port = free_port()
        command = [
            *(str(BINARY), "--model", str(Path(settings.model) / MODELS[settings.precision])),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(slots), "--ctx-size", str(slots * TOKENS_PER_SLOT)),
            *("--threads", str(settings.cores), "--threads-batch", str(settings.cores), "--threads-http", "4"),
            *("--no-cache-prompt", "--cache-ram", "0", "--fit", "off", "--log-disable"),
            *settings.options.get("arguments", []),
        ]
        self.server = ServerProcess(command, port)
        version = subprocess.run([str(BINARY), "--version"], capture_output=True, text=True, check=True)
        number = (version.stderr + version.stdout).partition("version:")[2].strip().partition("\n")[0]
        self.description = f"llama.cpp {number}, llama-server, {slots} slots, {MODELS[settings.precision]}"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        bodies = [
            {
                "prompt": request.prompt,
                "n_predict": request.out,
                "ignore_eos": True,
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            }
            for request in requests
        ]
        answers = [json.loads(body) for body in self.server.post("/completion", bodies)]
        return [Answer(a["tokens_predicted"], a["tokens_evaluated"], a["tokens"][0]) for a in answers]

    def close(self) -> None:
        self.server.close()


if __name__ == "__main__":
    serve(LlamaCpp)
