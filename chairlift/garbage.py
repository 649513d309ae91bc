"""Keeps Python's garbage collector out of the way of a process that answers in milliseconds."""

from __future__ import annotations

import gc

THRESHOLD = 20_000
"""Objects made and not yet freed before the young ones are looked through."""


def put_off_collections() -> None:
    """Call it before a process loads much, and :func:`keep_collections_short` after: hardly any of what libraries make
    as they are imported is garbage, and looking for it takes a tenth of the time."""
    gc.disable()


def keep_collections_short() -> None:
    """Call it once everything is loaded.

    What is there by then stays for good, so that no collection needs to go through it again: tens of milliseconds, in
    which no token moves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
    gc.enable()
