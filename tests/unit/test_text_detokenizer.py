import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    """One token for each byte (not in the order of the bytes), and three added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("é", special=False, normalized=False)])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    entries = ["<unk>", "<s>", "▁Hello", "▁world", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def texts(tokenizer: Tokenizer, token_ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*(detokenizer.add([i]) for i in token_ids), detokenizer.finish()]


def test_a_character_over_several_tokens_comes_when_it_is_complete() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a😀b")
    assert len(token_ids) == 6
    assert texts(tokenizer, token_ids) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a😀")[:-1]
    assert texts(tokenizer, token_ids) == ["a", "", "", "", "\ufffd"]


def test_a_stray_byte_is_replaced_and_what_follows_is_whole() -> None:
    tokenizer = byte_level()
    id_of = {tokenizer.token_bytes(i): i for i in range(256)}
    continuation, first = id_of[b"\xb1"], id_of[b"\xcc"]
    assert texts(tokenizer, [continuation, *tokenizer.encode("ñ")]) == ["\ufffd", "", "ñ", ""]
    assert texts(tokenizer, [first, *tokenizer.encode("x")]) == ["", "\ufffdx", ""]


def test_special_tokens_are_skipped_or_shown_and_other_added_tokens_always_shown() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a<s><think>b")
    assert texts(tokenizer, token_ids) == ["a", "", "<think>", "b", ""]
    assert texts(tokenizer, token_ids, skip_special_tokens=False) == ["a", "<s>", "<think>", "b", ""]


def test_a_special_token_does_not_break_a_character_apart_when_it_is_skipped() -> None:
    tokenizer = byte_level()
    first, second = tokenizer.encode("ñ")
    (special,) = tokenizer.encode("<s>")
    assert texts(tokenizer, [first, special, second]) == ["", "", "ñ", ""]


def test_an_added_token_is_its_own_text_even_where_its_characters_stand_for_bytes() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("caf") + tokenizer.encode("é")) == "café"


def test_unknown_ids_are_nothing() -> None:
    assert texts(byte_level(), [100_000, -1]) == ["", "", ""]


def test_sentencepiece_space_is_dropped_only_at_the_start_of_a_text() -> None:
    tokenizer = sentencepiece()
    hello, world = 2, 3
    assert texts(tokenizer, [hello, world]) == ["Hello", " world", ""]
    assert texts(tokenizer, [1, hello]) == ["", "Hello", ""]
    assert texts(tokenizer, [world], prompt_token_ids=[1, hello]) == [" world", ""]
    assert texts(tokenizer, [world], prompt_token_ids=[1]) == ["world", ""]
    assert texts(tokenizer, [5, hello]) == ["", " Hello", ""]


def test_sentencepiece_bytes() -> None:
    tokenizer = sentencepiece()
    raw = [6 + byte for byte in "é".encode()]
    assert texts(tokenizer, [4, *raw, 4]) == ["!", "", "é", "!", ""]
    assert texts(tokenizer, [raw[0], 4]) == ["", "\ufffd!", ""]
