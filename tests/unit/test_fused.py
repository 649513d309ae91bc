"""Fused steps against the plain model, and the products they are made of against NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numba import njit
from support.model_driver import Generation, generate
from support.random_model import SIZES, cpu_attention, load, one_thread, random_model

from chairlift.config import ConfigError
from chairlift.execution.kv_store import KVStore
from chairlift.execution.sampler import NonFiniteLogitsError, sample
from chairlift.model.attention.base import BatchLayout, KVLayout, LayerKVs, kv_width
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.fused import FusedCausalLM, unsupported
from chairlift.model.kernels import kinds, products, tiles
from chairlift.model.kernels.memory import for_threads
from chairlift.model.llama import CausalLM
from chairlift.model.registry import fit_to_cpu
from chairlift.model.rope import make_rotary_embedding
from chairlift.scheduling.sampling_params import SamplingParams

NUM_TOKENS = 6
# Chunks of 40 and more fill blocks of 32 rows and leave some over; steps mix them with decoding rows.
PROMPTS = [list(range(1, 4)), [(7 * i) % 90 for i in range(75)], [(3 * i) % 90 for i in range(130)]]
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied-mha": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-dynamic": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64},
    ),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 21}),
    "qwen2-two-windows": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def saved(directory: Path, family: str = "llama", **more: Any) -> Path:
    kind, changes = FAMILIES[family]
    random_model(kind(**SIZES | changes | more)).save_pretrained(directory)
    return directory


def fused_run(
    model: CausalLM,
    quantization: str | None = None,
    *,
    num_tokens: int = NUM_TOKENS,
    chunk: int = 44,
    block_size: int = 16,
    int8_cache: bool = False,
) -> list[Generation]:
    attention = cpu_attention(model, block_size)
    fused = FusedCausalLM(model, attention, quantization)
    sizes = {"chunk": chunk, "block_size": block_size}
    return generate(fused, PROMPTS, num_tokens, **sizes, attention=attention, int8_cache=int8_cache)


def differences(runs: list[Generation], expected: list[Generation], token: int = 0) -> list[float]:
    """Of the logits of one token of each sequence, as shares of them."""
    wanted = [run.logits[token] for run in expected]
    return [
        float((run.logits[token] - logits).norm() / logits.norm()) for run, logits in zip(runs, wanted, strict=True)
    ]


def assert_same(runs: list[Generation], expected: list[Generation]) -> None:
    for run, plain in zip(runs, expected, strict=True):
        assert run.tokens == plain.tokens
        torch.testing.assert_close(torch.stack(run.logits), torch.stack(plain.logits), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_the_plain_model(family: str, tmp_path: Path) -> None:
    directory = saved(tmp_path, family)
    expected = generate(load(directory), PROMPTS, NUM_TOKENS, chunk=44, block_size=16)
    assert_same(fused_run(load(directory)), expected)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("chunk", "block_size"), [(130, 16), (5, 8), (1, 32)])
def test_threads_chunks_and_blocks_change_nothing(threads: int, chunk: int, block_size: int, tmp_path: Path) -> None:
    directory = saved(tmp_path)
    expected = generate(load(directory), PROMPTS, NUM_TOKENS, chunk=44, block_size=16)
    torch.set_num_threads(threads)
    assert_same(fused_run(load(directory), chunk=chunk, block_size=block_size), expected)


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize(("dtype", "quantization", "bound"), [("bfloat16", None, 0.06), ("float32", "int8", 0.08)])
def test_lower_precision_stays_near(
    dtype: str, quantization: str | None, bound: float, int8_cache: bool, tmp_path: Path
) -> None:
    directory = saved(tmp_path)
    kind: torch.dtype = getattr(torch, dtype)
    model = load(directory, kind)
    if reason := unsupported(model.config, kind, quantization):
        pytest.skip(reason)
    exact = generate(load(directory), PROMPTS, 1, chunk=44, block_size=16)
    near = fused_run(model, quantization, num_tokens=1, int8_cache=int8_cache)
    for difference in differences(near, exact):
        assert 0 < difference < bound  # not 0: it was really computed otherwise


@pytest.mark.parametrize("chunk", [44, 5])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_an_int8_cache_as_the_plain_model_fills_and_reads_it(family: str, chunk: int, tmp_path: Path) -> None:
    """Both round the same numbers, but for the few that another order of sums pushes over an edge."""
    model = load(saved(tmp_path, family))
    exact = generate(model, PROMPTS, 1, chunk=chunk, block_size=16)
    plain = generate(model, PROMPTS, NUM_TOKENS, chunk=chunk, block_size=16, int8_cache=True)
    fused = fused_run(model, chunk=chunk, int8_cache=True)
    assert [run.tokens for run in fused] == [run.tokens for run in plain]
    assert max(max(differences(fused, plain, token)) for token in range(NUM_TOKENS)) < 1e-3
    assert min(differences(plain, exact)) > 4e-3  # what an int8 cache costs is far more than that


TWO_KINDS = """
import sys
import torch
from test_fused import PROMPTS, Path, fused_run, load
torch.set_num_threads(1)
for dtype in sys.argv[2:]:
    runs = fused_run(load(Path(sys.argv[1]), getattr(torch, dtype)))
    print([run.tokens[len(prompt)] for prompt, run in zip(PROMPTS, runs)])
"""


def test_code_from_the_cache_of_one_precision_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    """Processes that compiled one each leave them both to a third, which has to tell them apart by their names."""
    saved(tmp_path)

    def lines(*dtypes: str) -> list[str]:
        path = [str(Path(__file__).parent), *sys.path]
        program = f"import sys; sys.path[:] = {path!r}\n{TWO_KINDS}"
        command = [sys.executable, "-c", program, str(tmp_path), *dtypes]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, (result.returncode, result.stderr)
        return result.stdout.splitlines()

    if reason := products.unsupported("bfloat16"):
        pytest.skip(reason)
    apart = [*lines("bfloat16"), *lines("float32")]
    assert lines("bfloat16", "float32") == apart
    assert lines("float32", "bfloat16") == apart[::-1]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_scores_of_any_rows_as_those_of_a_step(quantization: str | None, tmp_path: Path) -> None:
    """Logprobs of a prompt are looked up behind its step, from the residual stream that it left."""
    model = load(saved(tmp_path))
    if reason := unsupported(model.config, torch.float32, quantization):
        pytest.skip(reason)
    attention = cpu_attention(model)
    fused = FusedCausalLM(model, attention, quantization)
    seen: list[torch.Tensor] = []

    class Watched:
        config, embedding = fused.config, fused.embedding

        def __call__(self, *arguments: Any) -> Any:
            output = fused(*arguments)
            hidden = output.hidden
            rows = arguments[-1]
            logits = output.logits.clone()
            seen.append(logits)
            assert output.best == best_by_sampling(logits)
            torch.testing.assert_close(fused.logits(hidden[rows]), logits, rtol=0, atol=0)
            torch.testing.assert_close(fused.logits(hidden)[rows], logits, rtol=0, atol=0)
            return output

    generate(Watched(), PROMPTS, 2, chunk=44, block_size=16, attention=attention)  # type: ignore[arg-type]
    assert len(seen) > 1


def test_rows_beside_a_row_do_not_change_it(tmp_path: Path) -> None:
    """Stale rows of the buffers, and what fills blocks up, are nobody's business."""
    model = load(saved(tmp_path))
    attention = cpu_attention(model)
    fused = FusedCausalLM(model, attention)
    together = generate(fused, PROMPTS, NUM_TOKENS, chunk=44, block_size=16, attention=attention)
    for prompt, run in zip(PROMPTS, together, strict=True):
        [alone] = generate(fused, [prompt], NUM_TOKENS, chunk=44, block_size=16, attention=attention)
        assert alone.tokens == run.tokens


def one_token_each(rows: int, block_size: int = 16) -> BatchLayout:
    """As many sequences of one token, each in a block of its own."""
    return BatchLayout(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.ones(rows, dtype=torch.int32),
        block_tables=torch.arange(rows, dtype=torch.int32)[:, None],
        slot_mapping=torch.arange(rows) * block_size,
        max_query_len=1,
        max_seq_len=1,
    )


def best_by_sampling(logits: torch.Tensor) -> list[int]:
    """Each row's greedy token, by the code that reads all logits; -1 where it refuses."""
    tokens = []
    for row in logits:
        try:
            tokens += sample(row[None], [SamplingParams(temperature=0)], [0])
        except NonFiniteLogitsError:
            tokens.append(-1)
    return tokens


VOCAB = SIZES["vocab_size"]  # the last block of the head has a single column, and what fills it up makes zeros
HUGE = 2e39  # so that the sum of a row's products is infinite, and the weights are not
# Logits of the first row, small where no number is given, and its best token. Other rows have multiples, some negative.
LOGITS: dict[str, tuple[dict[int, float], int]] = {
    "the last": ({VOCAB - 1: 5}, VOCAB - 1),
    "ties in one vector": ({70: 5, 65: 5, 79: 5}, 65),
    "ties in two vectors": ({41: 5, 60: 5}, 41),
    "ties in two blocks": ({70: 5, 33: 5}, 33),
    "all below what fills the block up": ({token: -1 - (token - 50) ** 2 / 100 for token in range(VOCAB)}, 50),
    "all the same": (dict.fromkeys(range(VOCAB), 1.5), 0),
    "NaN before a large one": ({3: float("nan"), 77: 9}, -1),
    "NaN behind a large one": ({3: 9, VOCAB - 1: float("nan")}, -1),
    "infinity": ({45: HUGE}, -1),
    "minus infinity beside others": ({45: -HUGE, 46: 1}, 46),
    "nothing but minus infinity": (dict.fromkeys(range(VOCAB), -HUGE), -1),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", LOGITS)
def test_the_best_token_of_each_row_is_what_sampling_finds(case: str, threads: int, tmp_path: Path) -> None:
    model, rows = load(saved(tmp_path)), 40  # more than a block
    shape = (model.config.num_layers, rows, model.config.num_kv_heads)
    torch.set_num_threads(threads)
    attention = cpu_attention(model)
    numbers = torch.zeros(*shape, kv_width(16, model.config.head_dim, torch.float32))
    kv = LayerKVs(attention.kv_layout(numbers.dtype), numbers, 16)
    step = (torch.arange(rows), torch.zeros(rows, dtype=torch.int64), kv, attention)
    prepared, every = attention.prepare(one_token_each(rows)), torch.arange(rows)
    direction = model.norm(model(*step, prepared, every).hidden)[0].double()
    factors = 0.01 * torch.rand(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits, best = LOGITS[case]
    factors[list(logits)] = torch.tensor(list(logits.values()), dtype=torch.float64)
    model.head.weight.data = (factors[:, None] * direction / direction.dot(direction)).float()

    fused = FusedCausalLM(model, attention)
    alone = fused(*step, prepared, every, False)
    assert not len(alone.logits)
    output = fused(*step, prepared, every)
    expected = best_by_sampling(output.logits)
    assert output.best == alone.best == expected
    assert expected[0] == best
    # Of fewer rows than before, in another order.
    assert fused(*step, prepared, torch.tensor([39, 0, 7]), False).best == [expected[row] for row in (39, 0, 7)]


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2, 3, 4, 6, 8, 9]},
}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_kept_rotations_are_those_of_each_position(rope_type: str, tmp_path: Path) -> None:
    """However far positions go, and in whatever order: those beyond the table so far make it grow."""
    model = load(saved(tmp_path))
    scaling = {"rope_type": rope_type, "original_max_position_embeddings": 1500, **SCALINGS[rope_type]}
    rotary = make_rotary_embedding(replace(model.config, rope_scaling=scaling), torch.device("cpu"))
    model.rotary = rotary
    fused = FusedCausalLM(model, cpu_attention(model))
    # Powers come out a rounding apart in tensors of another shape, and a position is so many times the difference.
    tolerance = 1e-3 if rope_type == "dynamic" else 0
    for length in (3, 1024, 1025, 2100, 9000, 40):
        positions = torch.tensor([length - 1, 0, length // 2])
        kept = fused.rotations(length)
        for table, expected in zip(kept, rotary(positions), strict=True):
            found = table.reshape(-1, model.config.head_dim // 2)[positions]
            np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    assert len(kept[0]) // (model.config.head_dim // 2) <= 2 * 9000


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "quantization", "bound"), [("bfloat16", None, 0.01), ("float32", "int8", 1e-5)])
def test_a_row_alone_in_lower_precision(
    dtype: str, quantization: str | None, bound: float, threads: int, tmp_path: Path
) -> None:
    """A single row meets its weights in vectors, several in tiles: sums differ in the last bits, if at all."""
    kind: torch.dtype = getattr(torch, dtype)
    model = load(saved(tmp_path), kind)
    if reason := unsupported(model.config, kind, quantization):
        pytest.skip(reason)
    torch.set_num_threads(threads)
    attention = cpu_attention(model)
    fused = FusedCausalLM(model, attention, quantization)
    together = generate(fused, PROMPTS, 1, chunk=44, block_size=16, attention=attention)
    for prompt, run in zip(PROMPTS, together, strict=True):
        [alone] = generate(fused, [prompt], 1, chunk=1, block_size=16, attention=attention)
        [difference] = differences([alone], [run])
        assert difference < bound


def test_what_cannot_be_fused_says_why_and_stays_plain(tmp_path: Path) -> None:
    model = load(saved(tmp_path, hidden_size=40, head_dim=16))
    assert "multiples of 32" in (unsupported(model.config, torch.float32, None) or "")
    assert "float16" in (unsupported(model.config, torch.float16, None) or "")
    attention = cpu_attention(model)
    assert fit_to_cpu(model, attention, None) is model
    with pytest.raises(ConfigError, match=r"--quantization int8 cannot be had here.*multiples"):
        fit_to_cpu(model, attention, "int8")


def test_int8_without_the_cpu_backend_is_refused(tmp_path: Path) -> None:
    model = load(saved(tmp_path))
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": torch.float32}
    with pytest.raises(ConfigError, match="backend cpu, not reference"):
        fit_to_cpu(model, ReferenceAttention(**sizes), "int8")


# ---- products ----

KINDS = {(name, "Tiles" in kind.__name__): kind() for kind, name in kinds.PRECISIONS.items()}


@cache
def unit_kernel(precision: str, in_tiles: bool) -> Any:
    """A kernel that computes one unit; compiled once, not for every case."""
    product = products.product_of(precision, in_tiles=in_tiles)
    begin, keep, config = tiles.configure, tiles.keep_configuration, tiles.full_tiles()

    @njit
    def run(kind, a, words, rows, packed, c, unit):  # type: ignore[no-untyped-def]
        kept = np.empty(64, np.uint8)
        if in_tiles:
            keep(kept)
            begin(config)
        product(kind, a, 0, words, rows, packed, unit * 32 * words, words, words * 16, c, unit * 1024)
        if in_tiles:
            begin(kept)

    return run


def block_of(precision: str, in_tiles: bool, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A block by the kernel, over three units of weights, and what it should be."""
    rng = np.random.default_rng(rows)
    width, columns = 256, 70  # the last unit is filled up
    if precision == "int8":
        weights = rng.integers(-128, 128, (columns, width)).astype(np.int8)
        a = rng.integers(0, 256, (32, width)).astype(np.uint8)
        c = rng.integers(-99, 99, (32, 96)).astype(np.int32)
        expected = a.astype(np.int64) @ weights.T.astype(np.int64)
    else:
        kind: torch.dtype = getattr(torch, precision)
        numbers = torch.from_numpy(rng.normal(size=(columns + 32, width))).to(kind)
        expected = (numbers[columns:].double() @ numbers[:columns].double().T).numpy()
        bits = (numbers if kind == torch.float32 else numbers.view(torch.int16)).numpy()
        weights, a = bits[:columns], np.ascontiguousarray(bits[columns:])
        c = rng.normal(size=(32, 96)).astype(np.float32)
    packed, words = products.pack(weights), width * weights.itemsize // 4
    blocks = np.ascontiguousarray(c.reshape(32, 3, 32).swapaxes(0, 1)).reshape(-1)
    for unit in range(3):
        run = unit_kernel(precision, in_tiles)
        run(KINDS[precision, in_tiles], a.view(np.int32).reshape(-1), words, rows, packed, blocks, unit)
    result = blocks.reshape(3, 32, 32).swapaxes(0, 1).reshape(32, 96)[:rows]
    full = np.zeros((32, 96), expected.dtype)
    full[:, :columns] = expected
    return result, full[:rows]


@pytest.mark.parametrize("rows", [1, 7, 16, 31])
@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("precision", products.PRECISIONS)
def test_products(precision: str, in_tiles: bool, rows: int) -> None:
    if in_tiles and not products.uses_tiles(precision):
        pytest.skip("this processor has no tiles for it")
    if reason := products.unsupported(precision):
        pytest.skip(reason)
    result, expected = block_of(precision, in_tiles, rows)
    np.testing.assert_allclose(result, expected, atol=0 if precision == "int8" else 1e-4, rtol=0)


@cache
def strips_kernel(precision: str) -> Any:
    """A kernel that computes the product of a row and a few strips."""
    product = products.row_product_of(precision)

    @njit
    def run(kind, a, packed, first, words, strips, following, c):  # type: ignore[no-untyped-def]
        product(kind, a, packed, first * words * 16, words, strips, following * words * 16, c)

    return run


@pytest.mark.parametrize("strips", [2, 4, 8])
@pytest.mark.parametrize("width", [32, 96])  # fewer words than are asked for ahead, and more
@pytest.mark.parametrize("precision", products.PRECISIONS)
def test_products_of_a_row(precision: str, width: int, strips: int) -> None:
    """To the bit what the products of many rows in vectors are, whatever comes behind."""
    if reason := products.unsupported(precision):
        pytest.skip(reason)
    rng = np.random.default_rng(width)
    kind: Any = {"float32": np.float32, "bfloat16": np.int16, "int8": np.int8}[precision]
    numbers = rng.normal(size=(256, width)).astype(np.float32)
    if precision == "int8":
        weights, a = rng.integers(-128, 128, (256, width)).astype(kind), rng.integers(0, 256, width).astype(np.uint8)
    elif precision == "bfloat16":
        weights = (numbers.view(np.int32) >> 16).astype(kind)
        a = weights[-1]
    else:
        weights, a = numbers, numbers[-1]
    packed, words = products.pack(weights), width * weights.itemsize // 4
    made = np.float32 if precision != "int8" else np.int32
    expected = np.zeros((8, 1024), made)
    taken = a.view(np.int32)
    for unit in range(8):
        unit_kernel(precision, False)(KINDS[precision, False], taken, words, 1, packed, expected.reshape(-1), unit)
    wanted = expected[:, :32].reshape(16, 16)
    for first in range(0, 16, strips):
        result = np.full((strips + 1) * 16, 7, made)
        run = strips_kernel(precision)
        run(KINDS[precision, False], taken, packed, first, words, strips, (first + strips) % 16, result)
        np.testing.assert_array_equal(result[:-16].reshape(strips, 16), wanted[first : first + strips])
        assert (result[-16:] == 7).all()


def test_weights_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ValueError, match="whole words"):
        products.pack(np.zeros((4, 6), np.int8))


def test_a_cache_that_lies_otherwise_is_refused(tmp_path: Path) -> None:
    model = load(saved(tmp_path))
    attention, rows = cpu_attention(model), torch.arange(3)
    fused, step = FusedCausalLM(model, attention), (rows, torch.zeros(3, dtype=torch.int64))
    prepared = attention.prepare(one_token_each(3))
    shape = (model.config.num_layers, 3, model.config.num_kv_heads, kv_width(16, model.config.head_dim, torch.float32))
    for layout, block_size in ((KVLayout(keys_by_token=True), 16), (attention.kv_layout(torch.float32), 8)):
        kv = LayerKVs(layout, torch.zeros(shape), block_size)
        with pytest.raises(ValueError, match="this backend reads blocks of 16"):
            fused(*step, kv, attention, prepared, rows)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_memory_begins_with_cache_lines(tmp_path: Path, quantization: str | None) -> None:
    """Tiles and vectors that lie across two lines take twice as long to load."""
    if products.unsupported(quantization or "float32"):
        pytest.skip("this processor has no instructions for it")
    model = load(saved(tmp_path))
    attention = cpu_attention(model)
    config, fused = model.config, FusedCausalLM(model, attention, quantization)
    layout = attention.kv_layout(torch.float32)
    kv = KVStore(config, layout, num_blocks=3, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    fused._head_of(np.arange(3), kept=True)
    scratch = attention.scratch(np.dtype(np.float32))
    arrays = [fused._weights.words, fused._packed_head.words, *fused._buffers, fused._logits, *scratch.tiles]
    arrays += [
        fused._peaks,
        fused._tokens,
        *scratch.vectors,
        kv.layers.numbers.view(-1).numpy(),
    ]
    assert {array.ctypes.data % 64 for array in arrays if len(array)} == {0}


@pytest.mark.parametrize("threads", [1, 3])
def test_each_thread_has_whole_cache_lines_of_its_own(threads: int) -> None:
    memory = for_threads(threads, 5, np.int16)
    assert memory.ctypes.data % 64 == 0
    assert len(memory) == threads * 32
