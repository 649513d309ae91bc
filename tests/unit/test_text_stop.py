import pytest

from chairlift.text.stop import StopMatcher


def run(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stop)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


def test_the_head_of_a_stop_string_that_spans_pieces_never_leaks() -> None:
    assert run(["###END"], ["abc##", "#E", "ND tail"]) == (["abc", "", ""], "###END")


def test_a_false_start_is_shown_as_soon_as_it_is_one() -> None:
    assert run(["###END"], ["a#", "##", "x", "y"]) == (["a", "", "###x", "y", ""], None)


def test_a_false_start_can_hold_the_beginning_of_the_true_one() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_what_is_held_at_the_end_is_given_out() -> None:
    assert run(["\n\n"], ["one\n"]) == (["one", "\n"], None)


def test_of_a_string_and_its_beginning_the_beginning_wins_because_it_is_complete_first() -> None:
    assert run(["abc", "ab"], ["xabc"]) == (["x"], "ab")


def test_of_strings_that_end_together_the_longest_wins() -> None:
    assert run(["c", "abc", "bc"], ["xab", "c"]) == (["x", ""], "abc")


def test_the_string_that_ends_first_wins_even_if_another_began_earlier() -> None:
    assert run(["abcd", "bc"], ["xa", "bcd"]) == (["x", "a"], "bc")


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_unicode() -> None:
    assert run(["終わり"], ["これで終", "わ", "り。"]) == (["これで", "", ""], "終わり")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_sequences_with_the_same_stop_string_share_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run(["stop here"], ["text"])
    monkeypatch.setattr("chairlift.text.stop._advance", None)  # what makes the table
    StopMatcher(["stop here"])


def test_a_match_in_text_that_is_not_armed_ends_nothing_and_is_given_out() -> None:
    matcher = StopMatcher(["aa", "b"])
    assert matcher.push("xaab", armed=False) == ("xaab", None)
    assert matcher.push("a", armed=False) == ("", None)
    assert matcher.push("ya") == ("ay", None)
    assert matcher.push("a") == ("", "aa")


def test_a_match_that_is_not_armed_may_be_the_beginning_of_one_that_is() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", armed=False) == ("a", None)
    assert matcher.push("a") == ("", "aa")


def test_a_stop_string_that_is_kept_holds_nothing_back() -> None:
    matcher = StopMatcher(["abc"], keep=True)
    assert matcher.push("xab") == ("xab", None)
    assert matcher.push("cd") == ("c", "abc")
    matcher = StopMatcher(["abc"], keep=True)
    assert matcher.push("xabcd") == ("xabc", "abc")
    assert matcher.flush() == ""
