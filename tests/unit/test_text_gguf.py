"""GGUF metadata and the tokenizers made from it, on small files written here."""

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from chairlift.model.gguf_file import read_gguf_metadata
from chairlift.model.source import ModelError, ModelSource
from chairlift.text.errors import TokenizerError
from chairlift.text.gguf_tokenizer import build_gguf_tokenizer
from chairlift.text.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(pre: str, **extra: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["he", "ll", "hell", "hello", "Ġhello", "ĊĊ", "12", "123", "hi"]
    control, user = ["<|bos|>", "<|im_end|>", "<|endoftext|>"], ["<think>"]
    tokens = alphabet + merged + control + user
    types = [NORMAL] * (len(alphabet) + len(merged)) + [CONTROL] * len(control) + [USER_DEFINED] * len(user)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    scored = {"▁h": -1.0, "el": -2.0, "lo": -3.0, "▁hel": -4.0, "▁hello": -5.0, "ll": -6.0}
    scored |= {"▁▁": -7.0, "▁": -20.0, "h": -21.0, "e": -22.0, "l": -23.0, "o": -24.0}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *scored, "[INST]", "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scored), CONTROL, USER_DEFINED]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scored.values()) + [0.0, 0.0],
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(ModelSource("m", "gguf", write(path / "m.gguf", metadata)))


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return build_gguf_tokenizer(metadata).encode(text, add_special_tokens=False).tokens


# ---- the file ----


def test_metadata_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm", chat_template="{{ 'é' }}")
    metadata |= {"a.float": 0.5, "a.flag": True, "a.numbers": [1, -2, 3], "a.texts": ["x", "", "你"]}
    path = write(tmp_path / "m.gguf", metadata)
    read = read_gguf_metadata(path)
    assert {key: read[key] for key in metadata} == metadata
    fields = gguf.GGUFReader(path).fields
    assert read == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04 something else"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match="not a GGUF file"):
            read_gguf_metadata(tmp_path / "m.gguf")


def test_unknown_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelError, match="version 1"):
        read_gguf_metadata(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf_metadata(tmp_path / "m.gguf")


def test_a_header_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "a.texts": ["x", "yz"], "a.numbers": [1, 2], "a.text": "tail"}
    whole = write(tmp_path / "m.gguf", metadata).read_bytes()
    end = whole.index(b"tail") + len(b"tail")
    (tmp_path / "cut.gguf").write_bytes(whole[:end])
    assert read_gguf_metadata(tmp_path / "cut.gguf") == metadata
    for length in range(4, end):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match="damaged"):
            read_gguf_metadata(tmp_path / "cut.gguf")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1])
@pytest.mark.parametrize("item_kind", [0, 8, 9])
def test_absurd_array_lengths_are_refused(tmp_path: Path, item_kind: int, length: int) -> None:
    head = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + head + struct.pack("<IIQ", 9, item_kind, length))
    with pytest.raises(ModelError, match="damaged"):
        read_gguf_metadata(tmp_path / "m.gguf")


# ---- byte-level BPE ----


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello hello\n\n123", ["hello", "Ġhello", "ĊĊ", "1", "2", "3"]),
        ("gpt-2", "hello hello\n\n123", ["hello", "Ġhello", "Ċ", "Ċ", "123"]),
        ("llama-bpe", "hello hello\n\n1234", ["hello", "Ġhello", "ĊĊ", "123", "4"]),
        ("qwen2", "hello\n\n123", ["hello", "ĊĊ", "1", "2", "3"]),
        ("tekken", "hello\n\n123", ["hello", "ĊĊ", "1", "2", "3"]),
        ("gpt-4o", "hello\n\n1234", ["hello", "ĊĊ", "123", "4"]),
        ("deepseek-v3", "hello\n\n1234", ["hello", "ĊĊ", "123", "4"]),
        ("deepseek-coder", "hello\n\n12", ["hello", "Ċ", "Ċ", "1", "2"]),
        ("default", "hello 123", ["hello", "Ġ", "123"]),
    ],
)
def test_the_named_pre_tokenizer_splits_the_text(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level_metadata(pre), text) == expected


def test_smollm_splits_as_its_published_tokenizer_does() -> None:
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built = build_gguf_tokenizer(byte_level_metadata("smollm")).pre_tokenizer
    for text in ("a  b", "x\n\n 12 3a", " 1", "٣ ½ Ⅷ²", "don't we'LL", "end.  \n", "你好 5個", "\t\t1\t"):
        assert [piece for piece, _ in built.pre_tokenize_str(text)] == [
            piece for piece, _ in published.pre_tokenize_str(text)
        ]


def test_llama3_takes_a_known_word_whole_although_no_merge_makes_it() -> None:
    assert pieces(byte_level_metadata("llama-bpe"), "hi") == ["hi"]
    assert pieces(byte_level_metadata("qwen2"), "hi") == ["h", "i"]


def test_qwen_composes_characters() -> None:
    assert pieces(byte_level_metadata("qwen2"), "e\u0301") == pieces(byte_level_metadata("qwen2"), "\u00e9")
    assert pieces(byte_level_metadata("smollm"), "e\u0301") != pieces(byte_level_metadata("smollm"), "\u00e9")


def test_control_and_user_defined_tokens_are_matched_whole(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_metadata("smollm"))
    token_ids = tokenizer.encode("hello<|im_end|><think>")
    assert token_ids[1] == tokenizer.eos_token_ids[0]
    assert len(token_ids) == 3
    assert tokenizer.decode(token_ids) == "hello<think>"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "hello<|im_end|><think>"
    assert tokenizer.vocab_size == len(byte_level_metadata("smollm")["tokenizer.ggml.tokens"])


def test_tokens_that_end_a_turn_or_a_document_end_a_sequence(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.eos_token_ids == (tokens.index("<|im_end|>"), tokens.index("<|endoftext|>"))
    tokenizer = load(tmp_path, byte_level_metadata("smollm", **{"ggml.eot_token_id": tokens.index("<think>")}))
    assert tokenizer.eos_token_ids[:2] == (tokens.index("<|im_end|>"), tokens.index("<think>"))


@pytest.mark.parametrize(
    ("pre", "flags", "bos"),
    [
        ("smollm", {}, False),
        ("smollm", {"ggml.add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"ggml.add_bos_token": False}, False),
    ],
)
def test_bos_is_added_where_the_model_wants_it(tmp_path: Path, pre: str, flags: dict[str, bool], bos: bool) -> None:
    tokenizer = load(tmp_path, byte_level_metadata(pre, **flags))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([tokenizer.bos_token_id] if bos else []) + plain


def test_unknown_kinds_are_refused_by_name_with_those_that_are_known() -> None:
    with pytest.raises(TokenizerError, match=r"'wonder'.*llama-bpe.*qwen2.*smollm"):
        build_gguf_tokenizer(byte_level_metadata("wonder"))
    with pytest.raises(TokenizerError, match=r"'t5'.*gpt2, llama"):
        build_gguf_tokenizer(byte_level_metadata("smollm") | {"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["h"]}, "broken merge"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "do not fit"),
        ({"tokenizer.ggml.merges": None}, "without tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.token_type": [NORMAL]}, "1 token types"),
    ],
)
def test_broken_vocabularies_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_gguf_tokenizer(byte_level_metadata("smollm") | change)


# ---- SentencePiece ----


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    assert pieces(metadata, "hello") == ["▁hello"]
    assert pieces(metadata, "ello") == ["▁", "el", "lo"]
    assert pieces(metadata, "hell") == ["▁hel", "l"]
    assert pieces(metadata, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces(metadata, " h") == ["▁", "▁h"]  # "▁h" has the better score than "▁▁"
    tokenizer = load(tmp_path, metadata)
    for text in ("hello", " hello", "é\n😀", "", "h  h"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_begins_with_bos_and_knows_its_usual_ids(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_metadata())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1


def test_sentencepiece_without_the_first_space(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(**{"ggml.add_space_prefix": False})
    assert pieces(metadata, "h") == ["h"]
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.decode(tokenizer.encode(" h")) == " h"


def test_sentencepiece_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_metadata())
    token_ids = tokenizer.encode("[INST]<tool>", add_special_tokens=False)
    assert len(token_ids) == 2
    assert tokenizer.decode(token_ids) == "<tool>"


def test_sentencepiece_needs_scores() -> None:
    with pytest.raises(TokenizerError, match="score"):
        build_gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]})


# ---- chat ----


def test_the_chat_template_knows_the_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    extra = {"chat_template": template, "chat_template.tool_use": "{{ tools|length }} tools"}
    tokenizer = load(tmp_path, byte_level_metadata("smollm", **extra))
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages) == "<|bos|>hello<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "1 tools"


def test_the_library_is_not_asked_to_truncate_or_pad() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = build_gguf_tokenizer(byte_level_metadata("smollm")).decoder
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_id=0)
    assert Tokenizer(backend).encode("aaaa") == [0, 0, 0, 0]
