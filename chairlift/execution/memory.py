"""How much memory there is for the KV cache, and how many blocks that makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil  # type: ignore[import-untyped]

from chairlift.config import ConfigError
from chairlift.model.config import ModelConfig

MIB = 1024**2
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
DEFAULT_SHARE = {"cuda": 0.90, "cpu": 0.50}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """Bytes that the KV cache may take, and where the figure comes from.

    Attributes:
        num_bytes: for keys and values of all layers; may be negative, where the rest takes more than there is.
        explanation: the arithmetic, for an error message.
        flag: the setting that raises it.
        reserve: bytes that are set aside for the activations of a step of the largest size.
    """

    num_bytes: int
    explanation: str
    flag: str
    reserve: int = 0


def explicit_budget(num_bytes: int) -> KVBudget:
    """The budget that the user named."""
    return KVBudget(
        num_bytes=num_bytes,
        explanation=f"--kv-cache-memory-bytes is {_mib(num_bytes)}",
        flag="--kv-cache-memory-bytes",
    )


def shared_budget(*, total: int, share: float, in_use: int, reserve: int, device: str) -> KVBudget:
    """What a share of the device's memory leaves for keys and values.

    Args:
        total: bytes that the share is of: of the device, or on the CPU those that were available before loading.
        share: of it to use, in (0, 1].
        in_use: bytes of it that are taken: by the weights, and on a device by whoever else uses it.
        reserve: bytes that a step may need for activations, logits and sampling.
        device: for the explanation.
    """
    left = int(total * share) - in_use - reserve
    return KVBudget(
        num_bytes=left,
        explanation=(
            f"{share:.0%} of {_mib(total)} on {device}, less {_mib(in_use)} for the weights and all else in use, less "
            f"{_mib(reserve)} for activations, leaves {_mib(max(0, left))}"
        ),
        flag="--gpu-memory-utilization",
        reserve=reserve,
    )


def num_kv_blocks(
    budget: KVBudget, *, bytes_per_token: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> int:
    """The blocks that fit into a budget, and no more than ``max_num_seqs`` sequences of full length can fill.

    Raises:
        ConfigError: not even one sequence of ``max_model_len`` fits.
    """
    blocks = max(0, budget.num_bytes) // (bytes_per_token * block_size)
    blocks_per_sequence = -(-max_model_len // block_size)
    if blocks >= blocks_per_sequence:
        return min(blocks, blocks_per_sequence * max_num_seqs)
    tokens = blocks * block_size
    remedy = f"lower --max-model-len to {tokens} or less, or raise {budget.flag}" if tokens else f"raise {budget.flag}"
    if budget.num_bytes + budget.reserve >= blocks_per_sequence * block_size * bytes_per_token:
        remedy = f"lower --max-num-seqs or --max-num-batched-tokens, which activations are sized by, or {remedy}"
    raise ConfigError(
        f"the KV cache cannot hold one sequence of --max-model-len {max_model_len}: at {bytes_per_token} bytes a token "
        f"and in blocks of {block_size} it needs {_mib(blocks_per_sequence * block_size * bytes_per_token)}, but "
        f"{budget.explanation}, enough for {tokens} tokens; {remedy}"
    )


def num_swap_blocks(swap_bytes: int, *, available: int, block_bytes: int, most: int) -> int:
    """Blocks of swap space on the host, and no more than ``most``, which is all that could ever be swapped.

    Args:
        swap_bytes: what the user gives to it.
        available: bytes of host memory that nothing else needs.
        block_bytes: bytes of a block over all layers.
        most: blocks that all sequences together can fill.

    Raises:
        ConfigError: the host has not so much memory.
    """
    blocks = min(swap_bytes // block_bytes, most)
    if blocks * block_bytes > available:
        raise ConfigError(
            f"--swap-space asks for {_mib(blocks * block_bytes)} of host memory, but only {_mib(max(0, available))} "
            "are left beside weights and KV cache; lower --swap-space, or the memory that the KV cache takes"
        )
    return blocks


def resolve_max_model_len(asked: int | None, config: ModelConfig) -> int:
    """The longest sequence to serve.

    Raises:
        ConfigError: the model was not made for sequences that long.
    """
    if asked is None:
        return config.max_position_embeddings
    if asked > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the {config.max_position_embeddings} positions that the model was "
            f"made for; use {config.max_position_embeddings} or less"
        )
    return asked


def activation_bytes(config: ModelConfig, *, num_tokens: int, num_seqs: int, max_model_len: int, itemsize: int) -> int:
    """An estimate from above of what a step needs besides weights and KV cache, where it cannot be measured.

    Args:
        config: of the model.
        num_tokens: most rows in a step.
        num_seqs: most rows whose next token is sampled.
        max_model_len: the longest sequence.
        itemsize: bytes of one number of the activations.
    """
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # Residual, norm in float32, fused projections and their parts; the widest layer's live at the same time.
    row = itemsize * (2 * config.hidden_size + 2 * attention + 3 * config.intermediate_size) + 12 * config.hidden_size
    # As computed and in float32; the sampler takes few rows at a time.
    logits = config.vocab_size * (itemsize + 2 * 4)
    # A backend may gather one sequence's keys and values in float32.
    gathered = 2 * config.num_kv_heads * config.head_dim * max_model_len * 4
    return num_tokens * row + num_seqs * logits + gathered


def available_host_memory(root: Path = CGROUP_ROOT, process: Path = PROCESS_CGROUPS) -> int:
    """Bytes that this process can still take: of the machine, and within each control group that it belongs to.

    Args:
        root: where control groups are mounted; version 1 has one folder for each controller there.
        process: file that lists this process's groups, one ``id:controllers:path`` a line.
    """
    available: int = psutil.virtual_memory().available
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return available
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits = _group_headroom(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits = _group_headroom(root / "memory", path, *names)
        else:
            continue
        available = min([available, *limits])
    return available


def _group_headroom(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """What each group from the mount down to ``path`` still allows.

    Inside a container the path may be the host's and not exist here, while the container's own group is the mount
    itself; groups without a readable limit are passed over.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    headroom = []
    for depth in range(len(parts) + 1):
        group = mount.joinpath(*parts[:depth])
        try:
            allowed = (group / limit).read_text().strip()
            if allowed == "max":
                continue
            used = int((group / usage).read_text())
            # Cached file pages are given back before the limit bites.
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            headroom.append(max(0, int(allowed) - used + int(fields.get(reclaimable, 0))))
        except (OSError, ValueError):
            continue
    return headroom


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
