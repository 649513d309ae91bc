"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Finds the first stop string to be completed, and never lets its beginning out.

    The text may be cut anywhere: what comes out is the same. The match that ends first wins, and of several that end
    at the same character the longest, so that the text before it ends as early as it can. Time is linear in the text
    (Knuth, Morris and Pratt 1977, once for each stop string).
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        """Takes the stop strings, none of them empty, and whether the text is to end with the one that is found."""
        if not all(stop):
            raise ValueError("stop must not contain an empty string")
        self._keep = keep
        # Longest first: among those that end at the same character it wins.
        self._automata = [_Automaton(string) for string in sorted(set(stop), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes more text; returns what is safe to show, and the stop string that ended it, if one did.

        After a match the rest is discarded, and the matcher has served. A stop string that is completed by text that
        is not ``armed`` ends nothing.
        """
        if not self._automata:
            return text, None
        text, seen = self._held + text, len(self._held)
        for end in range(seen, len(text)):
            for automaton in self._automata:
                if not automaton.feed(text[end]):
                    continue
                if not armed:
                    automaton.overlook()
                else:
                    self._held = ""
                    return text[: end + 1 - (0 if self._keep else len(automaton.string))], automaton.string
        # What is kept in any case need not be held back.
        shown = len(text) - (0 if self._keep else max(automaton.matched for automaton in self._automata))
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text ends with.

    Attributes:
        string: the stop string.
        matched: length of its longest beginning that the text so far ends with.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._border = _borders(string)

    def feed(self, character: str) -> bool:
        """Takes one character; whether the stop string is now complete."""
        self.matched = _advance(self.string, self._border, self.matched, character)
        return self.matched == len(self.string)

    def overlook(self) -> None:
        """Goes on after the string was complete. Its end may be another one's beginning."""
        self.matched = self._border[self.matched]


@lru_cache(maxsize=64)  # the sequences of a request have the same stop strings
def _borders(string: str) -> list[int]:
    """For each n, the length of the longest proper beginning of ``string[:n]`` that is also its end."""
    border = [0] * (len(string) + 1)
    for n in range(1, len(string)):
        border[n + 1] = _advance(string, border, border[n], string[n])
    return border


def _advance(string: str, border: list[int], matched: int, character: str) -> int:
    while matched and string[matched] != character:
        matched = border[matched]
    return matched + 1 if string[matched] == character else 0
