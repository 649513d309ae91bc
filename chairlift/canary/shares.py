"""Which side a session is on: the same one for all its requests, and exact shares over all sessions.

Each session has a *position* from 0 to 1 for good, and is the candidate's while its position lies below the candidate's
share. So a larger share only ever moves sessions from stable to the candidate, never back.

A hash as the position would give shares that are right on average only: of 200 sessions of 10 requests each, 10 % would
be anything from 6 to 14 %. So new sessions take turns (error diffusion): of any n in a row the candidate gets its share
of n, give or take one. As sessions are not of one size, its part of the turns is a little larger while it is owed
requests, and a little smaller while it had too many. Within a side's part of [0, 1) positions are multiples of the
golden ratio, so that any larger share moves just so many sessions that the share of the old ones is right as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

MOST_SESSIONS = 1 << 16
MOST_DEBT = 256.0
"""Requests. A session that sends thousands would otherwise run up a debt that new sessions pay for ever."""
CATCH_UP = 64.0
"""Requests. A debt of as many makes the candidate's part of the turns larger by 1, were it not for the next limit. A
smaller number would overshoot: what a session will send is not known when it is placed."""
MOST_TURNS = 2.0
"""Times its share of the turns that a side may get to catch up, so that no rush comes over it."""

GOLDEN_RATIO = 0.6180339887498949


class Splitter:
    """Places sessions, and remembers where.

    Args:
        positions: of sessions from before a restart, the longest unused first.
        most_sessions: beyond that, the longest unused are forgotten; should one come back, it is placed as a new one.
    """

    def __init__(self, positions: Iterable[tuple[str, float]] = (), most_sessions: int = MOST_SESSIONS) -> None:
        self._positions = OrderedDict(positions)
        self._most_sessions = most_sessions
        self._share = 0.0
        self._debt = 0.0  # requests that the candidate is owed; that stable is owed if negative
        self._turn = 0.0  # sessions that the candidate is owed
        self._placed = {True: len(self._positions), False: len(self._positions)}

    def set_share(self, share: float) -> None:
        """Gives the candidate another share, from 0 to 1."""
        if share != self._share:
            self._share, self._debt, self._turn = share, 0.0, 0.0

    def is_candidates(self, session: str | None) -> bool:
        """Returns which side the next request of a session goes to, and counts it.

        Args:
            session: any text that names it; ``None`` for a request that belongs to none.
        """
        candidate = self._owed() if session is None else self._position(session) < self._share
        debt = self._debt + self._share - candidate
        self._debt = max(-MOST_DEBT, min(MOST_DEBT, debt))
        return candidate

    @property
    def positions(self) -> list[tuple[str, float]]:
        """Sessions (as hashes) and their positions, the longest unused first."""
        return list(self._positions.items())

    def __len__(self) -> int:
        return len(self._positions)

    def _owed(self) -> bool:
        """Whether the next request that has no session is the candidate's: it has then had nearer to its share."""
        if self._share in (0.0, 1.0):
            return self._share == 1.0
        return self._debt + self._share >= 0.5

    def _takes_turn(self) -> bool:
        """Whether the next new session is the candidate's."""
        share = self._share
        if share in (0.0, 1.0):
            return share == 1.0
        wanted = share + self._debt / CATCH_UP
        least = max(share / MOST_TURNS, 1 - MOST_TURNS * (1 - share))
        most = min(MOST_TURNS * share, 1 - (1 - share) / MOST_TURNS)
        self._turn += max(least, min(most, wanted))
        if self._turn < 0.5:
            return False
        self._turn -= 1
        return True

    def _position(self, session: str) -> float:
        # 64 bits of hash: names can be long and private, and two of 65,536 coincide in one of ten billion runs.
        name = hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        position = self._positions.get(name)
        if position is None:
            position = self._place(self._takes_turn())
            self._positions[name] = position
            if len(self._positions) > self._most_sessions:
                self._positions.popitem(last=False)
        else:
            self._positions.move_to_end(name)
        return position

    def _place(self, candidate: bool) -> float:
        within = (0.5 + self._placed[candidate] * GOLDEN_RATIO) % 1.0
        self._placed[candidate] += 1
        share = self._share
        return within * share if candidate else min(share + within * (1 - share), 1 - 2**-53)
