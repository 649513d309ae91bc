"""Log lines, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from chairlift import logs

logger = logging.getLogger("chairlift.test")
other = logging.getLogger("other.test")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("chairlift")
    before = root.handlers, root.level, own.level
    yield
    root.handlers, root.level = before[0], before[1]
    own.setLevel(before[2])
    logging.captureWarnings(False)


def written(config: logs.LogConfig) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(config, stream)
    return stream


def fail() -> None:
    try:
        raise ValueError("no\nluck")
    except ValueError:
        logger.exception("it failed")


def test_text() -> None:
    stream = written(logs.LogConfig(process="engine"))
    logger.info(
        "request", extra={logs.FIELDS: {"status": 200, "path": "/a b\nINFO forged", "reasons": ["stop", "length"]}}
    )
    time, line = stream.getvalue().split(" ", 1)
    assert time.endswith("Z")
    assert line == 'INFO engine chairlift.test: request status=200 path="/a b\\nINFO forged" reasons=stop,length\n'
    fail()
    assert stream.getvalue().splitlines()[-2:] == ["ValueError: no", "luck"]


def test_json_is_a_line_each_whatever_is_in_it() -> None:
    stream = written(logs.LogConfig(format="json"))
    logger.warning("a\nb", extra={logs.FIELDS: {"seconds": 0.5, "reasons": ["stop"]}})
    fail()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["process"], first["logger"]) == ("warning", "server", "chairlift.test")
    assert (first["message"], first["seconds"], first["reasons"]) == ("a\nb", 0.5, ["stop"])
    assert second["exception"].endswith("ValueError: no\nluck")


def test_the_level_is_of_this_package_and_others_begin_at_warnings() -> None:
    stream = written(logs.LogConfig(level="debug"))
    logger.debug("own")
    other.info("not shown")
    other.warning("shown")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["own", "shown"]
    stream = written(logs.LogConfig(level="error"))
    logger.warning("not shown")
    assert not stream.getvalue()


def test_warnings_are_log_lines_too() -> None:
    stream = written(logs.LogConfig(format="json"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.configure(logs.LogConfig(format="json"), stream)
        warnings.warn("beware", stacklevel=1)
    assert "beware" in json.loads(stream.getvalue())["message"]
