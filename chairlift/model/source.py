"""From the ``--model`` argument to files on disk. Free of torch, so that the server's process can use it too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


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
