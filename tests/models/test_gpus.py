"""GPUs: found by any spelling, refused with near names, and what weights leave of them."""

from __future__ import annotations

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import GPUS, OVERHEAD, Weights, find_gpu, find_gpus, memory_for_cache
from tests.cases import each


@each(
    [
        ("8xH100", 8, "H100"), ("8 X h100", 8, "H100"), ("h200", 1, "H200"),
        ("A100", 1, "A100-80GB"), ("2xa100-40gb", 2, "A100-40GB"), ("4 x RTX 4090", 4, "RTX-4090"),
        ("NVIDIA H100", 1, "H100"), ("AMD MI300X", 1, "MI300X"),
        ("rtx_6000_ada", 1, "RTX-6000-Ada"), ("GB200", 1, "GB200"), ("H20", 1, "H20"),
        ("A10G", 1, "A10G"), ("NVIDIA A10G", 1, "A10G"), ("Tesla T4", 1, "T4"),
    ]
)  # fmt: skip
def test_gpus_are_found_by_any_spelling(text: str, number: int, name: str) -> None:
    found = find_gpus(text)
    assert (found.number, found.gpu.name) == (number, name)


@each(
    [
        ("2x8xH100", 16, 8), ("2 x 8 x H100", 16, 8), ("8xH100", 8, 8), ("H100x8", 8, 8),
        ("H100", 1, 1), ("4x1xB200", 4, 1),
    ]
)  # fmt: skip
def test_gpus_on_several_hosts(text: str, number: int, per_host: int) -> None:
    found = find_gpus(text)
    assert (found.number, found.per_host, found.hosts) == (number, per_host, number // per_host)


@each([("8x96GB", 96 * 10**9), ("24 GiB", 24 << 30), ("2x80gb", 80 * 10**9)])
def test_gpus_are_named_by_their_memory(text: str, memory: int) -> None:
    gpu = find_gpus(text).gpu
    assert gpu.memory == memory
    assert find_gpu(gpu.name) == gpu, "fits name their GPU"


@each(["H1000", "8xB100", "", "x", "8x", "H100 " * 50, "🎮"])
def test_a_gpu_nobody_knows_is_refused_with_names(text: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        find_gpus(text)
    assert refusal.value.code is Code.UNKNOWN_GPU
    assert any(name in refusal.value.hint for name in GPUS)


def test_a_name_nearly_right_gets_near_names() -> None:
    with pytest.raises(AtlasError) as refusal:
        find_gpu("H1000")
    assert "H100" in refusal.value.hint
    assert "MI300X" not in refusal.value.hint


@each(["0xH100", "999999xH100", "40x40xH100"])
def test_a_number_of_gpus_that_nobody_has_is_refused(text: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        find_gpus(text)
    assert refusal.value.code is Code.BAD_QUANTITY


@each(GPUS)
def test_a_process_gets_less_than_what_is_sold(name: str) -> None:
    gpu = find_gpu(name)
    sold = int(gpu.sold.split()[0])
    assert 0.9 * sold * 1e9 < gpu.memory < sold * 2**30


def test_what_is_left_is_a_part_of_the_gpu_less_weights_and_overhead() -> None:
    gpu = find_gpu("H200")
    assert memory_for_cache(gpu, 1000) == int(gpu.memory * 0.9) - 1000 - OVERHEAD
    assert memory_for_cache(gpu, 0, utilization=1, overhead=0) == gpu.memory


def test_fp8_deepseek_leaves_room_on_eight_h200_and_none_on_eight_h100() -> None:
    held = Weights.load("DeepSeek-V3.2").per_rank(tp=8)
    assert memory_for_cache(find_gpu("H200"), held) < 0.35 * find_gpu("H200").memory
    with pytest.raises(AtlasError) as refusal:
        memory_for_cache(find_gpu("H100"), held)
    assert refusal.value.code is Code.WEIGHTS_TOO_LARGE
    assert "GiB" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@each([0, 1.5, -1, float("nan")])
def test_a_utilization_that_is_no_part_is_refused(utilization: float) -> None:
    with pytest.raises(AtlasError) as refusal:
        memory_for_cache(find_gpu("H100"), 0, utilization=utilization)
    assert refusal.value.code is Code.BAD_QUANTITY
