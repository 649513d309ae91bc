"""Decoding token by token equals decoding the whole, for any tokens, and the library's decoding where that is sound."""

import functools
import itertools

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer

CORPUS = ["Hello world, hello there", "naïve café", "你好 世界 你好", "👋🏽 👍 😀 😀", "héé 12 34 \n\n the the"]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<sep≡>", special=False)])
    return tokenizer


@functools.cache
def sentencepiece() -> tokenizers.Tokenizer:
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁wor", "ld", "é"]
    entries += ["你", "▁▁", "o", "<tool>"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(entry, special=True, normalized=False) for entry in entries[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Texts, and any ids at all: broken characters, special tokens in the middle, ids that no token has."""
    known = st.integers(0, backend.get_vocab_size() - 1)
    texts = st.text(st.sampled_from("Hello wrd\né你好👋🏽😀<s>"), max_size=12)
    encoded = texts.map(lambda text: backend.encode(text, add_special_tokens=False).ids)
    cut = st.tuples(encoded, st.integers(0, 6)).map(lambda pair: pair[0][pair[1] :])
    return st.lists(cut | st.lists(known | st.just(99_999), max_size=4), max_size=5).map(
        lambda parts: list(itertools.chain(*parts))
    )


def stream(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    texts = [detokenizer.add(token_ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*texts, detokenizer.finish()]


cuts = st.lists(st.integers(0, 1000), max_size=30)


@given(ids_of(byte_level()), cuts, st.booleans())
@example(byte_level().encode("👋🏽").ids, list(range(20)), True)
@example([byte_level().token_to_id("ð"), byte_level().token_to_id("Ł")], [1], True)
def test_byte_level_stream_equals_the_library(token_ids: list[int], cuts: list[int], skip: bool) -> None:
    backend = byte_level()
    texts = stream(Tokenizer(backend), token_ids, cuts, skip)
    assert "".join(texts) == backend.decode(token_ids, skip_special_tokens=skip)


@given(ids_of(sentencepiece()), cuts, st.booleans())
@example(sentencepiece().encode(" Hello 👋🏽 wo").ids, list(range(40)), True)
def test_sentencepiece_stream_equals_the_whole(token_ids: list[int], cuts: list[int], skip: bool) -> None:
    backend = sentencepiece()
    tokenizer = Tokenizer(backend)
    text = "".join(stream(tokenizer, token_ids, cuts, skip))
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
    known = [i for i in token_ids if i < backend.get_vocab_size()]
    library = backend.decode(known, skip_special_tokens=skip)
    if "\ufffd" not in library:  # the library gives up a whole run of bytes for one bad one
        assert text == library
    else:
        assert "\ufffd" in text


@given(st.text(max_size=40), cuts)
def test_any_text_survives_a_round_trip(text: str, cuts: list[int]) -> None:
    tokenizer = Tokenizer(byte_level())
    token_ids = tokenizer.encode(text.replace("<", ""))
    assert "".join(stream(tokenizer, token_ids, cuts, True)) == text.replace("<", "")


@given(st.lists(st.integers(0, 255), max_size=60))
def test_no_more_than_an_unfinished_character_is_held_back(raw: list[int]) -> None:
    tokenizer = Tokenizer(sentencepiece())
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=tokenizer.encode("x"))
    shown = ""
    for count, byte in enumerate(raw, start=1):
        shown += detokenizer.add([3 + byte])
        # Text of all but the last three bytes is out: their first character may begin within those.
        certain = bytes(raw[: max(0, count - 3)]).decode("utf-8", errors="ignore")
        assert len(shown) >= len(certain)
    assert shown + detokenizer.finish() == bytes(raw).decode("utf-8", errors="replace")
