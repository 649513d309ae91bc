"""The key-value header of a GGUF file, read in one pass.

The ``gguf`` package wraps every string of a vocabulary in several NumPy views, which takes seconds for the built-in
model; reading the same bytes in order takes a fraction of a tenth of one. Tensors are not looked at.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from chairlift.text.errors import TokenizerError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type -> struct format of one value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Reads the metadata of a GGUF file as plain Python values; arrays become lists.

    Raises:
        TokenizerError: the file is not GGUF, of an unknown version, or ends inside the header.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size < len(_MAGIC):  # an empty file cannot be mapped
            raise TokenizerError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, path).read()


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0

    def read(self) -> dict[str, Any]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise TokenizerError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        self._offset = len(_MAGIC)
        metadata: dict[str, Any] = {}
        try:
            (version,) = self._unpack("<I")
            if version not in _VERSIONS:
                hint = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
                raise TokenizerError(
                    f"{self._path} is GGUF version {version}{hint}; supported: {', '.join(map(str, _VERSIONS))}"
                )
            _tensor_count, count = self._unpack("<QQ")
            for _ in range(count):
                key = self._string()
                (kind,) = self._unpack("<I")
                metadata[key] = self._value(kind)
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise TokenizerError(
                f"{self._path} is damaged: its header breaks off at byte {self._offset} ({error}); download it again"
            ) from error
        return metadata

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._offset)
        self._offset += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        raw = self._data[self._offset : self._offset + length]
        if len(raw) != length:
            raise struct.error(f"a string of {length} bytes does not fit in the file")
        self._offset += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._unpack("<IQ")
            if item_kind in _SCALARS:
                return list(self._unpack(f"<{length}{_SCALARS[item_kind]}"))
            return [self._value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return self._unpack(f"<{_SCALARS[kind]}")[0]
