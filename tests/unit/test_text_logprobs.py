"""Logprobs as JSON: texts of tokens that are no text, offsets, and what JSON cannot write."""

from __future__ import annotations

import json
import math

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from chairlift.scheduling.plan import TokenLogprob
from chairlift.text.logprobs import CompletionLogprobs, chat_logprobs, joined, prompt_logprobs, token_text
from chairlift.text.tokenizer import Tokenizer


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
END, NO_TOKEN = 256, 300
FACE = "🙂"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def plain(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0 - i, 1) for i, token in enumerate(ids(text))]


def test_no_token_is_without_a_text() -> None:
    """Pitfall 13."""
    [a] = ids("a")
    assert token_text(TOKENIZER, a) == "a"
    assert token_text(TOKENIZER, END) == "</s>"
    assert token_text(TOKENIZER, NO_TOKEN) == "token_id:300"
    parts = ids(FACE)
    assert [token_text(TOKENIZER, part) for part in parts] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert [token_text(TOKENIZER, part, bytes_prefix="bytes:") for part in parts[:2]] == ["bytes:\\xf0", "bytes:\\x9f"]
    assert len({token_text(TOKENIZER, token) for token in range(257)}) == 257


def test_the_bytes_of_chat_logprobs_join_to_the_text() -> None:
    """Pitfall 13."""
    text = f"a{FACE}é\n"
    content = chat_logprobs(TOKENIZER, plain(text))["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
    assert [entry["token"] for entry in content] == ["a", "\\xf0", "\\x9f", "\\x99", "\\x82", "\\xc3", "\\xa9", "\n"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_top_logprobs_of_chat() -> None:
    a, b = ids("ab")
    logprob = TokenLogprob(b, -2.0, 5, ((a, -0.5), (b, -2.0)))
    [entry] = chat_logprobs(TOKENIZER, [logprob])["content"]
    assert entry == {
        "token": "b",
        "logprob": -2.0,
        "bytes": [98],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -2.0, "bytes": [98]},
        ],
    }


def test_offsets_count_characters_and_tokens_of_one_share_its_offset() -> None:
    text = f"a{FACE}é!"
    writer = CompletionLogprobs(TOKENIZER, 0)
    pieces = [writer.write([logprob]) for logprob in plain(text)]
    whole = CompletionLogprobs(TOKENIZER, 0).write(plain(text))
    together = pieces[0]
    for piece in pieces[1:]:
        together = joined(together, piece)
    assert together == whole
    assert whole["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3]
    assert whole["token_logprobs"] == [-1.0 - i for i in range(8)]


def test_special_tokens_take_no_room_where_they_are_left_out() -> None:
    logprobs = [TokenLogprob(END, -1.0, 1), *plain("a")]
    assert CompletionLogprobs(TOKENIZER, 0).write(logprobs)["text_offset"] == [0, 0]
    assert CompletionLogprobs(TOKENIZER, 0, skip_special_tokens=False).write(logprobs)["text_offset"] == [0, 4]


def test_an_echo_comes_before_and_moves_the_offsets() -> None:
    writer = CompletionLogprobs(TOKENIZER, 1)
    prompt = ids("ab")
    echo = writer.write_echo(prompt, [TokenLogprob(prompt[1], -3.0, 2, ((prompt[0], -1.0),))], "ab")
    assert echo == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"a": -1.0, "b": -3.0}],
        "text_offset": [0, 1],
    }
    assert writer.write(plain("c"))["text_offset"] == [2]


def test_an_echo_that_was_cut_short_has_no_logprobs_for_the_rest() -> None:
    echo = CompletionLogprobs(TOKENIZER, 0).write_echo(ids("abc"), plain("b"), "abc")
    assert echo["token_logprobs"] == [None, -1.0, None]
    assert echo["top_logprobs"][2] is None


def test_a_top_has_as_many_as_were_asked_for_and_the_token_itself() -> None:
    a, b, c = ids("abc")
    logprob = TokenLogprob(c, -9.0, 3, ((a, -0.5), (b, -2.0), (c, -9.0)))
    for num_top, names in ((0, ["c"]), (1, ["a", "c"]), (2, ["a", "b", "c"]), (3, ["a", "b", "c"])):
        [top] = CompletionLogprobs(TOKENIZER, num_top).write([logprob])["top_logprobs"]
        assert list(top) == names


def test_what_cannot_be_is_finite_in_json() -> None:
    [a] = ids("a")
    logprob = TokenLogprob(a, -1.0, 1, ((a, -1.0), (END, -math.inf)))
    [top] = CompletionLogprobs(TOKENIZER, 2).write([logprob])["top_logprobs"]
    assert json.dumps(top, allow_nan=False) == '{"a": -1.0, "</s>": -9999.0}'
    json.dumps(chat_logprobs(TOKENIZER, [logprob]), allow_nan=False)
    json.dumps(prompt_logprobs(TOKENIZER, [logprob], 2), allow_nan=False)


def test_prompt_logprobs_by_token_id() -> None:
    a, b = ids("ab")
    told = prompt_logprobs(TOKENIZER, [TokenLogprob(b, -4.0, 7, ((a, -0.5), (b, -4.0)))], 1)
    assert told == [
        None,
        {
            str(b): {"logprob": -4.0, "rank": 7, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
