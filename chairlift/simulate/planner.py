"""How many sequences fit, with the arithmetic shown, and the flags that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from chairlift.scheduling.work import StepWork
from chairlift.simulate.cost import StepCost
from chairlift.simulate.lengths import Lengths
from chairlift.simulate.setup import check_fits
from chairlift.simulate.sizes import Deployment

MOST_SEQUENCES = 1024
ROUNDS = 8
PREFILL_ROWS = 512
MOST_ROWS = 8192  # of a step, unless there are more sequences
BUNCHES = 1.25  # what a step needs above the mean, since answers end, and prompts come in, in bunches
FULL = 0.97  # of the cache, on average: an engine gets some points less, as whoever waits needs room for all it has


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the arithmetic: what it is, how it is computed, and what comes out."""

    name: str
    arithmetic: str
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sized deployment.

    Attributes:
        deployment: with the recommended limits in it.
        lengths: of the requests it is for.
        expected: sequences that fill the KV cache on average, though each is as long as chance will have it: full
            memory, some preemption.
        by_final_length: the same by the mean final length.
        safe: sequences that fit if each is as long as the 95th percentile: no preemption to speak of.
        worst: sequences that fit if each is as long as it may be: no preemption ever.
        limited_by: what the recommended ``max_num_seqs`` follows from.
        decode_step: seconds of a step in which every sequence decodes; ``None`` without a cost model.
        full_step: seconds of a step that uses all of ``max_num_batched_tokens``.
        output_throughput: output tokens a second with every place taken.
        slos: objectives in milliseconds, each with the value expected at a full batch.
    """

    deployment: Deployment
    lengths: Lengths
    expected: int
    by_final_length: int
    safe: int
    worst: int
    limited_by: str
    decode_step: float | None = None
    full_step: float | None = None
    output_throughput: float | None = None
    slos: Mapping[str, tuple[float, float]]

    def flags(self, model: str) -> str:
        """The command that serves it."""
        d = self.deployment
        parts = [f"chairlift serve {model}"]
        if d.tensor_parallel_size > 1:
            parts.append(f"--tensor-parallel-size {d.tensor_parallel_size}")
        if d.precision.name in ("bfloat16", "float16", "float32"):
            parts.append(f"--dtype {d.precision.name}")
        if d.kv_scale_bytes:
            parts.append("--kv-cache-dtype int8")
        parts += [
            f"--max-model-len {d.max_model_len}",
            f"--gpu-memory-utilization {d.gpu_memory_utilization:g}",
            f"--max-num-seqs {d.max_num_seqs}",
            f"--max-num-batched-tokens {d.max_num_batched_tokens}",
            f"--block-size {d.block_size}",
        ]
        if d.swap_space:
            parts.append(f"--swap-space {d.swap_space:g}")
        return " ".join(parts)

    def explain(self) -> list[Line]:
        """The arithmetic, line by line."""
        return [*_weight_lines(self.deployment), *_budget_lines(self.deployment), *_sequence_lines(self)]

    def to_json(self, model: str) -> dict[str, Any]:
        """What a script needs, in bytes, tokens and seconds."""
        d = self.deployment
        return {
            "schema": "chairlift.plan/1",
            "model": model,
            "hardware": d.hardware.name,
            "tensor_parallel_size": d.tensor_parallel_size,
            "dtype": d.precision.name,
            "per_device": {
                "memory_bytes": d.hardware.memory_bytes,
                "usable_bytes": d.usable_bytes,
                "weight_bytes": d.weight_bytes,
                "context_bytes": d.context_bytes,
                "activation_bytes": d.activation_bytes,
                "kv_budget_bytes": d.kv_budget,
                "kv_bytes_per_token": d.kv_bytes_per_token,
            },
            "kv_tokens": d.kv_tokens,
            "num_blocks": d.num_blocks,
            "lengths": {
                "description": self.lengths.description,
                "mean": self.lengths.mean,
                "mean_resident": self.lengths.mean_resident,
                "p95": self.lengths.percentile(95),
                "longest": self.lengths.longest,
            },
            "max_num_seqs": {
                "recommended": d.max_num_seqs,
                "limited_by": self.limited_by,
                "expected": self.expected,
                "by_final_length": self.by_final_length,
                "safe": self.safe,
                "worst": self.worst,
            },
            "max_num_batched_tokens": d.max_num_batched_tokens,
            "decode_step_seconds": self.decode_step,
            "full_step_seconds": self.full_step,
            "output_throughput": self.output_throughput,
            "objectives_ms": {
                name: {"limit": limit, "expected": value, "met": value <= limit}
                for name, (limit, value) in self.slos.items()
            },
            "command": self.flags(model),
        }


def make_plan(
    deployment: Deployment,
    lengths: Lengths,
    *,
    cost: StepCost | None = None,
    slos: Mapping[str, float] | None = None,
    aim: str = "safe",
    max_num_batched_tokens: int | None = None,
) -> Plan:
    """Sizes a deployment for requests of these lengths.

    The activations of a step depend on how many sequences it may have, and that on the room that the activations leave:
    the limits are computed again until they no longer change.

    Args:
        deployment: what there is; its step limits are replaced by the recommended ones.
        lengths: of the requests.
        cost: tells step times, for the objectives.
        slos: objectives in milliseconds: ttft, tpot, e2el.
        aim: which value to recommend: "safe", "expected" or "worst".
        max_num_batched_tokens: kept if given.

    Raises:
        SizingError: the weights do not fit, or not one sequence of full length would.
    """
    lengths = lengths.clip(deployment.max_model_len)
    least = 0  # without an objective the budget only grows, or its activations and the sequences could chase each other
    for _ in range(ROUNDS):
        check_fits(deployment)
        seqs, limited_by = _recommended(deployment, lengths, aim, cost, slos or {})
        budget = max_num_batched_tokens or max(least, _token_budget(deployment, seqs, lengths, cost, slos or {}))
        least = 0 if slos else budget
        changed = replace(deployment, max_num_seqs=min(seqs, budget), max_num_batched_tokens=budget)
        if changed == deployment:
            break
        deployment = changed
    check_fits(deployment)
    decode = full = throughput = None
    if cost is not None:
        throughput = deployment.max_num_seqs / _tpot(deployment.max_num_seqs, lengths, cost)
        decode = cost.seconds(_decode_work(deployment.max_num_seqs, lengths))
        full = cost.seconds(_full_work(deployment.max_num_seqs, deployment.max_num_batched_tokens, lengths))
    return Plan(
        deployment=deployment,
        lengths=lengths,
        expected=_AIMS["expected"](deployment, lengths),
        by_final_length=_fitting(deployment, lengths.mean),
        safe=_AIMS["safe"](deployment, lengths),
        worst=_AIMS["worst"](deployment, lengths),
        limited_by=limited_by,
        decode_step=decode,
        full_step=full,
        output_throughput=throughput,
        slos=_expected_latencies(deployment, lengths, cost, slos or {}),
    )


def _fitting(deployment: Deployment, tokens_each: float) -> int:
    return max(1, int(deployment.kv_tokens / tokens_each))


def expected_fill(deployment: Deployment, lengths: Lengths, seqs: int) -> float:
    """Share of the KV cache that ``seqs`` sequences fill on average.

    Together they want what is nearly normally distributed. What they want beyond the cache they do not get, and what
    they happen not to want nobody else uses: so the mean of what they fill, E[min(wanted, cache)], is below the cache
    even where the mean of what they want is all of it, and the more so the fewer they are.
    """
    cache, wanted = deployment.kv_tokens, seqs * _resident_tokens(deployment, lengths)
    spread = math.sqrt(seqs) * lengths.resident_deviation
    if not spread:
        return min(1.0, wanted / cache)
    normal = NormalDist(wanted, spread)
    unfilled = (cache - wanted) * normal.cdf(cache) + spread**2 * normal.pdf(cache)
    return 1 - unfilled / cache


def _safe(deployment: Deployment, lengths: Lengths) -> int:
    return _fitting(deployment, _blocks(deployment, lengths.percentile(95)))


def _resident_tokens(deployment: Deployment, lengths: Lengths) -> float:
    """What a sequence holds at a random step: half of its last block is empty."""
    return lengths.mean_resident + deployment.block_size / 2


def _filling(deployment: Deployment, lengths: Lengths) -> int:
    """The fewest sequences that fill the cache."""
    low, high = 0, 1
    while expected_fill(deployment, lengths, high) < FULL:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if expected_fill(deployment, lengths, middle) >= FULL else (middle, high)
    return high


def _blocks(deployment: Deployment, tokens: float) -> int:
    """Tokens in the blocks that a sequence fills."""
    return math.ceil(tokens / deployment.block_size) * deployment.block_size


_AIMS: dict[str, Callable[[Deployment, Lengths], int]] = {
    "expected": lambda d, lengths: max(_filling(d, lengths), _safe(d, lengths)),
    "safe": _safe,
    "worst": lambda d, _: _fitting(d, _blocks(d, d.max_model_len)),
}
_REASONS = {
    "expected": "a cache that is full on average",
    "safe": "the 95th percentile of lengths",
    "worst": "--max-model-len",
}


def _recommended(
    deployment: Deployment, lengths: Lengths, aim: str, cost: StepCost | None, slos: Mapping[str, float]
) -> tuple[int, str]:
    """The number of sequences that is aimed at, or fewer where every step would be too slow for the TPOT objective."""
    seqs, reason = min(
        (_AIMS[aim](deployment, lengths), _REASONS[aim]),
        (MOST_SEQUENCES, f"{MOST_SEQUENCES} sequences, beyond which a batch gains little"),
    )
    if cost is None or "tpot" not in slos:
        return seqs, reason
    limit = slos["tpot"] / 1000
    if _tpot(seqs, lengths, cost) <= limit:
        return seqs, reason
    low, high = 1, seqs  # the largest that meets it, if any does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _tpot(middle, lengths, cost) <= limit else (low, middle)
    return low, f"the TPOT objective of {slos['tpot']:g} ms"


def _tpot(seqs: int, lengths: Lengths, cost: StepCost) -> float:
    """Seconds between the tokens of a sequence, on average.

    Each of the others is prefilled once while this one generates as many tokens as they do, and that delays them all.
    """
    decode = cost.seconds(_decode_work(seqs, lengths))
    return decode + _prefill_seconds(seqs, lengths, cost) * (seqs - 1) / lengths.mean_output


def _prefill_seconds(seqs: int, lengths: Lengths, cost: StepCost) -> float:
    """What the prefill of a mean prompt adds to the decoding beside it, in steps of a common size."""
    rows = max(PREFILL_ROWS, seqs)
    added = cost.seconds(_full_work(seqs, seqs + rows, lengths)) - cost.seconds(_decode_work(seqs, lengths))
    return added / rows * lengths.mean_prompt


def _token_budget(
    deployment: Deployment, seqs: int, lengths: Lengths, cost: StepCost | None, slos: Mapping[str, float]
) -> int:
    """The largest power of two whose steps, filled with prefill, still meet the TPOT objective.

    Without one, the smallest in which as many prompts can be computed as answers end; never fewer than the defaults.
    On a processor, where more rows take as much longer, the default will do.
    """
    least = _power_of_two(seqs)
    if cost is None or "tpot" not in slos:
        if not deployment.hardware.context_bytes:
            return max(512, least)
        return max(2048, least, min(MOST_ROWS, _power_of_two(BUNCHES * rows_per_step(seqs, lengths))))
    budget = max(MOST_ROWS, least)
    while budget > max(128, least) and cost.seconds(_full_work(seqs, budget, lengths)) > slos["tpot"] / 1000:
        budget //= 2
    return budget


def rows_per_step(seqs: int, lengths: Lengths) -> float:
    """Rows that a step must have room for if ``seqs`` sequences are to run: in as many steps as a request has output
    tokens, all its tokens are computed. With less, prompts come in too slowly to keep every place taken.
    """
    return seqs * (1 + lengths.mean_prompt / lengths.mean_output)


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(least) - 1).bit_length()


def _decode_work(seqs: int, lengths: Lengths) -> StepWork:
    return StepWork(seqs, seqs, seqs, int(seqs * lengths.mean_resident))


def _full_work(seqs: int, budget: int, lengths: Lengths) -> StepWork:
    """Every sequence decodes, and what the budget leaves is prefill of prompts of mean length."""
    work = _decode_work(seqs, lengths)
    rows = max(0, budget - seqs)
    prompts = math.ceil(rows / lengths.mean_prompt)
    return StepWork(
        work.rows + rows, seqs + prompts, work.sampled + prompts, work.context, int(rows * lengths.mean_prompt / 2)
    )


def _expected_latencies(
    deployment: Deployment, lengths: Lengths, cost: StepCost | None, slos: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Of a mean request that meets a full batch and no queue."""
    if cost is None or not slos:
        return {}
    seqs, budget = deployment.max_num_seqs, deployment.max_num_batched_tokens
    full = cost.seconds(_full_work(seqs, budget, lengths))
    steps = math.ceil(lengths.mean_prompt / max(1, budget - seqs))
    tpot = _tpot(seqs, lengths, cost)
    values = {"ttft": steps * full, "tpot": tpot, "e2el": steps * full + tpot * (lengths.mean_output - 1)}
    return {name: (limit, values[name] * 1000) for name, limit in slos.items()}


def _weight_lines(d: Deployment) -> list[Line]:
    m, tp = d.model, d.tensor_parallel_size
    each = f" / {tp} devices" if tp > 1 else ""
    return [
        Line(
            "weights in layers",
            f"{m.num_layers} layers × (attention {m.hidden_size} × 2 × ({m.num_heads} + {m.num_kv_heads}) × "
            f"{m.head_dim} + MLP 3 × {m.hidden_size} × {m.intermediate_size}){each}",
            f"{d.layer_weights:,}",
        ),
        Line(
            "other weights",
            f"{m.vocab_size} × {m.hidden_size} embedding"
            f"{'' if m.tie_word_embeddings else ' and as much for the output head'}{each}, and norms",
            f"{d.other_weights:,}",
        ),
        Line(
            "weight bytes",
            f"{d.layer_weights:,} × {d.precision.weight_bytes:g} + {d.other_weights:,} × "
            f"{max(2.0, d.precision.weight_bytes):g} bytes",
            _gb(d.weight_bytes),
        ),
    ]


def _budget_lines(d: Deployment) -> list[Line]:
    m = d.model
    return [
        Line(
            "usable memory",
            f"{_gb(d.hardware.memory_bytes)} × --gpu-memory-utilization {d.gpu_memory_utilization:g}",
            _gb(d.usable_bytes),
        ),
        Line(
            "KV budget",
            f"{_gb(d.usable_bytes)} − weights {_gb(d.weight_bytes)} − libraries {_gb(d.context_bytes)} − activations "
            f"of {d.max_num_batched_tokens} rows {_gb(d.activation_bytes)}",
            _gb(d.kv_budget),
        ),
        Line(
            "KV bytes per token",
            f"{m.num_layers} layers × 2 × {d.kv_heads} heads × "
            + (
                f"({m.head_dim} × {d.kv_itemsize} bytes + a scale of {d.kv_scale_bytes})"
                if d.kv_scale_bytes
                else f"{m.head_dim} × {d.kv_itemsize} bytes"
            ),
            f"{d.kv_bytes_per_token:,}",
        ),
        Line(
            "KV tokens",
            f"{d.kv_budget:,} / {d.kv_bytes_per_token:,}, in {d.num_blocks:,} blocks of {d.block_size}",
            f"{d.kv_tokens:,}",
        ),
    ]


def _sequence_lines(plan: Plan) -> list[Line]:
    d, lengths = plan.deployment, plan.lengths
    p95 = _blocks(d, lengths.percentile(95))
    lines = [
        Line(
            "mean final length",
            f"prompt {lengths.mean_prompt:,.1f} + output {lengths.mean_output:,.1f}",
            f"{lengths.mean:,.1f}",
        ),
        Line(
            "mean resident length",
            "E[output × prompt + output² / 2] / E[output]: at a random step, each as far as it has come",
            f"{lengths.mean_resident:,.1f}",
        ),
        Line("max-num-seqs, by final length", f"{d.kv_tokens:,} / {lengths.mean:,.1f}", f"{plan.by_final_length:,}"),
        Line(
            "max-num-seqs, expected",
            f"the fewest n that fill {FULL:.0%} on average: n × ({lengths.mean_resident:,.1f} + half a block of "
            f"{d.block_size}) ± √n × {lengths.resident_deviation:,.1f}, cut at {d.kv_tokens:,}, fill "
            f"{expected_fill(d, lengths, plan.expected):.1%} with n =",
            f"{plan.expected:,}",
        ),
        Line("max-num-seqs, safe", f"{d.kv_tokens:,} / P95 {p95:,} (whole blocks)", f"{plan.safe:,}"),
        Line(
            "max-num-seqs, worst case",
            f"{d.kv_tokens:,} / --max-model-len {_blocks(d, d.max_model_len):,}",
            f"{plan.worst:,}",
        ),
    ]
    lines.append(
        Line(
            "rows that a step needs",
            f"{d.max_num_seqs} sequences × (1 + mean prompt / mean output), to keep them coming; a step may have "
            f"{d.max_num_batched_tokens:,}",
            f"{rows_per_step(d.max_num_seqs, lengths):,.0f}",
        )
    )
    if plan.decode_step is not None and plan.full_step is not None:
        lines += [
            Line(
                "decode step",
                f"{d.max_num_seqs} sequences, {int(d.max_num_seqs * lengths.mean_resident):,} tokens of context",
                f"{plan.decode_step * 1000:.2f} ms",
            ),
            Line(
                "full step",
                f"the same, filled up to {d.max_num_batched_tokens} rows",
                f"{plan.full_step * 1000:.2f} ms",
            ),
        ]
    return lines


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
