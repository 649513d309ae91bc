"""Pages that are generated are up to date, and flags that pages name exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from fastapi.routing import APIRoute

from chairlift.api.openapi import document
from chairlift.cli import COMMANDS
from chairlift.config import TOOL_CALL_PARSERS
from chairlift.text.tool_calls import PARSERS

ROOT = Path(__file__).parent.parent.parent


def serve_flags() -> set[str]:
    command = importlib.import_module("chairlift.cli.serve").serve
    return {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}


def test_generated_pages_are_up_to_date():
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr


def test_pages_tell_of_everything():
    api, flags = ((ROOT / "docs" / page).read_text("utf-8") for page in ("api.md", "flags.md"))
    assert all(f"\n### {name}\n" in api for name in ("CompletionBody", "ChatBody", "ResponsesBody", "TokenizeBody"))
    assert all(f"\n## chairlift {name}\n" in flags for name in COMMANDS)
    serve = flags.partition("## chairlift serve")[2].partition("\n## ")[0]
    assert all(f"`{flag}" in serve or f"{flag}`" in serve or f"{flag} " in serve for flag in serve_flags())
    assert not re.findall(r"^\| `--.*\|\s*\|$", serve, re.MULTILINE), "a flag without help"


def rows_of_ours(section: str) -> list[tuple[str, list[str]]]:
    """What stands in the second column of a table's rows, and the flags in it."""
    text = (ROOT / "docs" / "migrating.md").read_text("utf-8")
    body = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in body.splitlines() if line.startswith("| ")]
    return [(cell, re.findall(r"`(--[\w-]+)", cell)) for cell in cells[1:]]


@pytest.mark.parametrize("section", ["From vLLM", "From Text Generation Inference", "From a static server"])
def test_flags_to_migrate_to_exist(section: str):
    known = serve_flags()
    rows = rows_of_ours(section)
    flags = [flag for _, found in rows for flag in found]
    assert len(flags) > 4
    assert [flag for flag in flags if flag not in known] == []


def test_parsers_by_flag_are_those_there_are():
    assert sorted(PARSERS) == sorted(TOOL_CALL_PARSERS)


def test_every_route_is_described(api_routes: list[APIRoute]):
    described = {(path, method.upper()) for path, operations in document()["paths"].items() for method in operations}
    served = {(re.sub(r":path}", "}", route.path), method) for route in api_routes for method in route.methods or ()}
    assert described == {(path, method) for path, method in served if method != "HEAD"}


@pytest.fixture
def api_routes() -> list[APIRoute]:
    import tokenizers
    from tokenizers import decoders, models

    from chairlift.api.app import create_app
    from chairlift.engine.executor import Capacity
    from chairlift.text.tokenizer import Tokenizer

    class Engine:
        capacity = Capacity(num_blocks=1, block_size=16, max_model_len=16, vocab_size=1)

        def subscribe(self, on_step: object) -> None:
            pass

    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    app = create_app(Engine(), Tokenizer(backend), served_model_names=["m"])  # type: ignore[arg-type]
    return [route for route in app.routes if isinstance(route, APIRoute)]
