"""GGUF files written by the ``gguf`` package, against ``transformers`` with the same weights dequantized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.model_driver import generate

from chairlift.model.config import read_config
from chairlift.model.gguf_file import open_gguf
from chairlift.model.loader import gguf as gguf_loader
from chairlift.model.loader.gguf import iterate_gguf
from chairlift.model.registry import load_model
from chairlift.model.source import ModelError, resolve

CPU = torch.device("cpu")
PROMPT = [5, 17, 42, 8, 63]
NUM_TOKENS = 12
Type = gguf.GGMLQuantizationType
# The types that the gguf package can write; it reads the K-quants as well (see test_k_quant).
WRITABLE = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
# Widths are multiples of 32, the block of the quantizations.
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share such small tensors only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gguf_name(name: str) -> str:
    part = next(ours for theirs, ours in NAMES.items() if theirs in name)
    layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    return f"{layer}{part}.{name.rsplit('.', 1)[1]}"


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Lays the rows of each head out as llama files have them: 0, d/2, 1, d/2 + 1, ..."""
    half = values.shape[0] // num_heads // 2
    rows = [head * 2 * half + i + j * half for head in range(num_heads) for i in range(half) for j in range(2)]
    return values[rows]


def write_model(
    path: Path, arch: str, quantization: Type = Type.F32, *, extra: dict[str, Any] | None = None, **changes: Any
) -> transformers.PreTrainedModel:
    """Writes a random model, and returns it with the weights that the file really holds."""
    torch.manual_seed(0)
    config = CONFIGS[arch](**{**SHAPE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_token_list(["token", "ключ", "<|x|>"])
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else add)(key, value)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.3
            kind = quantization if parameter.ndim == 2 else Type.F32
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            stored = values.numpy()
            if arch == "llama":
                for part, count in heads.items():
                    stored = interleave(stored, count) if part in name else stored
            packed = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
            # What rounding leaves of a row does not depend on where the row lies.
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def assert_equal_to(reference: transformers.PreTrainedModel, path: Path) -> None:
    source = resolve(str(path))
    model = load_model(source, read_config(source), dtype=torch.float32, device=CPU)
    (ours,) = generate(model, [PROMPT], NUM_TOKENS)
    with torch.no_grad():
        logits = reference(torch.tensor([ours.tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(ours.logits), logits, atol=2e-4, rtol=1e-4)
    assert ours.generated == logits.argmax(-1).tolist()


@pytest.mark.parametrize("quantization", WRITABLE, ids=lambda q: q.name)
def test_quantizations(quantization: Type, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert_equal_to(write_model(path, "llama", quantization), path)


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_architectures(arch: str, tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    changes = {"head_dim": 24} if arch == "qwen3" else {}
    assert_equal_to(write_model(path, arch, Type.Q8_0, tie_word_embeddings=tied, **changes), path)
    config = read_config(resolve(str(path)))
    assert config.tie_word_embeddings is tied
    assert config.architecture == CONFIGS[arch].__name__.replace("Config", "ForCausalLM")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


def test_llama_biases_are_put_in_order_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert_equal_to(write_model(path, "llama", attention_bias=True, mlp_bias=True), path)


def test_rope_freqs_are_the_scaling_of_llama_3(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / scaled).numpy()
    assert factors.max() > 7
    reference = write_model(path, "llama", extra={"rope_freqs.weight": factors}, rope_parameters=rope)
    assert_equal_to(reference, path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        extra["llama.rope.scaling.original_context_length"] = 16
        rope["original_max_position_embeddings"] = 16
    assert_equal_to(write_model(path, "llama", extra=extra, rope_parameters=rope), path)
    assert read_config(resolve(str(path))).max_position_embeddings == (256 if kind == "linear" else 64)


def test_k_quant(tmp_path: Path) -> None:
    """A tensor of random Q6_K blocks: 210 bytes for 256 numbers, the last two their scale in float16."""
    path = tmp_path / "model.gguf"
    blocks = np.random.default_rng(0).integers(0, 256, (8, 210), dtype=np.uint8)
    blocks[:, 208:] = np.full(8, 0.01, dtype=np.float16).view(np.uint8).reshape(8, 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", blocks, raw_dtype=Type.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(path).tensors["t"]
    assert tensor.shape == (8, 256)
    assert tensor.quantization is Type.Q6_K
    np.testing.assert_array_equal(tensor.data, blocks)


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("strings", ["a", "", "字"])
    writer.add_bool("yes", True)
    writer.add_int8("small", -3)
    writer.add_uint64("big", 2**40)
    writer.add_float64("precise", 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert open_gguf(path).metadata == theirs
    assert theirs["strings"] == ["a", "", "字"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama")
    content = path.read_bytes()
    for length in (0, 3, 4, 10, 30, 200, 900, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"not a GGUF|cut short"):
            open_gguf(path)
    path.write_bytes(content[:4] + (99).to_bytes(4, "little") + content[8:])
    with pytest.raises(ModelError, match="version 99"):
        open_gguf(path)
    path.write_bytes(content[:8] + b"\xff" * 16 + content[24:])
    with pytest.raises(ModelError, match="cut short or damaged"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope.*supported: none, linear, yarn"),
        ({"llama.rope.scaling.type": "linear"}, "'factor'"),
        ({"split.count": 3}, "one of 3 pieces"),
        ({"blk.0.extra.weight": np.zeros((4, 4), np.float32)}, r"no place for, blk\.0\.extra\.weight"),
    ],
)
def test_refusals(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", extra=extra)
    with pytest.raises(ModelError, match=message):
        load_model(resolve(str(path)), read_config(resolve(str(path))), dtype=torch.float32, device=CPU)


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        read_config(resolve(str(path)))


@pytest.mark.parametrize("quantization", WRITABLE, ids=lambda q: q.name)
def test_a_part_is_read_as_it_stands_in_the_whole(quantization: Type, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", quantization, attention_bias=True)
    source = resolve(str(path))
    file = open_gguf(source.path)
    for name, tensor in iterate_gguf(file, read_config(source)):
        whole = tensor.read(tuple(slice(0, n) for n in tensor.shape))
        assert whole.shape == tensor.shape
        rows = slice(16, 32)  # the second head, where there are heads
        # Within one block of a quantization, over the bounds of two, and to the end.
        for columns in (slice(3, 9), slice(30, 50), slice(40, 64)):
            part = (rows,) if len(tensor.shape) == 1 else (rows, columns)
            torch.testing.assert_close(tensor.read(part), whole[part], rtol=0, atol=0, msg=name)


def test_of_a_part_only_its_rows_and_blocks_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", Type.Q8_0)
    source = resolve(str(path))
    tensors = dict(iterate_gguf(open_gguf(source.path), read_config(source)))
    seen: list[tuple[int, ...]] = []

    def dequantize(data: np.ndarray, kind: Type) -> np.ndarray:
        seen.append(data.shape)
        return gguf.quants.dequantize(data, kind)

    monkeypatch.setattr(gguf_loader, "dequantize", dequantize)
    tensors["model.layers.0.mlp.down_proj.weight"].read((slice(0, 64), slice(32, 64)))
    tensors["model.embed_tokens.weight"].read((slice(10, 20), slice(0, 64)))
    assert seen == [(64, 34), (10, 68)]  # blocks of 32 numbers in 34 bytes
