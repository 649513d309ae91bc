"""From logits to tokens, with no hidden state.

A token is drawn by the Gumbel-max trick: the largest of logit / temperature + noise is distributed as the softmax. The
noise is a hash of (seed, position, token id), so neither batch mates nor preemption nor the order of rows can change
what is drawn. Restrictions apply in vLLM's order: temperature, then min_p, top_k, top_p. They cut by value, so tokens
that tie with the last one kept are kept too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.scheduling.sampling_params import SamplingParams

# How many of the most likely tokens to look at where top_k or top_p restricts the choice: few at first, more for the
# rows that need them. The whole vocabulary comes last, since it takes long to sort.
CANDIDATES = (256, 4096)
# A temperature below this cannot be told from greedy in float32.
MIN_TEMPERATURE = 1e-5
# Above any sum of probabilities, whatever the rounding.
NO_TOP_P = 2.0

# Rows are sampled a few at a time, so that what is computed on the way stays in the CPU's caches, and small elsewhere.
MAX_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}

_MASK_64 = (1 << 64) - 1


class NonFiniteLogitsError(RuntimeError):
    """The model's scores of these rows hold NaN, or infinity as their largest: nothing can be sampled."""

    def __init__(self, rows: Sequence[int], of: str) -> None:
        super().__init__(f"the logits of {of} are not finite: the model's weights or its precision are at fault")
        self.rows = rows


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Chooses one token for each row.

    Args:
        logits: [S, vocab_size] float32. Minus infinity forbids a token.
        params: how to choose, for each row; the seed of a row that is not greedy must be set.
        positions: the position of each token that is sampled.

    Raises:
        NonFiniteLogitsError: some row's logits are unusable.
    """
    # NaN counts as the largest, so the peak alone tells.
    peaks, best = logits.max(dim=-1, keepdim=True)
    if not bool(peaks.isfinite().all()):
        bad = (~peaks.isfinite()).flatten().nonzero().flatten().tolist()
        raise NonFiniteLogitsError(bad, f"rows {bad}")
    tokens: list[int] = best.flatten().tolist()
    size = max(1, MAX_NUMBERS[logits.device.type] // logits.shape[1])
    for restricted in (False, True):
        rows = [i for i, p in enumerate(params) if not p.greedy and _restricted(p) == restricted]
        for part in (rows[i : i + size] for i in range(0, len(rows), size)):
            chosen = [params[i] for i in part]
            scaled = _scale(logits[part], peaks[part], chosen)
            keys = _keys(chosen, [positions[i] for i in part], logits.device)
            drawn = _draw_restricted(scaled, keys, chosen) if restricted else _draw(scaled, keys)
            for i, token in zip(part, drawn.tolist(), strict=True):
                tokens[i] = token
    return tokens


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, the same on every device up to the rounding of the logarithm.

    The hash mixes in 32-bit arithmetic that wraps around (multipliers of Wellons' "lowbias32"), the two halves of the
    key before and between its rounds.

    Args:
        keys: [S, 2] int32, from :func:`_keys`.
        token_ids: int32, [vocab_size] or [S, n].

    Returns:
        [S, vocab_size] or [S, n].
    """
    x = token_ids * _signed_32(0x9E3779B9) + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x += keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed_32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return _gumbel(x)


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from evenly distributed int32."""
    # 31 bits make a number in (0, 1), finest near 0, where the rare large noise comes from; never quite 1.
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_((1 - 2**-23) / 2**31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _scale(logits: Tensor, peaks: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, relative to their peak; minus infinity for what min_p drops. Same shape."""
    temperature = _column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits.device)
    # The peak goes first: dividing by a small temperature would otherwise overflow.
    scaled = (logits - peaks).div_(temperature)
    return scaled.masked_fill_(scaled < _column([_log(p.min_p) for p in params], logits.device), -math.inf)


def _draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draws from the whole vocabulary: [S, vocab_size] to [S]."""
    every = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return (gumbel_noise(keys, every) + scaled).argmax(dim=-1)


def _draw_restricted(scaled: Tensor, keys: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Draws from the tokens that top_k and top_p leave: [S, vocab_size] to [S]."""
    vocab_size = scaled.shape[1]
    # Clients may send any whole number, and a tensor cannot hold them all.
    limits = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    top_k = torch.tensor(limits, device=scaled.device)[:, None]
    top_p = _column([p.top_p if p.top_p < 1 else NO_TOP_P for p in params], scaled.device)
    tokens = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for size in sorted({min(n, vocab_size) for n in (*CANDIDATES, vocab_size)}):
        rows = scaled[open_rows]
        values, ids = rows.topk(size, dim=-1)
        kept = _restrict(values, rows, top_k[open_rows], top_p[open_rows])
        noisy = gumbel_noise(keys[open_rows], ids.int()) + kept
        tokens[open_rows] = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
        # Where the last candidate is kept, others behind it may have to be; and top_p is a share of all top_k tokens.
        reach = top_k[open_rows, 0]
        open_rows = open_rows[kept[:, -1].isfinite() | ((reach > size) & (reach < vocab_size))]
        if not len(open_rows):
            break
    return tokens


def _restrict(values: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Puts minus infinity in place of the candidates that top_k and top_p drop.

    Args:
        values: [S, n], the largest of each row, in falling order.
        rows: [S, vocab_size], the whole rows.
        top_k, top_p: [S, 1]; ``vocab_size`` and a number above 1 for none.
    """
    last = values.gather(1, (top_k - 1).clamp(max=values.shape[1] - 1))
    values = values.masked_fill(values < last, -math.inf)
    weights = values.exp()
    # Without top_k, the probabilities are shares of all tokens, not only of the candidates.
    whole = torch.where(top_k < rows.shape[1], weights.sum(-1, keepdim=True), rows.exp().sum(-1, keepdim=True))
    before = weights.cumsum(-1) - weights
    inside = before < top_p * whole
    inside[:, 0] = True
    smallest = values.masked_fill(~inside, math.inf).amin(-1, keepdim=True)
    return values.masked_fill(values < smallest, -math.inf)


def _restricted(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _keys(params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device) -> Tensor:
    """[S, 2] int32: 64 bits for each row, hashed from its seed and position."""
    keys = []
    for p, position in zip(params, positions, strict=True):
        if p.seed is None:
            raise ValueError("the seed of a sampled sequence must be set before it gets here")
        key = _mix_64(_mix_64(p.seed & _MASK_64) + position)
        keys.append((_signed_32(key >> 32), _signed_32(key & 0xFFFFFFFF)))
    return torch.tensor(keys, dtype=torch.int32, device=device)


def _mix_64(x: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    return x ^ (x >> 31)


def _signed_32(x: int) -> int:
    """The int32 with these bits."""
    return x - (1 << 32) if x >> 31 else x


def _column(numbers: list[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None]


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
