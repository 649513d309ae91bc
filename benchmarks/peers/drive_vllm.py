"""vLLM on the CPU, offline: ``LLM.generate``, compiled as by default."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver import Answer, Request, Settings, serve

# Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm


class Vllm:
    """Options are arguments of ``vllm.LLM``, such as ``enforce_eager=true``."""

    def __init__(self, settings: Settings) -> None:
        folder = "safetensors" if settings.precision == "bf16" else "w8a8"
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            **settings.options,
        }
        self.llm = vllm.LLM(model=str(Path(settings.model) / folder), **arguments)
        mode = "eager" if arguments.get("enforce_eager") else "compiled"
        self.description = f"vLLM {vllm.__version__}, LLM.generate, {mode}"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=r.out, min_tokens=r.out, ignore_eos=True) for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            Answer(len(o.outputs[0].token_ids), len(o.prompt_token_ids), o.outputs[0].token_ids[0]) for o in outputs
        ]

    def close(self) -> None:
        del self.llm


if __name__ == "__main__":
    serve(Vllm)
