"""Clients that are installed, over loopback. Those that are not run by scripts/clients.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import Server

HERE = Path(__file__).parent
PACKAGES = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain_openai": "langchain_openai",
    "instructor": "instructor",
    "pydantic_ai_slim": "pydantic_ai",
    "llm": "llm",
}


@pytest.mark.parametrize("client", PACKAGES)
def test_client(tool_server: Server, client: str):
    if importlib.util.find_spec(PACKAGES[client]) is None:
        pytest.skip(f"{client} is not installed; scripts/clients.py runs it in an environment of its own")
    result = subprocess.run(
        [sys.executable, str(HERE / f"exercise_{client}.py"), tool_server.url, "tiny"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    tool_server.wait_until_idle()


def test_every_client_is_known():
    assert sorted(path.stem.removeprefix("exercise_") for path in HERE.glob("exercise_*.py")) == sorted(PACKAGES)
