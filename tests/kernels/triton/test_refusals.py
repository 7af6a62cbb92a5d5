"""What kernels refuse before they are launched, each with its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.kernels.triton import (
    Staging,
    attend,
    attend_latent,
    between,
    schedule,
    split_of,
    write,
    write_latent,
    zero_blocks,
)
from kvatlas.kernels.triton.attention.step_schedule import Schedule
from kvatlas.specs import FullAttention, LatentAttention
from tests.kernels.triton.cases import Pool

SPEC = FullAttention(heads=2, head_dim=16)
POOL = Pool(SPEC, "LBNHC", "cpu")
LAYER = POOL.layer
IDS = torch.tensor([1, 2])
ROWS = torch.zeros(2, 2, 16)
META = torch.device("meta")
WIDE = FullAttention(heads=1, head_dim=1024)
ODD = FullAttention(heads=1, head_dim=24, cache="turboquant_4bit_nc")
SHORT = FullAttention(heads=1, head_dim=8, cache="turboquant_4bit_nc")
LATENT = LatentAttention(latent=24, rope=8)
LONG = LatentAttention(latent=1024)
SPARSE = LatentAttention(cache="fp8_ds_mla")
BATCH: dict[str, Any] = {
    "tables": torch.tensor([[1, 2], [3, 4]]),
    "lengths": torch.tensor([20, 7]),
    "queries": torch.tensor([1, 1]),
}


def layer_of(spec: Any) -> Any:
    return Pool(spec, "LBNHC", "cpu").layer


def run(q: Any = None, layer: Any = LAYER, **more: Any) -> Any:
    q = torch.zeros(2, 4, layer.spec.head_dim) if q is None else q
    return attend(layer, q, **{**BATCH, **more})


def prepared_elsewhere() -> Any:
    made = schedule(split_of(LAYER, 4, dtype=ROWS.dtype), BATCH["lengths"], BATCH["queries"])
    return Schedule(made.ends.to(META), made.split)


REFUSALS: list[tuple[Code, Callable[[], Any]]] = [
    (Code.WRONG_DEVICE, lambda: run(torch.zeros(2, 4, 16, device=META))),
    (Code.WRONG_DEVICE, lambda: run(tables=torch.zeros(2, 2, dtype=torch.int32, device=META))),
    (Code.WRONG_DEVICE, lambda: run(prepared=prepared_elsewhere())),
    (Code.WRONG_DEVICE, lambda: write(LAYER, ROWS, ROWS, IDS.to(META))),
    (Code.WRONG_DEVICE, lambda: between(LAYER, LAYER)(IDS.to(META), IDS.to(META))),
    (Code.WRONG_DEVICE, lambda: zero_blocks(LAYER, IDS.to(META))),
    (Code.NO_KERNEL, lambda: run(layer=layer_of(WIDE))),
    (Code.NO_KERNEL, lambda: run(torch.zeros(2, 3, 16))),
    (Code.NO_KERNEL, lambda: run(torch.zeros(2, 0, 16))),
    (Code.NO_KERNEL, lambda: run(torch.zeros(2, 4, 16, dtype=torch.float64))),
    (Code.NO_KERNEL, lambda: write(layer_of(ODD), torch.zeros(2, 1, 24), torch.zeros(2, 1, 24),
                                   IDS)),
    (Code.NO_KERNEL, lambda: write_latent(layer_of(SPARSE), torch.zeros(2, 512),
                                          torch.zeros(2, 64), IDS)),
    (Code.NO_KERNEL, lambda: write_latent(layer_of(LONG), torch.zeros(2, 1024),
                                          torch.zeros(2, 64), IDS)),
    (Code.NO_KERNEL, lambda: write(layer_of(SHORT), torch.zeros(2, 1, 8),
                                   torch.zeros(2, 1, 8), IDS)),
    (Code.NO_KERNEL, lambda: attend_latent(layer_of(LATENT), torch.zeros(2, 4, 32),
                                           scale=1.0, **BATCH)),
    (Code.BAD_TENSOR, lambda: run(torch.zeros(2, 16, 4).transpose(1, 2))),
    (Code.BAD_TENSOR, lambda: run(torch.zeros(2, 4, 8))),
    (Code.BAD_TENSOR, lambda: run(queries=torch.tensor([1]))),
    (Code.BAD_TENSOR, lambda: run(queries=None)),
    (Code.BAD_TENSOR, lambda: run(tables=torch.zeros(2, 2))),
    (Code.BAD_TENSOR, lambda: run(sink_logits=torch.zeros(3))),
    (Code.BAD_TENSOR, lambda: run(out=torch.zeros(2, 4, 8))),
    (Code.BAD_TENSOR, lambda: run(out=torch.zeros(2, 1, 16).expand(2, 4, 16))),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS[:1], ROWS, IDS)),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS, ROWS[:, :1], IDS)),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS.repeat(1, 2, 1), ROWS, IDS)),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS, ROWS.repeat(1, 2, 1), IDS)),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS[:1], ROWS[:1], IDS[0])),
    (Code.BAD_TENSOR, lambda: write(LAYER, ROWS, ROWS, IDS[:, None])),
    (Code.BAD_TENSOR, lambda: write_latent(layer_of(LATENT), torch.zeros(1, 24),
                                           torch.zeros(1, 8), IDS[0])),
    (Code.BAD_TENSOR, lambda: Staging([LAYER], 1).store(IDS, torch.zeros(2, 9))),
    (Code.UNLIKE_PLACEMENTS, lambda: between(LAYER, LAYER)(IDS, IDS[:1])),
    (Code.UNLIKE_PLACEMENTS, lambda: between([LAYER], [])),
    (Code.UNLIKE_PLACEMENTS, lambda: between(LAYER, layer_of(FullAttention(heads=4, head_dim=8)))),
    (Code.UNLIKE_PLACEMENTS, lambda: between(
        LAYER, layer_of(FullAttention(heads=2, head_dim=16, cache="fp8")))),
]  # fmt: skip
LOOKED_AT: list[tuple[Code, Callable[[], Any]]] = [
    (Code.OUT_OF_RANGE, lambda: run(tables=torch.tensor([[1, 12], [3, 4]]))),
    (Code.OUT_OF_RANGE, lambda: write(LAYER, ROWS, ROWS, torch.tensor([0, 12 * 16]))),
    (Code.OUT_OF_RANGE, lambda: between(LAYER, LAYER)(IDS, torch.tensor([0, 12]))),
    (Code.OUT_OF_RANGE, lambda: zero_blocks(LAYER, torch.tensor([-1]))),
    (Code.BAD_TENSOR, lambda: run(lengths=torch.tensor([33, 7]))),
    (Code.BAD_TENSOR, lambda: run(queries=torch.tensor([1, 2]))),
]


@pytest.mark.parametrize(("code", "act"), REFUSALS, ids=range(len(REFUSALS)))
def test_bad_input_is_refused(code: Code, act: Callable[[], Any]) -> None:
    with pytest.raises(AtlasError) as refusal:
        act()
    assert refusal.value.code is code


@pytest.mark.parametrize(("code", "act"), LOOKED_AT, ids=range(len(LOOKED_AT)))
def test_ids_are_looked_at_where_that_is_asked_for(
    code: Code, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_DEBUG", "1")
    with pytest.raises(AtlasError) as refusal:
        act()
    assert refusal.value.code is code


def test_blocks_that_a_window_left_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvatlas.specs import SlidingAttention

    monkeypatch.setenv("KVATLAS_DEBUG", "1")
    spec = SlidingAttention(heads=2, head_dim=16, window=4)
    run(layer=layer_of(spec), tables=torch.tensor([[10**6, 2], [3, -7]]))
