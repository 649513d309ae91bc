"""What is left of an engine that fails: its requests where they can go on, and a line that says why where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.engine.process import _failure
from chairlift.engine.records import StepLog
from chairlift.scheduling.plan import RowCounts, StepRecord


def test_clients_are_told_the_cause_in_a_line_and_the_log_has_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        failed = _failure(error)
    assert failed.message == "RuntimeError: two lines"
    assert not failed.expected
    assert "Traceback" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("records", [1, 2000])
def test_a_full_disk_ends_the_step_log_and_nothing_else(records: int, caplog: pytest.LogCaptureFixture) -> None:
    with StepLog("/dev/full") as log:
        for step in range(records):
            log.add(StepRecord(step, 0.0, 0.01, RowCounts(decode=1)))
    log.close()
    assert len(log.records) == records
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
