"""Servers that tests share, and leave as they found them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import Server, running_server
from support.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model in fp32, for tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("log") / "steps.jsonl"
    arguments = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny", "--max-num-seqs", "64")
    with running_server(log, str(tiny_model), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model in its default precision."""
    log = tmp_path_factory.mktemp("log") / "steps.jsonl"
    with running_server(log, "smollm2", "--max-model-len", "2048") as server:
        yield server
