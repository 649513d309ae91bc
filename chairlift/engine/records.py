"""Step records: the last ones in memory, all of them in a file if asked for."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from chairlift.scheduling.plan import StepRecord

RING_SIZE = 4096


class StepLog:
    """Keeps the newest :data:`RING_SIZE` records, and writes each as a line of JSON if there is a path.

    Adding one costs a few microseconds, and some ten more with a file; a step takes milliseconds.
    """

    def __init__(self, path: str | Path | None = None, ring_size: int = RING_SIZE) -> None:
        self.records: deque[StepRecord] = deque(maxlen=ring_size)
        # Buffered: a line that waits in memory is written at the latest when the log is closed.
        self._file = Path(path).open("w", encoding="utf-8") if path is not None else None  # noqa: SIM115

    def add(self, record: StepRecord) -> None:
        """Takes the record of a step."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Completes the file. Safe to call twice."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
