"""What kernels and caches are given by engines: refused with a code before a byte is touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, BlockPool, Cache, Code, Node, allocate, bind
from kvatlas.kernels import (
    attend,
    copy_blocks,
    decode,
    encode,
    read,
    read_latent,
    write,
    write_latent,
    zero_blocks,
)
from kvatlas.routing import check
from kvatlas.specs import FullAttention, LatentAttention
from tests.cases import each
from tests.guards import cache_of
from tests.identities import OURS
from tests.wire.helpers import Local

FP8 = FullAttention(heads=4, head_dim=32, cache="fp8")
GUARDED, LAYER = cache_of(FP8, "LBNHC")
LATENT = cache_of(LatentAttention(latent=32, rope=8, cache="fp8"), "LBNHC")[1]
CACHE, PLAN = GUARDED.cache, GUARDED.cache.plan
ROWS, SLOTS = torch.ones(2, 4, 32), torch.tensor([0, 1])
LATENTS = torch.ones(2, 32), torch.ones(2, 8)
ONE: dict[str, Any] = {
    "tables": torch.zeros(1, 4, dtype=torch.int32),
    "lengths": torch.tensor([2]),
    "queries": torch.tensor([2]),
}
NO_IDS: list[Any] = [None, "x", object(), [0.5], [math.nan], torch.tensor([True]), [2**70]]


@each(NO_IDS)
def test_ids_are_whole_numbers(ids: Any) -> None:
    acts: list[Callable[[], Any]] = [
        lambda: read(LAYER, ids),
        lambda: write(LAYER, ROWS[:1], ROWS[:1], ids),
        lambda: zero_blocks(LAYER, ids),
        lambda: CACHE.clear(0, ids),
        lambda: attend(LAYER, ROWS, **ONE | {"tables": ids}),
        lambda: attend(LAYER, ROWS, **ONE | {"lengths": ids}),
        lambda: attend(LAYER, ROWS, **ONE | {"queries": ids if ids is not None else [0.5]}),
    ]
    for number, act in enumerate(acts):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.NOT_AN_INTEGER, number


def test_ids_are_one_row() -> None:
    grid = torch.zeros(1, 2, dtype=torch.int64)
    acts: list[Callable[[], Any]] = [
        lambda: read(LAYER, grid),
        lambda: zero_blocks(LAYER, grid),
        lambda: copy_blocks(LAYER, grid, LAYER, grid + 2),
        lambda: attend(LAYER, ROWS, **ONE | {"tables": grid[None]}),
    ]
    for number, act in enumerate(acts):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.BAD_TENSOR, number


@each([0.0, -1.0, math.nan, math.inf])
def test_scales_of_tensors_are_above_0_and_finite(scale: float) -> None:
    acts: list[Callable[[], Any]] = [
        lambda: write(LAYER, ROWS, ROWS, SLOTS, k_scale=scale),
        lambda: write(LAYER, ROWS, ROWS, SLOTS, v_scale=scale),
        lambda: read(LAYER, SLOTS, v_scale=scale),
        lambda: attend(LAYER, ROWS, **ONE, k_scale=scale),
        lambda: encode(FP8, "k", ROWS, scale=scale),
        lambda: decode(FP8, "k", {"k": ROWS}, scale=scale),
        lambda: write_latent(LATENT, *LATENTS, SLOTS, kv_scale=scale),
        lambda: read_latent(LATENT, SLOTS, kv_scale=scale),
    ]
    for number, act in enumerate(acts):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.BAD_QUANTITY, number


def test_a_softcap_of_0_is_none() -> None:
    write(LAYER, ROWS, ROWS, SLOTS)
    assert torch.equal(attend(LAYER, ROWS, **ONE, softcap=0.0), attend(LAYER, ROWS, **ONE))


OTHERS: list[tuple[Code, Callable[[], Any]]] = [
    (Code.UNKNOWN_FIELD, lambda: encode(FP8, "q", ROWS)),  # type: ignore[arg-type]
    (Code.UNKNOWN_FIELD, lambda: decode(FP8, "q", {"q": ROWS})),  # type: ignore[arg-type]
    (Code.UNKNOWN_FIELD, lambda: decode(FP8, "k", {"v": ROWS})),
    (Code.BAD_PLAN, lambda: allocate("Qwen3-8B")),  # type: ignore[arg-type]
    (Code.BAD_PLAN, lambda: bind(bytearray(64), "Qwen3-8B")),  # type: ignore[arg-type]
    (Code.BAD_PLAN, lambda: BlockPool(None)),  # type: ignore[arg-type]
    (Code.BAD_PLAN, lambda: check("Qwen3-8B", PLAN)),  # type: ignore[arg-type]
    (Code.BAD_PLAN, lambda: Node("Qwen3-8B", memory={}, transport=Local(), identity=OURS)),  # type: ignore[arg-type]
    (Code.WRONG_DEVICE, lambda: allocate(PLAN, device="abacus")),
    (Code.WRONG_DEVICE, lambda: allocate(PLAN, device=-1)),
    (Code.WRONG_DEVICE, lambda: allocate(PLAN, device=torch.cuda.device_count())),
    (Code.BAD_TENSOR, lambda: Cache(PLAN, 0, {})),
    (Code.BAD_TENSOR, lambda: Cache(PLAN, 0, None)),  # type: ignore[arg-type]
    (Code.BAD_TENSOR, lambda: Cache(PLAN, 0, dict.fromkeys(CACHE.pools))),  # type: ignore[arg-type]
]


@each(OTHERS)
def test_what_cannot_be_is_refused_with_its_code(code: Code, act: Callable[[], Any]) -> None:
    with pytest.raises(AtlasError) as refusal:
        act()
    assert refusal.value.code is code
