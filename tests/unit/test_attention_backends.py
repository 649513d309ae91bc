"""Every attention backend against the reference, and the reference against torch's own attention."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numba import njit
from support.paged_batch import Heads, PagedBatch, paged_batch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chairlift.config import ConfigError
from chairlift.model.attention.base import AttentionBackend, KVLayout, LayerKV, LayerKVs, kv_width
from chairlift.model.attention.cpu import CpuAttention, tiles_fit
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.attention.select import select_backend
from chairlift.model.kernels import kinds, tiles

MIXED = [(1, 1), (1, 17), (5, 5), (40, 200), (1, 64), (3, 129), (1, 300)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread, unless a test asks for more: where other processes use the cores, two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(tensor: Tensor) -> Tensor:
    """Bits compare equal where numbers would not: NaN, and zeros of either sign."""
    return tensor.view({torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.int8}[tensor.dtype])


def assert_conforms(
    kind: type[AttentionBackend[Any]], heads: Heads, chunks: list[tuple[int, int]], window: int | None = None
) -> None:
    batch = paged_batch(heads, chunks)
    expected, expected_kv = batch.run(heads.backend(ReferenceAttention), window)
    output, kv = batch.run(heads.backend(kind), window)
    assert output.dtype == heads.dtype
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(output, expected, atol=TOLERANCE[heads.dtype], rtol=TOLERANCE[heads.dtype])
    for tensor, other in zip(kv.tensors, expected_kv.tensors, strict=True):
        assert torch.equal(bits(tensor.reshape(other.shape)), bits(other))


def contiguous(batch: PagedBatch, kv: LayerKV, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence's rows of the query, and all its keys and values, as [heads, tokens, dim]."""
    first, last = batch.layout.query_start[sequence : sequence + 2].tolist()
    length = int(batch.layout.seq_lens[sequence])
    keys, values = [], []
    for position in range(length):
        block = int(batch.layout.block_tables[sequence, position // kv.block_size])
        keys.append(kv.key[block, :, position % kv.block_size])
        values.append(kv.value[block, :, position % kv.block_size, 0])
    return batch.query[first:last].transpose(0, 1), torch.stack(keys, 1), torch.stack(values, 1)


@pytest.mark.parametrize("window", [None, 1, 20])
def test_reference_is_plain_causal_attention(window: int | None) -> None:
    batch = paged_batch(Heads(head_dim=16, block_size=4), MIXED)
    output, kv = batch.run(Heads(head_dim=16, block_size=4).backend(ReferenceAttention), window)
    for i, (rows, length) in enumerate(MIXED):
        query, keys, values = contiguous(batch, kv, i)
        age = torch.arange(length - rows, length)[:, None] - torch.arange(length)
        seen = (age >= 0) & (age < (window or length))
        expected = scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        first, last = batch.layout.query_start[i : i + 2].tolist()
        torch.testing.assert_close(output[first:last], expected.transpose(0, 1), atol=2e-6, rtol=2e-6)


def test_reference_takes_long_chunks_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch(Heads(), MIXED)
    whole, _ = batch.run(Heads().backend(ReferenceAttention), 30)
    monkeypatch.setattr("chairlift.model.attention.reference.MAX_SCORES", 6 * 200 * 3)
    tiled, _ = batch.run(Heads().backend(ReferenceAttention), 30)
    torch.testing.assert_close(tiled, whole)


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("head_dim", [32, 96])
def test_one_key_value_head_of_odd_width(head_dim: int, int8_cache: bool) -> None:
    """As a rank may have, and tiles that its keys do not fill."""
    heads = Heads(5, 1, head_dim, dtype=torch.bfloat16, int8_cache=int8_cache)
    assert_conforms(CpuAttention, heads, MIXED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("ratio", [1, 3, 7, 8])
def test_heads(ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(num_heads=2 * ratio, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    assert_conforms(CpuAttention, heads, MIXED)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 70, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 128])
def test_blocks_and_windows(block_size: int, window: int | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_conforms(CpuAttention, Heads(head_dim=16, block_size=block_size, dtype=dtype), MIXED, window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_caches(dtype: torch.dtype, block_size: int, window: int | None) -> None:
    heads = Heads(block_size=block_size, dtype=dtype, int8_cache=True)
    assert_conforms(CpuAttention, heads, MIXED, window)
    torch.set_num_threads(2)
    assert_conforms(CpuAttention, heads, [(1, 1100)], window)


@pytest.mark.parametrize("kind", [ReferenceAttention, CpuAttention])
def test_an_int8_cache_is_near_the_exact_one(kind: type[AttentionBackend[Any]]) -> None:
    exact, near = (paged_batch(Heads(int8_cache=int8), [(40, 90), (1, 200)]) for int8 in (False, True))
    expected, _ = exact.run(Heads().backend(kind))
    output, kv = near.run(Heads().backend(kind))
    assert kv.key.dtype == torch.int8
    difference = (output - expected).norm() / expected.norm()
    assert 0 < difference < 0.01


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("chunks", [[(1, 3000)], [(1, 2500), (9, 9), (100, 1100)]])
def test_long_contexts_are_cut_and_merged(chunks: list[tuple[int, int]], window: int | None, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_conforms(CpuAttention, Heads(num_heads=3, num_kv_heads=1, head_dim=32), chunks, window)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 300, 700])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 64), (256, 16)])
@pytest.mark.parametrize("int8_cache", [False, True])
def test_few_rows_of_long_contexts(
    int8_cache: bool, head_dim: int, block_size: int, window: int | None, threads: int
) -> None:
    """Over many spans, cut into items and whole; with spans of which the first rows see nothing."""
    torch.set_num_threads(threads)
    heads = Heads(3, 1, head_dim, block_size, torch.bfloat16, int8_cache)
    assert_conforms(CpuAttention, heads, [(1, 3000), (2, 2500), (2, 257), (1, 256), (1, 16)], window)
    alone = Heads(8, 8, head_dim, block_size, torch.bfloat16, int8_cache)
    assert_conforms(CpuAttention, alone, [(8, 1030), (8, 260)], window)


def few_rows(heads: Heads, chunks: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The same step in float32 vectors and in tiles, whose outputs stay float32."""
    batch = paged_batch(heads, chunks)
    vectors, in_tiles = heads.backend(CpuAttention), heads.backend(CpuAttention)
    assert isinstance(in_tiles, CpuAttention)
    in_tiles.kind = kinds.BFloat16Tiles()
    return batch.run(vectors)[0], batch.run(in_tiles)[0]


@pytest.mark.skipif(not tiles.available(), reason="this processor attends in vectors alone")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_int8_products_have_sixteen_bits(ratio: int, rows: int) -> None:
    """With eight, of queries or of weights, the difference would be some 0.004."""
    heads = Heads(num_heads=2 * ratio, num_kv_heads=2, int8_cache=True)
    expected, output = few_rows(heads, [(rows, 40), (rows, 300), (rows, 1100)])
    assert 0 < (output - expected).norm() / expected.norm() < 1e-4


@pytest.mark.skipif(not tiles.available(), reason="this processor attends in vectors alone")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_the_largest_int8_sums_fit(head_dim: int, sign: int) -> None:
    """256 tokens of equal weight, all numbers as large as int8 has them: the average is each of them."""
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=head_dim, int8_cache=True)
    batch = paged_batch(heads, [(1, 256)])
    for tensor in (batch.query, batch.key, batch.value):
        tensor[:] = 1.27
    batch.value.mul_(sign)
    batch.kv.key[:], batch.kv.value[:] = 127, 127 * sign
    for scales in batch.kv.tensors[2:]:
        scales[:] = 0.01
    backend = heads.backend(CpuAttention)
    assert isinstance(backend, CpuAttention)
    backend.kind = kinds.BFloat16Tiles()
    output, _ = batch.run(backend)
    torch.testing.assert_close(output, torch.full_like(output, 1.27 * sign), rtol=2e-5, atol=0)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    pick = random.Random(seed)
    torch.set_num_threads(1 + seed % 2)
    heads = Heads(
        num_heads=pick.choice([2, 4, 6, 8, 10]),
        num_kv_heads=2,
        head_dim=pick.choice([16, 32, 48, 64]),
        block_size=pick.choice([2, 8, 16, 64]),
        dtype=pick.choice([torch.float32, torch.bfloat16]),
    )
    chunks = []
    for _ in range(pick.randint(1, 20)):
        rows = pick.choice([1, 1, 1, pick.randint(1, 90)])
        chunks.append((rows, rows + pick.choice([0, pick.randint(0, 400)])))
    assert_conforms(CpuAttention, heads, chunks, pick.choice([None, pick.randint(1, 300)]))


def test_a_prompt_in_chunks_is_the_prompt_at_once() -> None:
    heads = Heads(head_dim=32)
    batch = paged_batch(heads, [(150, 150)])
    backend = heads.backend(CpuAttention)
    whole, whole_kv = batch.run(backend)
    kv = batch.kv_for(backend.kv_layout(heads.dtype))
    parts = []
    for first, last in ((0, 1), (1, 70), (70, 149), (149, 150)):
        layout = dataclasses.replace(
            batch.layout,
            query_start=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            slot_mapping=batch.layout.slot_mapping[first:last],
        )
        rows = slice(first, last)
        parts.append(
            backend.forward(batch.query[rows], batch.key[rows], batch.value[rows], kv, backend.prepare(layout))
        )
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-6, rtol=2e-6)
    assert torch.equal(bits(kv.key), bits(whole_kv.key))


@pytest.mark.parametrize("kind", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [4, 13])
def test_nan_reaches_only_its_own_sequence(
    kind: type[AttentionBackend[Any]], poisoned: str, int8: bool, dtype: torch.dtype, length: int
) -> None:
    heads = Heads(int8_cache=int8, dtype=dtype)
    batch = paged_batch(heads, [(length, 41), (1, 90)])
    getattr(batch, poisoned)[length] = float("nan")
    output, _ = batch.run(heads.backend(kind))
    assert torch.isfinite(output[:length]).all()
    assert output[length].isnan().all()


@pytest.mark.skipif(not tiles.available(), reason="this processor has no tiles")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, 70])
@pytest.mark.parametrize("num_heads", [3, 9, 80])
def test_tiles_attend_as_vectors_do(num_heads: int, window: int | None, int8: bool) -> None:
    """Over prompts and chunks of all remainders, and more heads to a key than a block of rows has room for."""
    kv_heads = num_heads // 3 if num_heads < 80 else 2
    heads = Heads(num_heads=num_heads, num_kv_heads=kv_heads, int8_cache=int8, dtype=torch.bfloat16)
    batch = paged_batch(heads, [(3, 3), (16, 17), (31, 95), (33, 96), (70, 70), (9, 209)])
    in_tiles, in_vectors = heads.backend(CpuAttention), heads.backend(CpuAttention)
    assert isinstance(in_tiles, CpuAttention)
    assert isinstance(in_vectors, CpuAttention)
    assert isinstance(in_tiles.kind, kinds.BFloat16Tiles)
    in_vectors.kind = kinds.Float32()
    output, _ = batch.run(in_tiles, window)
    expected, _ = batch.run(in_vectors, window)
    torch.testing.assert_close(output, expected, atol=1.6e-2, rtol=1.6e-2)
    assert window == 1 or not torch.equal(output, expected)  # two ways indeed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_every_number_of_a_cache_has_a_place_of_its_own(dtype: torch.dtype, by_token: bool, turns: int) -> None:
    blocks, heads, block_size, dim = 3, 2, 8, 16
    numbers = torch.zeros(2, blocks, heads, kv_width(block_size, dim, dtype), dtype=dtype)
    caches = LayerKVs(KVLayout(by_token, turns), numbers, block_size)
    for layer in caches:
        assert layer.block_size == block_size
        assert layer.key.shape == (blocks, heads, block_size, dim)
        assert layer.value.shape == (blocks, heads, block_size // turns, turns, dim)
        assert all(scale.shape == (blocks, heads, block_size) for scale in layer.tensors[2:])
        assert len(layer.tensors) == (4 if dtype == torch.int8 else 2)
    for tensor in (tensor for layer in caches for tensor in layer.tensors):
        assert not tensor.any()  # what was written elsewhere is not here
        tensor.copy_(torch.arange(tensor.numel()).remainder(100).add(1).view(tensor.shape))
    for tensor in (tensor for layer in caches for tensor in layer.tensors):
        assert torch.equal(tensor.reshape(-1).long(), torch.arange(tensor.numel()).remainder(100).add(1))


@pytest.mark.parametrize("int8_cache", [False, True])
def test_a_token_is_written_beside_others(int8_cache: bool) -> None:
    """Threads write tokens of one word at once, so neither may touch the other's numbers."""
    heads = Heads(dtype=torch.bfloat16, int8_cache=int8_cache)
    batch = paged_batch(heads, [(1, 19)])
    backend = heads.backend(CpuAttention)
    before = batch.kv_for(backend.kv_layout(batch.kv.key.dtype))
    _, after = batch.run(backend)
    slot = int(batch.layout.slot_mapping[0])
    for was, now in zip(before.tensors[:2], after.tensors[:2], strict=True):
        rows, tokens = (t.flatten(2, -2).transpose(1, 2).flatten(0, 1) for t in (was, now))
        changed = (bits(rows) != bits(tokens)).flatten(1).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [slot]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cache_that_lies_otherwise_is_refused(dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype)
    batch, backend = paged_batch(heads, [(1, 20)]), heads.backend(CpuAttention)
    wanted = backend.kv_layout(dtype)
    for layout in (KVLayout(not wanted.keys_by_token, wanted.values_in_turns), KVLayout(wanted.keys_by_token, 4)):
        with pytest.raises(ValueError, match="this backend reads blocks of 16"):
            backend.forward(batch.query, batch.key, batch.value, batch.kv_for(layout), backend.prepare(batch.layout))
    other = dataclasses.replace(heads, block_size=32).backend(CpuAttention)
    with pytest.raises(ValueError, match="this backend reads blocks of 32"):
        other.forward(batch.query, batch.key, batch.value, batch.kv_for(wanted), other.prepare(batch.layout))


@pytest.mark.skipif(not tiles.available(), reason="this processor has no tiles")
@pytest.mark.parametrize("chunks", [[(1, 20)], [(40, 40)], [(1, 20), (40, 40), (2, 30)]])
def test_tiles_are_configured_as_before_afterwards(chunks: list[tuple[int, int]]) -> None:
    """Other libraries of the process rely on it; items of few rows and of many have configurations of their own."""
    configure, keep, own = tiles.configure, tiles.keep_configuration, tiles.full_tiles()
    own[48:56] = 5

    @njit
    def take(config: Any) -> None:
        configure(config)

    @njit
    def read(config: Any) -> None:
        keep(config)

    heads = Heads(dtype=torch.bfloat16)
    batch, backend, after = paged_batch(heads, chunks), heads.backend(CpuAttention), tiles.full_tiles()
    take(own)
    batch.run(backend)
    read(after)
    assert after.tolist() == own.tolist()


def test_blocks_shorter_than_a_tile_are_attended_to_in_vectors() -> None:
    assert not tiles_fit(8, 64)
    assert not tiles_fit(16, 80)
    assert tiles_fit(16, 96)


@pytest.mark.parametrize("kind", [ReferenceAttention, CpuAttention])
def test_large_scores_do_not_overflow(kind: type[AttentionBackend[Any]]) -> None:
    batch = paged_batch(Heads(), [(1, 100), (70, 70)])
    batch.query.mul_(1e4)
    output, _ = batch.run(Heads().backend(kind))
    assert torch.isfinite(output).all()


def test_rows_whose_heads_lie_apart_are_refused() -> None:
    batch = paged_batch(Heads(), [(5, 5)])
    apart = dataclasses.replace(batch, query=batch.query.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="side by side"):
        apart.run(Heads().backend(CpuAttention))


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        Heads(num_kv_heads=4).backend(ReferenceAttention)


SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "block_size": 16}


@pytest.mark.parametrize(
    ("name", "device", "head_dim", "dtype", "chosen"),
    [
        ("auto", "cpu", 64, torch.float32, "cpu"),
        ("auto", "cpu", 64, torch.bfloat16, "cpu"),
        ("auto", "cpu", 64, torch.float16, "reference"),
        ("auto", "cpu", 24, torch.float32, "reference"),
        ("auto", "cuda", 64, torch.bfloat16, "reference"),
        ("cpu", "cpu", 64, torch.bfloat16, "cpu"),
        ("reference", "cpu", 64, torch.bfloat16, "reference"),
    ],
)
def test_select(name: str, device: str, head_dim: int, dtype: torch.dtype, chosen: str) -> None:
    assert select_backend(name, torch.device(device), head_dim=head_dim, dtype=dtype, **SIZES).name == chosen


@pytest.mark.parametrize(
    ("name", "device", "head_dim", "dtype", "message"),
    [
        ("flash", "cpu", 64, torch.float32, "must be auto, reference or cpu; got 'flash'"),
        ("cpu", "cuda", 64, torch.float32, "runs on the CPU, not on cuda"),
        ("cpu", "cpu", 64, torch.float16, "float32 and bfloat16, not float16; use --attention-backend reference"),
        ("cpu", "cpu", 24, torch.float32, "multiple of 16, not 24; use --attention-backend reference"),
    ],
)
def test_select_refuses(name: str, device: str, head_dim: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_backend(name, torch.device(device), head_dim=head_dim, dtype=dtype, **SIZES)
