"""The container format of a ``.gguf`` file: metadata, and where each tensor's bytes lie. Free of torch.

Layout, all little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)::

    "GGUF"  version u32  tensor count u64  metadata count u64
    metadata:      key, value type u32, value
    tensor infos:  name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    padding to general.alignment (32 where absent), then the tensors at their offsets from here

The ``gguf`` package has a reader too; it makes an array object of every string of the vocabulary, which takes seconds
where this takes a tenth of one, and a server reads the file three times (settings, tokenizer, weights).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from chairlift.model.source import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
SENTENCEPIECE_EOS = 2
END_TOKENS = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>"}
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored.

    Attributes:
        name: such as ``blk.0.attn_q.weight``.
        shape: outermost dimension first, as in torch.
        quantization: how its numbers are stored.
        data: uint8, one row of bytes for each row of numbers; read from disk when touched.
    """

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file.

    Attributes:
        path: where it is.
        metadata: key to value: numbers, strings, booleans, and lists of them.
        tensors: name to tensor, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Reads the metadata of a GGUF file and maps its tensors.

    Raises:
        ModelError: it is not a GGUF file of a known version, is cut short, or is one piece of several.
    """
    with _damage_named(path):
        cursor, tensor_count, metadata = _read_header(path)
        if metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one of {metadata['split.count']} pieces of a model; join them with llama-gguf-split --merge"
            )
        infos = [cursor.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-cursor.offset // alignment) * alignment
        tensors = {name: _tensor(cursor.content, start + at, name, shape, kind) for name, shape, kind, at in infos}
    return GGUFFile(path, metadata, tensors)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Reads the metadata alone, as plain Python values; arrays are lists.

    Raises:
        ModelError: it is not a GGUF file of a known version, or is cut short.
    """
    with _damage_named(path):
        return _read_header(path)[2]


def end_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a sequence: the declared end of sequence first, then those of a turn or a message.

    Many files declare one alone where their chat template uses another; control tokens that are known to end a text
    in every model that has them count too.
    """
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    default = {"eos": SENTENCEPIECE_EOS} if metadata.get("tokenizer.ggml.model") == "llama" else {}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id", default.get(name)) for name in ("eos", "eot", "eom")]
    ends += [i for i, kind in enumerate(types) if kind == CONTROL_TOKEN and tokens[i] in END_TOKENS]
    return tuple(dict.fromkeys(i for i in ends if i is not None))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is cut short or damaged ({error}); fetch it again") from error


def _read_header(path: Path) -> tuple[_Cursor, int, dict[str, Any]]:
    """A cursor behind the metadata, the number of tensors, and the metadata."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(content, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3 can be read")
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(metadata_count)}
    return cursor, tensor_count, metadata


def _tensor(content: mmap.mmap, offset: int, name: str, shape: tuple[int, ...], kind: int) -> GGUFTensor:
    quantization = GGMLQuantizationType(kind)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    row_bytes = shape[-1] // block_size * block_bytes
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    data = np.frombuffer(content, np.uint8, rows * row_bytes, offset).reshape(*shape[:-1], row_bytes)
    return GGUFTensor(name, shape, quantization, data)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, content: mmap.mmap, offset: int) -> None:
        self.content = content
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.content, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def bytes(self, length: int) -> bytes:
        data = self.content[self.offset : self.offset + length]
        if len(data) != length:
            raise ValueError("a value reaches past its end")
        self.offset += length
        return data

    def string(self) -> str:
        # A vocabulary may hold byte sequences that are not UTF-8 on their own.
        return self.bytes(self.scalar("Q")).decode("utf-8", errors="replace")

    def strings(self, count: int) -> Iterator[str]:
        """The next so many: a vocabulary has tens of thousands, and three readers."""
        content, offset, length_at = self.content, self.offset, struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(content, offset)[0]
            if offset > len(content):
                raise ValueError("a value reaches past its end")
            yield content[start:offset].decode("utf-8", errors="replace")
        self.offset = offset

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"unknown value type {kind}")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in SCALARS:
            dtype = np.dtype(SCALARS[item_kind]).newbyteorder("<")
            return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()
        if item_kind == STRING:
            return list(self.strings(count))
        return [self.value(item_kind) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self.string()
        num_dims = self.scalar("I")
        shape = tuple(reversed([self.scalar("Q") for _ in range(num_dims)]))
        kind = self.scalar("I")
        return name, shape, kind, self.scalar("Q")
