"""Log lines, for people or for machines, the same from the server and its engine."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

FIELDS = "fields"
"""Attribute of a log record that has what the message is about, by name: ``logger.info("…", extra={FIELDS: {…}})``."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and in which form.

    Attributes:
        format: "text", or "json" for an object a line.
        level: the least that is logged of this package's own; others' loggers begin at warnings.
        process: which of its processes this is.
    """

    format: str = "text"
    level: str = "info"
    process: str = "server"


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO server chairlift.request: request status=200 path=/v1/completions``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, and the lines of a traceback where there is one."""
        head = f"{_time(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}"
        pairs = (f"{name}={_value(value)}" for name, value in _fields(record).items())
        lines = [" ".join((head, *pairs))]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JSONFormatter(logging.Formatter):
    """``{"time": …, "level": …, "process": …, "logger": …, "message": …}``, then the fields, then the traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, whatever the message has in it."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sends this process's log to ``stream``, by default to the standard error output."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JSONFormatter if config.format == "json" else TextFormatter
    handler.setFormatter(formatter(config.process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("chairlift").setLevel(config.level.upper())
    logging.captureWarnings(True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _value(value: object) -> str:
    """As it is where it is one plain word; else as JSON, so that no client's text begins a line of its own."""
    if isinstance(value, list):
        return ",".join(map(_value, value))
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=,') and text else json.dumps(text)
