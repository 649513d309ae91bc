"""What smoothing has measured of a model, kept on disk: to measure takes longer than everything else that it does.

A file is named after the model's weights and begins with a checksum over the code that measured and over what it
found, so none is taken that belongs to other weights or another version, or is damaged. Numbers that were wrong all the
same would cost precision and nothing else: whatever the factors are, they leave the model what it is but for rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chairlift.model.llama import CausalLM
from chairlift.model.source import cache_directory

logger = logging.getLogger(__name__)

WORTH_BYTES = 32 * 1024**2
"""Models whose weights are smaller are measured in no time."""
CHECKSUM_BYTES = 32


def remembered(model: CausalLM, measure: Callable[[], Tensor]) -> Tensor:
    """Returns what ``measure()`` does, or did once for the same weights.

    Args:
        model: whose weights they are.
        measure: returns [layers, inner] float32.
    """
    if model.weight_bytes < WORTH_BYTES:
        return measure()
    shape = (model.config.num_layers, model.config.intermediate_size)
    try:
        directory = cache_directory()
    except RuntimeError:  # nobody's home: a container without a user
        return measure()
    path = directory / "smoothing" / f"{_fingerprint(model)}.bin"
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        found = content[CHECKSUM_BYTES:]
        if _checksum(found) == content[:CHECKSUM_BYTES] and len(found) == 4 * shape[0] * shape[1]:
            factors = np.frombuffer(found, "<f4").reshape(shape).astype(np.float32)
            if np.isfinite(factors).all():
                return torch.from_numpy(factors)
    measured = measure()
    _keep(measured.numpy().astype("<f4").tobytes(), path)
    return measured


def _keep(found: bytes, path: Path) -> None:
    """Writes a whole file or none; without one, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                file.write(_checksum(found) + found)
                file.close()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        logger.debug("what was measured for int8 is not kept: %s", error)


def _checksum(found: bytes) -> bytes:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(found)
    return digest.digest()


def _fingerprint(model: CausalLM) -> str:
    """Of the configuration and the weights. Of a row of weights only the sum of its bits enters, eight bytes at a time:
    to hash all of them would take a good part of what is saved."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, parameter in model.named_parameters():
        rows = parameter.data.contiguous().view(torch.uint8)
        if rows.ndim > 1 and rows.shape[-1] % 8 == 0:
            rows = rows.view(torch.int64).sum(dim=-1)
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode() + rows.numpy().tobytes())
    return digest.hexdigest()
