"""What a user can mend is told in one line, with an exit status, and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.cli import main
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.build import build_core
from chairlift.engine.client import EngineDeadError
from chairlift.engine.executor import Capacity
from chairlift.engine.llm import LLM
from chairlift.engine.remote import RemoteEngine
from chairlift.model.source import ModelSource
from chairlift.text.errors import PromptError


@pytest.fixture(autouse=True)
def the_log_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.logs.configure", lambda _: None)


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["chairlift", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.strip().splitlines()[-1]


def broken_models(directory: Path) -> dict[str, str]:
    """Models that cannot be loaded, with what has to be said of each."""
    (directory / "notes").write_text("hello")
    (directory / "empty").mkdir()
    (directory / "magic.gguf").write_text("hello world")
    (directory / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    for name, config, tokenizer in (("config", "{", "{}"), ("tokenizer", "{}", "{"), ("bytes", "\xff", "{}")):
        model = directory / name
        model.mkdir()
        (model / "model.safetensors").touch()
        (model / "config.json").write_text(config, "latin-1")
        (model / "tokenizer.json").write_text(tokenizer)
    return {
        "notes": "is a file but not a .gguf", "empty": "has no config.json", "magic.gguf": "is not a GGUF file",
        "short.gguf": "short.gguf", "config": "config", "tokenizer": "tokenizer.json", "bytes": "bytes",
        "absent": "there is no model",
    }  # fmt: skip


def test_models_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in broken_models(tmp_path).items():
        line = run("serve", str(tmp_path / name), "--port", "0", monkeypatch=monkeypatch, capsys=capsys)
        assert line.startswith("chairlift: error: ")
        assert said in line
    line = run("serve", "~nobody-of-this-name/x", "--port", "0", monkeypatch=monkeypatch, capsys=capsys)
    assert "home directory" in line


def test_an_engine_that_dies_while_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def dies(engine: RemoteEngine) -> None:
        raise EngineDeadError("out of luck")

    monkeypatch.setattr(RemoteEngine, "launch", lambda _: None)
    monkeypatch.setattr(RemoteEngine, "wait_until_loaded", dies)
    monkeypatch.setattr("chairlift.model.source.resolve", lambda *_: ModelSource("m", "gguf", Path("m")))
    monkeypatch.setattr("chairlift.text.tokenizer.load_tokenizer", lambda _: None)
    assert run("serve", "--port", "0", monkeypatch=monkeypatch, capsys=capsys) == "chairlift: error: out of luck"


@pytest.fixture
def llm() -> LLM:
    """One that can check prompts, and do nothing else."""
    capacity = Capacity(num_blocks=1, block_size=16, max_model_len=16, vocab_size=300)
    llm = LLM.__new__(LLM)
    llm.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))  # type: ignore[assignment]
    llm.core = SimpleNamespace(executor=SimpleNamespace(capacity=lambda: capacity), close=lambda: None)  # type: ignore[assignment]
    return llm


@pytest.mark.parametrize(("prompt", "said"), [("", "prompt 0 is empty"), ("a" * 16, "prompt 0 has 16 tokens")])
def test_prompts_that_cannot_be_completed(
    llm: LLM, prompt: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LLM, "from_config", lambda _: llm)
    line = run("generate", "--no-chat", prompt, monkeypatch=monkeypatch, capsys=capsys)
    assert line.startswith(f"chairlift: error: {said}")


@pytest.mark.parametrize("token", [-1, 300, 1.5, "a"])
def test_what_is_no_token_id(llm: LLM, token: Any) -> None:
    with pytest.raises(PromptError, match="prompt 0 holds token ids outside of"):
        llm.generate([[1, token]])


def test_a_step_log_that_cannot_be_written_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no model"), step_log=str(tmp_path / "no" / "steps.jsonl"))
    with pytest.raises(ConfigError, match=r"cannot write --step-log .*: No such file or directory"):
        build_core(config, list)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--swap-space", "nan"), "--swap-space"),
        (("--static-batch-timeout", "inf"), "--static-batch-timeout"),
        (("--step-timeout", "0"), "--step-timeout"),
        (("--num-threads", "99999999999999999999"), "--num-threads"),
        (("--request-timeout", "0"), "--request-timeout"),
        (("--shutdown-timeout", "-1"), "--shutdown-timeout"),
        (("--kv-cache-memory-bytes", "9999999TiB"), "--kv-cache-memory-bytes"),
    ],
)
def test_flags_that_cannot_work(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = run("serve", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert line.startswith(f"chairlift: error: {said} must be ")
