"""The arithmetic of the KV cache's size, with invented figures and invented control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from chairlift.config import ConfigError
from chairlift.execution.memory import (
    activation_bytes,
    available_host_memory,
    explicit_budget,
    num_kv_blocks,
    resolve_max_model_len,
    shared_budget,
)
from chairlift.model.config import ModelConfig

MIB = 1024**2
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=2048,
)


def test_a_share_less_what_is_in_use() -> None:
    budget = shared_budget(total=1000, share=0.9, in_use=300, reserve=50, device="cuda:0")
    assert budget.num_bytes == 550
    assert budget.flag == "--gpu-memory-utilization"


def test_whole_blocks_only() -> None:
    blocks = num_kv_blocks(
        explicit_budget(100 * 16 * 10 + 159), bytes_per_token=10, block_size=16, max_model_len=64, max_num_seqs=1000
    )
    assert blocks == 100


def test_no_more_than_can_ever_be_used() -> None:
    blocks = num_kv_blocks(explicit_budget(10**12), bytes_per_token=10, block_size=16, max_model_len=65, max_num_seqs=3)
    assert blocks == 3 * 5


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_one_full_sequence_is_the_least(spare: int, fits: bool) -> None:
    def blocks() -> int:
        return num_kv_blocks(
            explicit_budget(7 * 16 * 10 + spare), bytes_per_token=10, block_size=16, max_model_len=100, max_num_seqs=8
        )

    if fits:
        assert blocks() == 7
    else:
        with pytest.raises(ConfigError):
            blocks()


def test_too_small_states_the_sum_and_the_largest_length() -> None:
    budget = shared_budget(total=100 * MIB, share=0.5, in_use=20 * MIB, reserve=10 * MIB, device="the CPU")
    with pytest.raises(ConfigError) as caught:
        num_kv_blocks(budget, bytes_per_token=MIB, block_size=16, max_model_len=30, max_num_seqs=8)
    message = str(caught.value)
    assert "--max-model-len 30: at 1048576 bytes a token and in blocks of 16 it needs 32.0 MiB" in message
    assert "50% of 100.0 MiB on the CPU, less 20.0 MiB" in message
    assert "less 10.0 MiB for activations, leaves 20.0 MiB, enough for 16 tokens" in message
    assert message.endswith("lower --max-model-len to 16 or less, or raise --gpu-memory-utilization")
    assert num_kv_blocks(budget, bytes_per_token=MIB, block_size=16, max_model_len=16, max_num_seqs=8) == 1


def test_nothing_left_does_not_advise_a_length_of_zero() -> None:
    budget = shared_budget(total=100, share=0.5, in_use=70, reserve=0, device="the CPU")
    with pytest.raises(ConfigError, match=r"leaves 0.0 MiB, enough for 0 tokens; raise --gpu-memory-utilization$"):
        num_kv_blocks(budget, bytes_per_token=1, block_size=16, max_model_len=16, max_num_seqs=8)


def test_explicit_bytes_name_their_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes is 0\.0 MiB.*or raise --kv-cache-memory-bytes"):
        num_kv_blocks(explicit_budget(170), bytes_per_token=10, block_size=16, max_model_len=17, max_num_seqs=8)


def test_max_model_len() -> None:
    assert resolve_max_model_len(None, MODEL) == 2048
    assert resolve_max_model_len(100, MODEL) == 100
    assert resolve_max_model_len(2048, MODEL) == 2048
    with pytest.raises(
        ConfigError, match=r"--max-model-len 2049 is longer than the 2048 positions .* use 2048 or less"
    ):
        resolve_max_model_len(2049, MODEL)


def test_activations_grow_with_rows_sequences_and_length() -> None:
    sizes = {"num_tokens": 512, "num_seqs": 32, "max_model_len": 1024, "itemsize": 4}
    base = activation_bytes(MODEL, **sizes)
    # The fused projections and the MLP of every row, and two copies of the logits in float32.
    assert base > 512 * (4 * 2 * 128) + 32 * 1000 * 8
    for name in sizes:
        assert activation_bytes(MODEL, **{**sizes, name: 2 * sizes[name]}) > base


class Groups:
    """Control groups in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.root.mkdir()
        self.process = root / "process"

    def v2(self, group: str, limit: int | str, used: int, cached: int = 0) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    def v1(self, group: str, limit: int, used: int, cached: int = 0) -> None:
        folder = self.root / "memory" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")

    def available(self, *lines: str) -> int:
        self.process.write_text("".join(f"{line}\n" for line in lines))
        return available_host_memory(self.root, self.process)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    class Machine:
        available = 1000 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    return Groups(tmp_path)


def test_without_groups_it_is_the_machine(groups: Groups) -> None:
    assert available_host_memory(groups.root, groups.process) == 1000 * MIB
    assert groups.available("0::/") == 1000 * MIB


def test_v2_takes_the_tightest_group_on_the_path(groups: Groups) -> None:
    groups.v2("a", 800 * MIB, 300 * MIB)
    groups.v2("a/b", "max", 200 * MIB)
    groups.v2("a/b/c", 900 * MIB, 100 * MIB)
    groups.v2("elsewhere", 1 * MIB, 0)
    assert groups.available("0::/a/b/c") == 500 * MIB


def test_cached_pages_count_as_free(groups: Groups) -> None:
    groups.v2("a", 800 * MIB, 300 * MIB, cached=50 * MIB)
    assert groups.available("0::/a") == 550 * MIB


def test_v1_reads_the_memory_controller(groups: Groups) -> None:
    groups.v1("job", 600 * MIB, 100 * MIB, cached=20 * MIB)
    assert groups.available("9:cpu,cpuacct:/other", "4:memory,hugetlb:/job", "0::/") == 520 * MIB


def test_a_limit_beyond_the_machine_changes_nothing(groups: Groups) -> None:
    groups.v1("job", 9223372036854771712, 100 * MIB)
    assert groups.available("4:memory:/job") == 1000 * MIB


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../host.slice"])
def test_inside_a_container_the_mount_is_its_group(groups: Groups, path: str) -> None:
    groups.v2("", 400 * MIB, 100 * MIB)
    assert groups.available(f"0::{path}") == 300 * MIB


def test_a_group_over_its_limit_has_nothing_left(groups: Groups) -> None:
    groups.v2("a", 100 * MIB, 300 * MIB)
    assert groups.available("0::/a") == 0


def test_too_large_a_step_is_told_by_its_own_flags():
    """It is the activations that leave no room: a smaller step would."""
    sizes = {"bytes_per_token": MIB, "block_size": 1, "max_model_len": 30, "max_num_seqs": 4}
    large = shared_budget(total=100 * MIB, share=0.5, in_use=10 * MIB, reserve=35 * MIB, device="the CPU")
    with pytest.raises(ConfigError, match="; lower --max-num-seqs or --max-num-batched-tokens, which activations"):
        num_kv_blocks(large, **sizes)
    small = shared_budget(total=100 * MIB, share=0.5, in_use=30 * MIB, reserve=5 * MIB, device="the CPU")
    with pytest.raises(ConfigError, match="; lower --max-model-len to 15 or less"):
        num_kv_blocks(small, **sizes)
