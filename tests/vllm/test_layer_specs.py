"""Specs in vLLM's shapes, described without vLLM: topologies, drafters, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.engines.vllm import describe_engine, describe_stage, join_stages
from kvatlas.engines.vllm.describe import check_windows
from kvatlas.engines.vllm.transfer_groups import TransferGroup
from kvatlas.errors import Code
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint, route
from kvatlas.specs import FullAttention, Ring, SlidingAttention, Visibility
from tests.vllm.shapes import (
    AttentionSpec,
    Config,
    FullAttentionSpec,
    Group,
    SlidingWindowSpec,
    vllm_config,
)

FULL = FullAttentionSpec(block_size=64)
SLIDING = SlidingWindowSpec(block_size=64)


def of(*groups: tuple[Any, list[str]], **about: Any) -> Config:
    return Config([Group(spec, names) for spec, names in groups], **about)


def test_heads_are_those_of_the_whole_model() -> None:
    for tp, local, total in ((1, 2, 2), (2, 1, 2), (4, 2, 8), (4, 1, 2), (4, 1, 1)):
        spec = replace(FULL, num_kv_heads=local)
        made = describe_engine(vllm_config(tp=tp, kv_heads=total), of((spec, ["l.0.attn"])))
        found = made.spec("l.0.attn")
        assert isinstance(found, FullAttention)
        assert found.heads == total
    with pytest.raises(AtlasError) as refusal:
        describe_engine(
            vllm_config(tp=4, kv_heads=8), of((replace(FULL, num_kv_heads=1), ["l.0.attn"]))
        )
    assert refusal.value.code is Code.ENGINE_REFUSES
    assert "l.0.attn" in str(refusal.value)


def test_a_drafter_is_a_layer_of_its_own() -> None:
    """Of which no config says anything: vLLM's spec says enough."""
    plain = of((FULL, ["l.0.attn", "l.1.attn"]))
    drafted = of((FULL, ["l.0.attn", "l.1.attn", "draft.layers.2.self_attn.attn"]))
    without, with_one = (describe_engine(vllm_config(), config) for config in (plain, drafted))
    assert len(with_one.layers) == 3
    assert fingerprint(without) != fingerprint(with_one)
    with pytest.raises(AtlasError) as refusal:
        route(without, with_one)
    assert refusal.value.code is Code.MISSING_LAYERS


def test_an_engine_without_the_hybrid_manager_is_the_same_model() -> None:
    one = describe_engine(vllm_config(), of((FULL, ["l.0.attn"]), (SLIDING, ["l.1.attn"])))
    whole = replace(FULL, sliding_window=64)
    specs = {"l.0.attn": FULL, "l.1.attn": whole}
    several = SimpleNamespace(kv_cache_specs=specs, block_size=64)
    config = of((FULL, ["l.0.attn", "l.1.attn"]))
    tensors = config.kv_cache_tensors
    config.groups[0].kv_cache_spec = several
    off = SimpleNamespace(
        transfer_groups=config.groups, kv_cache_tensors=tensors, num_blocks=16,
        kv_cache_layout="LBHNC",
    )  # fmt: skip
    other = describe_engine(vllm_config(), off)
    assert isinstance(other.spec("l.1.attn"), SlidingAttention)
    assert [group.kind for group in other.groups] == ["full_attention"]
    assert fingerprint(one) == fingerprint(other)
    # What one keeps as a window alone moves as a window; between two that keep all, all moves.
    tables: dict[str, Any] = {
        "destination_rank": 0,
        "tokens": 600,
        "destination_blocks": {0: list(range(10))},
    }
    part = route(one, other).needed_bytes(**tables)
    assert part < route(other, other).needed_bytes(**tables)


def test_a_window_that_vllm_says_of_a_whole_group_is_that_of_its_own_layers_alone() -> None:
    """Without the hybrid manager one spec stands for layers that see all and that see a window."""
    names = ["l.0.attn", "l.1.attn"]
    one = describe_engine(vllm_config(), of((FULL, names[:1]), (SLIDING, names[1:])))
    merged = of((replace(FULL, sliding_window=64), names))
    seen = {"l.0.attn": Visibility(), "l.1.attn": Visibility(window=64)}
    other = describe_engine(vllm_config(), merged, seen=seen)
    assert fingerprint(one) == fingerprint(other)
    assert isinstance(other.spec("l.0.attn"), FullAttention)
    with pytest.raises(AtlasError) as refusal:
        describe_engine(vllm_config(), merged)
    assert "l.0.attn" in str(refusal.value), "nobody says which layers see all"
    config = of((FULL, names))
    with pytest.raises(AtlasError) as refusal:
        check_windows("l.1.attn", config.groups[0].kv_cache_spec, seen["l.1.attn"])
    assert "window of 64" in str(refusal.value), "the scheduler's side would not know of it"


def test_pipeline_stages_make_up_one_plan() -> None:
    stages = [
        describe_stage(vllm_config(), of((FULL, [f"l.{n}.attn"]), (SLIDING, [f"s.{n}.attn"])))
        for n in (0, 1)
    ]
    made = join_stages(stages)
    assert (made.pp, len(made.groups), len(made.layers)) == (2, 2, 4)
    assert fingerprint(made) == fingerprint(
        describe_engine(
            vllm_config(),
            of((FULL, ["l.0.attn", "l.1.attn"]), (SLIDING, ["s.0.attn", "s.1.attn"])),
        )
    )
    other = describe_stage(vllm_config(tp=2), of((FULL, ["l.1.attn"]), (SLIDING, ["s.1.attn"])))
    with pytest.raises(AtlasError):
        join_stages([stages[0], other])


def test_blocks_that_vllm_divides_for_its_kernels() -> None:
    made = describe_engine(vllm_config(), of((FULL, ["l.0.attn"])), kernel_blocks={"l.0.attn": 16})
    region, _ = made.region_of("l.0.attn")
    assert (region.block, region.kernel_block, made.num_blocks) == (64, 16, 16)


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """A kind that keeps other tokens than its spec's bytes say."""


def test_what_is_not_known_is_refused_with_the_layers_name() -> None:
    backends = {"l.0.attn": "CPU_ATTN"}
    for spec, given in (
        (replace(FULL, dtype="torch.bfloat16", item=2), backends),
        (replace(FULL, head_size=80, head_size_v=80), backends),
        (replace(FULL, num_head_slots=3), None),
        (RSWASpec(block_size=64), None),
        (SimpleNamespace(block_size=64), None),
    ):
        with pytest.raises(AtlasError) as refusal:
            describe_engine(vllm_config(), _config(spec), backends=given)
        assert refusal.value.code is Code.ENGINE_REFUSES
        assert "l.0.attn" in str(refusal.value)
    for section, name in (
        ("parallel_config", "decode_context_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size"),
        ("cache_config", "calculate_kv_scales"),
    ):
        config = vllm_config()
        setattr(getattr(config, section), name, 2)
        with pytest.raises(AtlasError) as refusal:
            describe_engine(config, of((FULL, ["l.0.attn"])))
        assert name in str(refusal.value)


def _config(spec: Any) -> Any:
    """A config with one layer, laid out as if its spec were an ordinary one."""
    config = of((FULL, ["l.0.attn"]))
    tensors = config.kv_cache_tensors
    config.groups[0].kv_cache_spec = spec
    return SimpleNamespace(
        transfer_groups=config.groups, kv_cache_tensors=tensors, num_blocks=16,
        kv_cache_layout="LBHNC",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    """vLLM 0.33's spec of a ring: one block per request, with as many states as it has tokens."""

    dtype: str = "torch.bfloat16"
    head_size_v: int = 0
    item: int = 2

    @property
    def num_states(self) -> int:
        return self.block_size


RINGS = {
    "qwen4": ("Qwen4-Exp", "model.layers.3.self_attn.indexer.raw_key_cache", 1),
    "glm5": ("GLM-5.3-Flash", "model.layers.3.self_attn.indexer.tail_cache", 2),
    "step5": ("Step5", "model.layers.1.self_attn.attn.csa_tail_ring", 1),
    "v41": (
        "DeepSeek-V4.1-Flash", "language_model.model.layers.2.attn.compressor.state_cache", 1,
    ),
}  # fmt: skip


def ring_engine(kind: str, rows: int, **about: Any) -> Plan:
    """The plan of an engine's ring, without its other layers."""
    name, layer, heads = RINGS[kind]
    file = Path(__file__).parents[1] / "planning" / "ring_configs" / f"{name}.json"
    config = vllm_config()
    config.model_config.dtype = "torch.bfloat16"
    config.model_config.hf_config = json.loads(file.read_text())
    sizes = {"head_size": 128, "num_kv_heads": heads, **about}
    spec = CircularBufferSpec(block_size=rows, **sizes)
    return describe_engine(config, of((spec, [layer])))


V41_ROW: dict[str, Any] = {"head_size": 1024, "dtype": "torch.float32", "item": 4}


@pytest.mark.parametrize(
    ("kind", "group", "rows", "nbytes", "about"),
    [("qwen4", 4, 4, 256, {}), ("glm5", 16, 16, 256, {}), ("v41", 2, 8, 4096, V41_ROW)],
)
def test_a_ring_has_the_rows_of_the_engine(
    kind: str, group: int, rows: int, nbytes: int, about: dict[str, Any]
) -> None:
    """An engine that decodes speculative tokens has a larger ring; rows move between both."""
    layer, ends = RINGS[kind][1], [ring_engine(kind, n, **about) for n in (rows, 2 * rows)]
    rings = [made.spec(layer) for made in ends]
    assert [ring.rows for ring in rings if isinstance(ring, Ring)] == [rows, 2 * rows]
    assert [group.kind for group in ends[0].groups] == ["ring"]
    assert fingerprint(ends[0]) == fingerprint(ends[1])
    blocks: dict[str, Any] = {"source_blocks": [5], "destination_blocks": [9]}
    way, stop = route(*ends), 5 * rows + 3
    (copy,) = way.bind(source_rank=0, destination_rank=0, **blocks, tokens=stop).copies
    start = (stop - 1) // group * group  # the open group
    views = [[made.view(layer, field.name) for field in made.page(layer).fields] for made in ends]
    first = [
        sorted(int(view(**(dict.fromkeys(view.axes, 0) | {"B": block, "N": row}))) for view in own)
        for own, block, row in zip(views, (5, 9), (start % rows, start % (2 * rows)), strict=True)
    ]
    assert [sorted(copy.source.tolist()), sorted(copy.destination.tolist())] == first
    assert set(copy.length.tolist()) == {(stop - start) * nbytes}


def ring_rows(memory: Any, block: int, block_bytes: int, rows: int) -> Any:
    """The rows of a ring of Step5 as its kernels number them, by hand: 1 KiB each."""
    page = memory[block * block_bytes : block * block_bytes + rows * 1024]
    return page.reshape(rows, 1024)


@pytest.mark.parametrize(("source", "destination"), [(96, 48), (48, 96), (12, 96), (12, 12)])
@pytest.mark.parametrize("stop", [1, 7, 8, 9, 13, 100, 191, 192, 193, 1021])
def test_the_rows_of_step5_arrive_whatever_page_they_fill(
    source: int, destination: int, stop: int
) -> None:
    """By hand: token t is row t % rows. Every row of the open group arrives, and nothing else."""
    ends = [ring_engine("step5", 16, head_size=rows * 32) for rows in (source, destination)]
    rng = np.random.default_rng(stop)
    memories = [rng.integers(0, 256, 16 * rows * 1024, np.uint8) for rows in (source, destination)]
    before = memories[1].copy()
    blocks: dict[str, Any] = {"source_blocks": [5], "destination_blocks": [9]}
    bound = route(*ends).bind(source_rank=0, destination_rank=0, **blocks, tokens=stop)
    for copy in bound.copies:
        for start, to, length in zip(copy.source, copy.destination, copy.length, strict=True):
            memories[1][to : to + length] = memories[0][start : start + length]
    group = range((stop - 1) // 8 * 8, stop)
    theirs = ring_rows(memories[0], 5, source * 1024, source)
    expected = before.copy()
    for token in group:
        into = ring_rows(expected, 9, destination * 1024, destination)
        into[token % destination] = theirs[token % source]
    assert np.array_equal(memories[1], expected)


def test_a_ring_of_step5_in_pieces_is_refused() -> None:
    """Rows are contiguous in no order where a token of another layer follows each token."""
    spec = CircularBufferSpec(block_size=16, head_size=3072, num_kv_heads=1)
    config = of((spec, ["model.layers.1.self_attn.attn.csa_tail_ring"]))
    tensors, groups = config.kv_cache_tensors, config.groups
    apart = SimpleNamespace(
        transfer_groups=groups, kv_cache_tensors=tensors, num_blocks=16, kv_cache_layout="BHNLC"
    )
    file = Path(__file__).parents[1] / "planning" / "ring_configs" / "Step5.json"
    about = vllm_config()
    about.model_config.dtype = "torch.bfloat16"
    about.model_config.hf_config = json.loads(file.read_text())
    tensors[0].layer_stride = 2 * spec.state_content_size_bytes
    with pytest.raises(AtlasError) as refusal:
        describe_engine(about, apart)
    assert refusal.value.code is Code.ENGINE_REFUSES


def test_a_ring_of_other_sizes_is_refused() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("qwen4", {"head_size_v": 128}),
        ("qwen4", {"num_kv_heads": 3}),
        ("step5", {"head_size": 3000}),  # pages that are no whole number of rows
        ("step5", {"head_size": 128}),  # four rows
        ("step5", {"head_size": 3072, "num_kv_heads": 2}),
    ]
    for kind, sizes in wrong:
        with pytest.raises(AtlasError) as refusal:
            ring_engine(kind, 16, **sizes)
        assert refusal.value.code is Code.ENGINE_REFUSES
        assert RINGS[kind][1] in str(refusal.value)


def test_the_scheduler_holds_one_block_of_a_ring() -> None:
    ring = TransferGroup(CircularBufferSpec(block_size=8), 0)
    assert ring.table([7], 1000) == (7,)
    assert ring.entries(0, 1000) == ring.entries(999, 1000) == slice(0, 1)
    assert ring.incomplete_blocks(0, 1000) == 0
    assert ring.partial, "the prefill engine leaves out the last token"
