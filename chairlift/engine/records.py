"""Step records: the last ones in memory, all of them in a file if asked for."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TextIO

from chairlift.scheduling.plan import StepRecord

logger = logging.getLogger(__name__)

RING_SIZE = 4096


def _open(path: Path, *, append: bool) -> TextIO:
    file = path.open("a+" if append else "w", encoding="utf-8")
    if append and (size := file.tell()):
        file.seek(size - 1)
        if file.read() != "\n":  # an engine that was killed left half a line
            file.write("\n")
    return file


class StepLog:
    """Keeps the newest :data:`RING_SIZE` records, and writes each as a line of JSON if there is a path.

    With ``append`` it adds to what the file has.

    Adding one costs a few microseconds, and some ten more with a file; a step takes milliseconds.
    """

    def __init__(self, path: str | Path | None = None, ring_size: int = RING_SIZE, *, append: bool = False) -> None:
        self.records: deque[StepRecord] = deque(maxlen=ring_size)
        # Buffered: a line that waits in memory is written at the latest when the log is closed.
        self._file = None if path is None else _open(Path(path), append=append)

    def add(self, record: StepRecord) -> None:
        """Takes the record of a step."""
        self.records.append(record)
        if self._file is not None:
            try:
                self._file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Completes the file. Safe to call twice."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk costs the log, and not the requests."""
        file, self._file = self._file, None
        assert file is not None  # noqa: S101 - only a write can fail
        logger.warning("the step log ends here, incomplete: %s", error)
        with contextlib.suppress(OSError):  # closing tries once more to write what is left
            file.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
