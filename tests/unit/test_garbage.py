"""The garbage collector."""

from __future__ import annotations

import gc

from chairlift.garbage import THRESHOLD, keep_collections_short


def test_what_is_loaded_is_not_looked_through_again() -> None:
    before = gc.get_threshold()
    loaded = [[] for _ in range(10)]
    try:
        keep_collections_short()
        assert gc.get_threshold()[0] == THRESHOLD
        assert not any(kept is loaded for kept in gc.get_objects())  # frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert any(kept is loaded for kept in gc.get_objects())
