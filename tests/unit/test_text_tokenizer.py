"""Tokenizers in a safetensors directory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from chairlift.model.source import ModelSource
from chairlift.text.errors import ChatTemplateError, PromptError, TokenizerError
from chairlift.text.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|eot|>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


BOS, EOS, EOT = 256, 257, 258


def load(path: Path, **files: Any) -> Tokenizer:
    backend().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(ModelSource("m", "safetensors", path))


def test_special_tokens_and_ends_of_sequence(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        generation_config={"eos_token_id": [EOT, EOS]},
        config={"eos_token_id": 5},
    )
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.eos_token_ids == (EOS, EOT)
    assert tokenizer.special_token_ids == {BOS, EOS, EOT}
    assert tokenizer.vocab_size == 259


def test_config_tells_the_ids_where_nothing_else_does(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, config={"eos_token_id": EOT, "bos_token_id": BOS})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOT,))


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert tokenizer.eos_token_ids == (EOS,)


def test_bos_is_added_unless_asked_not_to(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a")[0] == BOS
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == tokenizer.encode("a")


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True}, ([BOS], [])),
        ({"add_bos_token": None}, ([BOS], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([BOS], [EOS])),
    ],
)
def test_the_config_overrules_what_is_added(
    tmp_path: Path, flags: dict[str, Any], around: tuple[list[int], list[int]]
) -> None:
    tokenizer = load(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", **flags})
    before, after = around
    assert tokenizer.encode("a") == [*before, *tokenizer.encode("a", add_special_tokens=False), *after]


def test_chat_templates_from_every_place(tmp_path: Path) -> None:
    def rendered(tools: list[dict[str, Any]] | None = None, **files: Any) -> str:
        return load(tmp_path, **files).apply_chat_template(MESSAGES, tools=tools)

    assert rendered(chat_template={"chat_template": "old file {{ bos_token }}"}, tokenizer_config={}) == "old file "
    assert rendered(tokenizer_config={"chat_template": "inline {{ bos_token }}", "bos_token": "<s>"}) == "inline <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert rendered(tokenizer_config={"chat_template": named}) == "plain"
    assert rendered([{"type": "function"}], tokenizer_config={"chat_template": named}) == "tools"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert rendered(tokenizer_config={"chat_template": "inline"}) == "own file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("own file for tools")
    assert rendered([{"type": "function"}]) == "own file for tools"


def test_a_model_without_a_template_says_that_completions_work(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*/v1/completions"):
        load(tmp_path).apply_chat_template(MESSAGES)


def test_only_a_sentencepiece_file_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(ModelSource("m", "safetensors", tmp_path))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        load(tmp_path, tokenizer_config="{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json must hold a JSON object"):
        load(tmp_path, tokenizer_config={}, generation_config=[1])
    with pytest.raises(TokenizerError, match=r"chat_template in .*tokenizer_config\.json is neither"):
        load(tmp_path, generation_config={}, tokenizer_config={"chat_template": [{"x": 1}]})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not text in UTF-8"):
        load(tmp_path, tokenizer_config={})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(ModelSource("m", "safetensors", tmp_path))


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tokenizers.Tokenizer(models.WordPiece({"a": 0}))
    with pytest.raises(TokenizerError, match="none"):
        Tokenizer(other)
    other.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"WordPiece.*ByteLevel"):
        Tokenizer(other)


def test_metaspace_is_understood() -> None:
    model = models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0), ("▁", -2.0)], 0)
    for scheme, text in (("always", "a a"), ("never", " a a")):
        metaspace = tokenizers.Tokenizer(model)
        metaspace.decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert Tokenizer(metaspace).decode([1, 1]) == metaspace.decode([1, 1]) == text


def test_half_a_surrogate_pair_is_the_clients_mistake(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"U\+D83D at character 2"):
        load(tmp_path).encode("ab\ud83d")


def test_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(backend())
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([i]) for i in range(256)]
    assert [tokenizer.token_bytes(i) for i in (BOS, 259, 10**6, -1)] == [b"<s>", b"", b"", b""]


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, chairlift.text.output, chairlift.text.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
