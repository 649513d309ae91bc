"""How likely tokens were, by the model's own scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.scheduling.plan import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprob]:
    """Looks each row's token up, and the row's most likely ones.

    Args:
        logits: [S, vocab_size] float32; minus infinity has probability 0.
        token_ids: one for each row.
        num_tops: how many of the most likely tokens are wanted of each row; at most the vocabulary comes.

    Returns:
        One for each row. The logprobs of a row that is not finite are NaN.
    """
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logits > own).sum(-1) + 1
    most = min(max(num_tops, default=0), logits.shape[1])
    values, ids = logits.topk(most, dim=-1)
    logprobs = (own - total).squeeze(1).tolist()
    tops, top_ids = (values - total).tolist(), ids.tolist()
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(top_ids[row][:n], tops[row][:n], strict=True)))
        for row, (token, logprob, rank, n) in enumerate(zip(token_ids, logprobs, ranks.tolist(), num_tops, strict=True))
    ]
