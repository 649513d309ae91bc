"""A tokenizer from the metadata of a GGUF file.

GGUF names a kind of vocabulary (``tokenizer.ggml.model``) and, for byte-level BPE, how text is split into words first
(``tokenizer.ggml.pre``). What the names mean is llama.cpp's to say; the patterns below are the ones that the models'
own ``tokenizer.json`` files publish. An unknown name is refused: a wrong split gives a model that is subtly worse,
and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from chairlift.model.gguf_file import end_token_ids
from chairlift.text.errors import TokenizerError

SPACE_MARK = "\u2581"  # ▁, how SentencePiece writes a space


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Han, Hiragana, Katakana
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# Name of a pre-tokenizer -> the patterns that split text, one after the other. Each match is a piece of its own.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-coder": _DEEPSEEK_CODER,
    "default": _DEFAULT,
}
# Words that are in the vocabulary are taken whole, whatever the merges say (as tiktoken does).
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
# Begin with BOS where the file does not say.
_ADD_BOS = _IGNORE_MERGES

# Qwen's text is brought to Unicode's composed form first.
_NFC = frozenset({"qwen2"})

# Control tokens that end a turn or a document. Files name only one of them as EOS, and older ones the wrong one.


def build_gguf_tokenizer(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer that the metadata describes, BOS and EOS included where the model wants them.

    Raises:
        TokenizerError: a part is missing, or of an unknown kind (the message names those that are known).
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("the GGUF file has no tokenizer (tokenizer.ggml.tokens); use one converted with it")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types; it is damaged")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        raise TokenizerError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_tokens(tokenizer, tokens, types)
    bos, ends = gguf_special_ids(metadata)
    wants_bos = metadata.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or metadata.get("tokenizer.ggml.pre") in _ADD_BOS
    )
    wants_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    add_bos_eos(tokenizer, bos if wants_bos else None, ends[0] if wants_eos and ends else None)
    return tokenizer


def gguf_special_ids(metadata: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The BOS token, if there is one, and the tokens that end a sequence, the declared EOS first."""
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    return _token_id(metadata, "bos", 1 if sentencepiece else None), end_token_ids(metadata)


def _token_id(metadata: dict[str, Any], name: str, default: int | None) -> int | None:
    token_id: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return token_id if token_id is not None and 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]) else None


def _byte_level(metadata: dict[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise TokenizerError(f"GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(sorted(_SPLITS))}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise TokenizerError("the GGUF file has a byte-level vocabulary without tokenizer.ggml.merges; convert it anew")
    tokenizer = tokenizers.Tokenizer(
        _bpe(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_split_merge(merge) for merge in merges],
            ignore_merges=name in _IGNORE_MERGES,
        )
    )
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")  # the left half is never empty, and may itself begin with a space
    if not space:
        raise TokenizerError(f"the GGUF file has a broken merge {merge!r}; download it again")
    return merge[0] + left, right


def _bpe(**options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"the GGUF file has a vocabulary and merges that do not fit together: {error}") from error


def _sentencepiece(metadata: dict[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError(
            "the GGUF file has a SentencePiece vocabulary without a score for each token; convert it anew"
        )
    unknown = _token_id(metadata, "unknown", 0)
    tokenizer = tokenizers.Tokenizer(
        _bpe(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = [normalizers.Replace(" ", SPACE_MARK)]
    unmark_spaces = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *mark_spaces])
        tokenizer.decoder = decoders.Sequence([*unmark_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Sequence(mark_spaces)
        tokenizer.decoder = decoders.Sequence(unmark_spaces)
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union has the best score: every way to cut each token, best token first."""
    pieces = {token: i for i, token in enumerate(tokens) if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    merges: list[tuple[str, str]] = []
    for token in sorted(pieces, key=lambda token: -scores[pieces[token]]):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(known, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Registers the tokens that are matched whole in the text: control tokens as special, the user's own as plain."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED and SPACE_MARK not in token:  # marks exist only behind the normalizer
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def add_bos_eos(tokenizer: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes the tokenizer put these tokens around a text, where there are any."""
    template, special = ["$A"], []
    if bos is not None:
        template.insert(0, "bos")
        special.append({"id": "bos", "ids": [bos], "tokens": [tokenizer.id_to_token(bos)]})
    if eos is not None:
        template.append("eos")
        special.append({"id": "eos", "ids": [eos], "tokens": [tokenizer.id_to_token(eos)]})
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
