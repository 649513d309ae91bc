"""Tensors of a checkpoint in safetensors, of one file or of many."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.model.source import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsTensor:
    """A :class:`~chairlift.model.loader.weights.StoredTensor` in an open file."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        shape: list[int] = self._stored.get_shape()
        return shape

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The values of a part."""
        values: Tensor = self._stored[index]
        return values


def iterate_safetensors(directory: Path) -> Iterator[tuple[str, SafetensorsTensor]]:
    """Yields every tensor by name; it can be read until the next one is asked for.

    Raises:
        ModelError: a file is missing or damaged; it is named.
    """
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, SafetensorsTensor(file.get_slice(name))
        except SafetensorError as error:
            raise ModelError(f"{path} is cut short or damaged ({error}); fetch it again") from error


def _files(directory: Path) -> list[Path]:
    """The files that make up the checkpoint: those that its index names, else the one of the usual name, else all."""
    index = directory / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is damaged ({error}); fetch it again") from error
        if missing := sorted(name for name in named if not (directory / name).is_file()):
            raise ModelError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names; fetch the model again")
        return [directory / name for name in sorted(named)]
    single = directory / SINGLE
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
