"""However a text is cut, the stop matcher does what looking at the whole text would."""

from hypothesis import given
from hypothesis import strategies as st

from chairlift.text.stop import StopMatcher

ALPHABET = "ab\u00e9\U0001f600"
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=0, max_size=4)
pieces = st.lists(st.text(ALPHABET, max_size=5), max_size=12)


def offline(text: str, stop: list[str]) -> tuple[str, str | None]:
    found = [(text.index(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    end, minus_length, matched = min(found)
    return text[: end + minus_length], matched


@given(pieces, stops)
def test_equals_the_offline_truncation(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            break
    if matched is None:
        shown += matcher.flush()
    assert (shown, matched) == offline("".join(pieces), stop)


@given(pieces, stops)
def test_holds_back_the_longest_beginning_of_a_stop_string_and_no_more(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            return
        longest = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - longest]
