"""What each rank holds: together all of the model, each byte as often as replicas say."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvatlas import AtlasError, Code, Field
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Rwkv7,
    ShortConv,
    Spec,
)
from tests.cases import each

SPECS: dict[str, Spec] = {
    "dense": FullAttention(heads=8, head_dim=4),
    "few heads": FullAttention(heads=2, head_dim=4),
    "six heads": FullAttention(heads=6, head_dim=4),
    "nvfp4": FullAttention(heads=4, head_dim=16, cache="nvfp4", packing="head_groups"),
    "planes": FullAttention(heads=4, head_dim=4, packing="planes"),
    "mla": LatentAttention(latent=8, rope=4),
    "mamba1": Mamba1(inner=24, state_size=2),
    "mamba2": Mamba2(heads=8, head_dim=2, groups=8, state_size=3),
    "mamba2 one group": Mamba2(heads=8, head_dim=2, groups=1, state_size=3),
    "mamba2 two groups": Mamba2(heads=8, head_dim=2, groups=2, state_size=3),
    "gdn": GatedDeltaNet(key_heads=4, value_heads=8, key_dim=3, value_dim=2),
    "kda": KimiDelta(heads=8, head_dim=4),
    "lightning": LightningAttention(heads=8, head_dim=3),
    "short conv": ShortConv(width=16),
    "rwkv7": Rwkv7(heads=8, head_dim=2, hidden=16),
}


# Which tp sizes each can be served with, written out by hand.
ALLOWED = {
    "dense": {1, 2, 4, 8, 16},
    "few heads": {1, 2, 4, 6, 8, 16},
    "six heads": {1, 2, 3, 6},
    "nvfp4": {1, 2, 4, 8, 16},
    "planes": {1, 2, 4, 8, 16},
    "mla": {1, 2, 3, 4, 6, 8, 16},
    "mamba1": {1, 2, 3, 4, 6, 8},
    "mamba2": {1, 2, 4, 8},
    "mamba2 one group": {1, 2, 4, 8},
    "mamba2 two groups": {1, 2, 4, 8},
    "gdn": {1, 2, 4},
    "kda": {1, 2, 4, 8},
    "lightning": {1, 2, 4, 8},
    "short conv": {1, 2, 4, 8, 16},
    "rwkv7": {1, 2, 4, 8},
}


def rows_of(field: Field) -> list[int]:
    """Global rows of the sharded axis, in local order."""
    if not field.ranges:
        return [-1]
    return [row for p in field.ranges for row in range(p.start, p.start + p.length)]


@each(product(SPECS, (1, 2, 3, 4, 6, 8, 16)))
def test_ranks_together_hold_every_row(name: str, tp: int) -> None:
    spec = SPECS[name]
    if tp not in ALLOWED[name]:
        with pytest.raises(AtlasError) as refusal:
            spec.page(4, tp=tp)
        assert refusal.value.code is Code.TP_HEADS
        return
    pages = [spec.page(4, tp=tp, rank=rank) for rank in range(tp)]
    assert len({page.nbytes for page in pages}) == 1
    whole = spec.page(4)
    for field in whole.fields:
        held = Counter(row for page in pages for row in rows_of(page.field(field.name)))
        assert set(held) == set(rows_of(field)) if field.ranges else held == {-1: tp}
        assert all(count % field.sharding.replicas(tp) == 0 for count in held.values())
    assert spec.replicas(tp) == min(field.sharding.replicas(tp) for field in whole.fields)


@each(
    [(8, 1, 8, 1), (8, 2, 4, 1), (8, 8, 1, 1), (8, 16, 1, 2), (2, 4, 1, 2), (2, 8, 1, 4)],
)
def test_kv_heads_divide_or_repeat(heads: int, tp: int, held: int, replicas: int) -> None:
    spec = FullAttention(heads=heads, head_dim=128)
    assert spec.page(16, tp=tp).heads == held
    assert spec.replicas(tp) == replicas
    for rank in range(tp):
        (piece,) = spec.shard(tp, rank)["k"]
        assert (piece.start, piece.length) == (
            rank * heads // tp if held == 1 else rank * held,
            held,
        )


def test_mla_is_on_every_rank() -> None:
    spec = LatentAttention()
    assert spec.replicas(8) == 8
    assert {spec.page(64, tp=8, rank=rank) for rank in range(8)} == {spec.page(64)}


@each(
    [
        (FullAttention(heads=10, head_dim=128), 4),
        (FullAttention(heads=10, head_dim=128), 8),
        (FullAttention(heads=8, head_dim=128), 3),
        (Mamba2(heads=8, head_dim=2, groups=8, state_size=3), 16),
        (Mamba2(heads=8, head_dim=2, groups=3, state_size=3), 2),
        (GatedDeltaNet(key_heads=4, value_heads=8, key_dim=3, value_dim=2), 8),
    ],
)
def test_heads_that_tp_does_not_divide_are_refused(spec: Spec, tp: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        spec.page(16, tp=tp)
    assert refusal.value.code is Code.TP_HEADS


@each([(1, 4268032), (2, 2134016), (4, 1067008), (8, 533504)])
def test_qwen35_397b_state_bytes(tp: int, block_state: int) -> None:
    spec = GatedDeltaNet(key_heads=16, value_heads=64, key_dim=128, value_dim=128, ssm_dtype="fp32")
    assert spec.page_bytes(1, tp=tp) == block_state


@each([-1, 2, 99])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        FullAttention(heads=8, head_dim=64).page(16, tp=2, rank=rank)
    assert refusal.value.code is Code.BAD_RANK
