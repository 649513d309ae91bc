"""OpenVINO GenAI: its ContinuousBatchingPipeline, stepped by the driver, with the tokens as tensors."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driver import Answer, Request, Settings, serve

os.environ["OPENVINO_TELEMETRY"] = "0"

import numpy as np
import openvino
import openvino_genai


class OpenVino:
    """Options are fields of ``SchedulerConfig``, and properties of the CPU plugin in capitals."""

    def __init__(self, settings: Settings) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        fields = {
            "cache_size": 2,  # GiB
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": 1024,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": False,
        }
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.cores, "INFERENCE_PRECISION_HINT": "bf16"}
        for name, value in settings.options.items():
            (properties if name.isupper() else fields)[name] = value
        for name, value in fields.items():
            setattr(scheduler, name, value)
        directory = Path(settings.model) / f"openvino-{settings.precision}"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)
        self.description = (
            f"OpenVINO GenAI {importlib.metadata.version('openvino-genai')}, "
            f"{fields['max_num_batched_tokens']} batched tokens, {properties['INFERENCE_PRECISION_HINT']} inference"
        )

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        handles = [self._add(number, request) for number, request in enumerate(requests)]
        tokens: list[list[int]] = [[] for _ in requests]
        unread = set(range(len(requests)))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            self._read(handles, tokens, unread)
        self._read(handles, tokens, unread)
        return [Answer(len(sequence), None, sequence[0]) for sequence in tokens]

    def _add(self, number: int, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.out
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return self.pipeline.add_request(number, openvino.Tensor(np.array([request.prompt], dtype=np.int64)), config)

    def _read(self, handles: Sequence[Any], tokens: list[list[int]], unread: set[int]) -> None:
        for number in list(unread):
            while handles[number].can_read():
                for output in handles[number].read().values():
                    tokens[number].extend(output.generated_ids)
            if handles[number].get_status() != openvino_genai.GenerationStatus.RUNNING:
                unread.discard(number)

    def close(self) -> None:
        del self.pipeline


if __name__ == "__main__":
    serve(OpenVino)
