"""chairlift, offline: ``LLM.generate`` in the driver's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from driver import Answer, Request, Settings, serve

import chairlift


class Chairlift:
    """One batch per run. Options are fields of ``EngineConfig``."""

    def __init__(self, settings: Settings) -> None:
        options = {
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": settings.max_num_seqs,
            "num_threads": settings.cores,
            "kv_cache_memory_bytes": 2 * 1024**3,
            "enable_prefix_caching": False,  # or a run would find the prompts of the one before
            **({"quantization": "int8"} if settings.precision == "int8" else {}),
            **settings.options,
        }
        self.llm = chairlift.LLM(str(Path(settings.model) / "safetensors"), **options)
        self.description = f"chairlift {chairlift.__version__}, LLM.generate"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        params = [chairlift.SamplingParams(max_tokens=r.out, temperature=0, ignore_eos=True) for r in requests]
        outputs = self.llm.generate([r.prompt for r in requests], params)
        return [
            Answer(len(o.outputs[0].token_ids), len(o.prompt_token_ids), o.outputs[0].token_ids[0]) for o in outputs
        ]

    def close(self) -> None:
        self.llm.close()


if __name__ == "__main__":
    serve(Chairlift)
