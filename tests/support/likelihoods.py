"""Log-likelihoods of continuations, as lm-eval's local-completions asks a server for them."""

from __future__ import annotations

from typing import Any

import httpx
import torch
from support.server import Server


def log_likelihoods(server: Server, model: str, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """Of each continuation after its context, out of an echo with logprobs, cut as lm-eval cuts it."""
    body = {
        "model": model,
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    response = httpx.post(f"{server.api}/completions", json=body, timeout=120)
    response.raise_for_status()
    sums = []
    for choice, (context, continuation) in zip(response.json()["choices"], pairs, strict=True):
        told = choice["logprobs"]
        values = told["token_logprobs"][len(context) : -1]
        assert len(values) == len(continuation)
        assert told["token_logprobs"][0] is None
        assert all(
            value <= max(top.values())
            for value, top in zip(values, told["top_logprobs"][len(context) : -1], strict=True)
        )
        sums.append(sum(values))
    return sums


def expected_log_likelihood(reference: Any, context: list[int], continuation: list[int]) -> float:
    """The same of a model of transformers."""
    tokens = context + continuation
    with torch.inference_mode():
        rows = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(float(rows[i - 1, tokens[i]]) for i in range(len(context), len(tokens)))
