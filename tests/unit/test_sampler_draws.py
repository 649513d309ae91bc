"""Sampling: what is kept, what is drawn, and that nothing but seed and position decides it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chairlift.execution import sampler
from chairlift.execution.sampler import NonFiniteLogitsError, sample
from chairlift.scheduling.sampling_params import SamplingParams

# Chi-square at which one correct run in a million would fail, by degrees of freedom.
CHI_SQUARE = {7: 41.0, 63: 131.0}
DRAWS = 40_000


def logits(rows: int = 1, vocab_size: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def repeat(row: Tensor, params: list[SamplingParams], positions: list[int]) -> Tensor:
    return torch.tensor(sample(row.expand(len(params), -1).contiguous(), params, positions))


def chi_square(drawn: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(drawn)
    counts = drawn.bincount(minlength=len(probabilities))
    assert not counts[expected == 0].any()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


def over_positions(row: Tensor, n: int = DRAWS, **params: float) -> Tensor:
    return repeat(row, [SamplingParams(seed=5, **params)] * n, list(range(n)))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row = logits()
    assert chi_square(over_positions(row, temperature=temperature), (row[0] / temperature).softmax(-1)) < CHI_SQUARE[7]


def test_draws_follow_the_softmax_over_seeds() -> None:
    row = logits()
    params = [SamplingParams(seed=seed) for seed in range(DRAWS)]
    assert chi_square(repeat(row, params, [9] * DRAWS), row[0].softmax(-1)) < CHI_SQUARE[7]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_neighbours_are_independent(along: str) -> None:
    row = logits()
    if along == "positions":
        drawn = over_positions(row)
    else:
        drawn = repeat(row, [SamplingParams(seed=seed) for seed in range(DRAWS)], [9] * DRAWS)
    pairs = drawn[:-1] * 8 + drawn[1:]
    p = row[0].softmax(-1)
    assert chi_square(pairs, (p[:, None] * p).flatten()) < CHI_SQUARE[63]


def test_seed_and_position_are_not_interchangeable() -> None:
    row = logits(vocab_size=1000)
    n = 200
    forward = repeat(row, [SamplingParams(seed=seed) for seed in range(n)], [7] * n)
    swapped = repeat(row, [SamplingParams(seed=7)] * n, list(range(n)))
    assert (forward == swapped).float().mean() < 0.1


def test_noise_is_gumbel_far_into_the_tail() -> None:
    keys = sampler._keys([SamplingParams(seed=s) for s in range(40)], range(40), torch.device("cpu"))
    noise = sampler.gumbel_noise(keys, torch.arange(50_000, dtype=torch.int32)).flatten()
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)
    for bound in (5.0, 8.0, 11.0):
        expected = len(noise) * -math.expm1(-math.exp(-bound))
        assert float((noise > bound).sum()) == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_no_hash_makes_infinite_noise() -> None:
    noise = sampler._gumbel(torch.tensor([0, 1, 0x7FFFFFFF, 0x7FFFFFFE, -1, -(2**31)], dtype=torch.int32))
    assert torch.isfinite(noise).all()
    assert noise[0] > noise[1] > 21
    assert noise[2] == noise.min() > -3


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_all_seeds(seed: int) -> None:
    params = SamplingParams(seed=seed)
    row = logits(vocab_size=1000)
    assert sample(row, [params], [3]) == sample(row, [params], [3])
    assert len(set(repeat(row, [params] * 50, list(range(50))).tolist())) > 10


def test_these_draws_never_change() -> None:
    # A change here changes every answer that a client has asked for with a seed.
    row = torch.arange(1000).float().div(300).sin()[None]
    drawn = [
        sample(row, [SamplingParams(seed=seed)], [p])[0] for seed, p in ((0, 0), (0, 1), (1, 0), (-1, 5), (2**63, 9))
    ]
    assert drawn == [363, 380, 264, 871, 843]


MIXED = [
    SamplingParams(temperature=0, seed=1),
    SamplingParams(seed=2),
    SamplingParams(seed=3, top_k=20),
    SamplingParams(seed=4, top_p=0.8),
    SamplingParams(seed=5, min_p=0.1, temperature=2.0),
    SamplingParams(seed=6, top_p=0.99, top_k=600, temperature=5.0),
    SamplingParams(seed=7, temperature=0.1),
    SamplingParams(seed=8, top_p=0.5, min_p=0.01),
]


@pytest.mark.parametrize("numbers", [1, 3000, 1 << 18])
def test_batch_mates_and_row_order_do_not_matter(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = logits(len(MIXED), 5000) * 2
    positions = list(range(10, 10 + len(MIXED)))
    alone = [sample(rows[i : i + 1], [p], [positions[i]])[0] for i, p in enumerate(MIXED)]
    monkeypatch.setitem(sampler.MAX_NUMBERS, "cpu", numbers)
    assert sample(rows, MIXED, positions) == alone
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    assert sample(rows[order], [MIXED[i] for i in order], [positions[i] for i in order]) == [alone[i] for i in order]


def test_how_many_candidates_are_looked_at_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = logits(len(MIXED), 5000) * 2
    expected = sample(rows, MIXED, list(range(8)))
    for candidates in ((), (1,), (2, 30), (5000,), (9000,)):
        monkeypatch.setattr(sampler, "CANDIDATES", candidates)
        assert sample(rows, MIXED, list(range(8))) == expected


def test_restrictions_do_not_change_the_noise() -> None:
    # A token that is drawn from all tokens is drawn again as long as the restriction keeps it.
    row = logits(vocab_size=50)
    free = over_positions(row, 300)
    kept = row[0].topk(10).indices
    restricted = over_positions(row, 300, top_k=10)
    stays = torch.isin(free, kept)
    assert 0.2 < stays.float().mean() < 0.95
    assert torch.equal(free[stays], restricted[stays])


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -math.inf], [-math.inf, -5.0, -math.inf]])
    assert sample(rows, [SamplingParams(temperature=0)] * 3, [0, 0, 0]) == [1, 0, 1]


def test_greedy_rows_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "gumbel_noise", None)
    assert sample(logits(2), [SamplingParams(temperature=0)] * 2, [0, 0]) == logits(2).argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-4])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    rows = logits(20, 100) * 1000
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(20)]
    assert sample(rows, params, [0] * 20) == rows.argmax(-1).tolist()


def support(row: Tensor, **params: float) -> set[int]:
    """All tokens that can be drawn, at a temperature that makes them nearly even, and with the logits to match."""
    heat = 4.0
    return set(over_positions(row * heat, 4000, temperature=heat, **params).tolist())


ROW = torch.tensor([[0.40, 0.05, 0.25, 0.10, 0.20]]).log()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 500}, {0, 1, 2, 3, 4}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 1e-300}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 2}),
        ({"top_p": 0.66}, {0, 2, 4}),
        ({"top_p": 0.9499}, {0, 2, 3, 4}),
        ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.49}, {0, 2, 4}),
        ({"min_p": 0.24}, {0, 2, 3, 4}),
        # top_p is a share of what min_p and top_k leave: of 0.85, the first holds 47 % and the first two 76 %.
        ({"top_p": 0.5, "top_k": 3}, {0, 2}),
        ({"top_p": 0.46, "top_k": 3}, {0}),
        ({"top_p": 0.77, "min_p": 0.3}, {0, 2, 4}),
        ({"top_p": 0.76, "min_p": 0.3}, {0, 2}),
    ],
)
def test_restrictions(params: dict[str, float], kept: set[int]) -> None:
    assert support(ROW, **params) == kept


def test_restrictions_come_after_temperature() -> None:
    # At temperature 2 the first token has 30 %, not 40 %.
    drawn = over_positions(ROW, 2000, temperature=2.0, top_p=0.35)
    assert set(drawn.tolist()) == {0, 2}


def test_restricted_draws_follow_what_is_left() -> None:
    row = logits()
    kept = row[0].topk(4)
    expected = torch.zeros(8)
    expected[kept.indices] = kept.values.softmax(-1)
    assert chi_square(over_positions(row, top_k=4), expected) < CHI_SQUARE[7]


def test_ties_with_the_last_one_kept_are_kept() -> None:
    row = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.0]])
    assert support(row, top_k=2) == {0, 1, 2, 3}
    assert support(row, top_p=0.5) == {0, 1, 2, 3}


def test_wide_top_p_needs_the_whole_vocabulary() -> None:
    row = torch.zeros(1, 6000)
    drawn = over_positions(row, 300, top_p=0.999)
    assert len(set(drawn.tolist())) > 250


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_name_their_rows(bad: float, temperature: float) -> None:
    rows = logits(4)
    rows[1, 3] = bad
    rows[3, 0] = bad
    with pytest.raises(NonFiniteLogitsError, match=r"rows \[1, 3\] are not finite") as caught:
        sample(rows, [SamplingParams(temperature=temperature, seed=0)] * 4, [0] * 4)
    assert caught.value.rows == [1, 3]


def test_a_row_that_forbids_everything_is_unusable() -> None:
    with pytest.raises(NonFiniteLogitsError):
        sample(torch.full((1, 4), -math.inf), [SamplingParams(seed=0)], [0])


def test_a_missing_seed_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(logits(), [SamplingParams()], [0])


@pytest.mark.parametrize("top_k", [2**31, 2**63, 10**30])
def test_a_top_k_that_no_tensor_can_hold_keeps_all(top_k: int) -> None:
    scores = logits(vocab_size=600)
    for seed in range(20):
        params = [SamplingParams(top_k=top_k, seed=seed)]
        assert sample(scores, params, [3]) == sample(scores, [SamplingParams(seed=seed)], [3])
