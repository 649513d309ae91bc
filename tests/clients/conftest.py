"""A server whose model costs nothing and whose chat template has tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server import Server, running_server
from support.tiny_model import save_tiny_model, teach_tools


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tools")
    save_tiny_model(directory)
    teach_tools(directory)
    log = tmp_path_factory.mktemp("log") / "steps.jsonl"
    options = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny")
    with running_server(log, str(directory), *options) as server:
        yield server
