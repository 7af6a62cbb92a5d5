"""What rarely happens: cleared blocks, rows that are no numbers, schedules of other batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from kvatlas import AtlasError, Code, kernels
from kvatlas.kernels.triton import attend, schedule, split_of
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.specs import FullAttention, SinkAttention
from tests.kernels.triton.cases import Pool, check_attend

HALVES: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": "fp16"}
WIDE: dict[str, Any] = {"heads": 2, "head_dim": 16, "dtype": "fp32"}
TABLE = torch.tensor([[3, 1], [7, 4]]).int()
SCALED = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]


def filled(spec: Any, states: int = 20) -> Any:
    """A layer whose two sequences have so many states."""
    layer = Pool(spec, "LBNHC", "cpu").layer
    generator = torch.Generator().manual_seed(2)
    for row in TABLE:
        k, v = (torch.randn(states, 2, spec.head_dim, generator=generator) for _ in "kv")
        at = torch.arange(states)
        kernels.write(layer, k, v, row[at // 16].long() * 16 + at % 16)
    return layer


def both(layer: Any, spec: Any, *, queries: int = 1, states: int = 20, **more: Any) -> Any:
    """By Triton, and by torch: over two sequences."""
    q = torch.randn(2 * queries, 4, spec.head_dim, generator=torch.Generator().manual_seed(5))
    where = {
        "tables": TABLE, "lengths": torch.tensor([states, states]),
        "queries": torch.tensor([queries, queries]), **more,
    }  # fmt: skip
    mine = attend(layer, q, tile=16, rows=16, **where)
    return mine, kernels.attend(layer, q, **where)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("cache", SCALED)
def test_cleared_blocks_are_rows_of_zeros(cache: str, queries: int) -> None:
    spec = FullAttention(**HALVES, cache=cache)
    layer = filled(spec)
    layer.tensor[TABLE[0, 0]] = 0
    layer.tensor[TABLE[1]] = 0
    mine, theirs = both(layer, spec, queries=queries)
    assert torch.isfinite(mine).all()
    assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dim", [64, 24])
def test_rows_that_are_no_numbers_stay_so(dim: int, queries: int) -> None:
    spec = FullAttention(heads=2, head_dim=dim, cache="int8_per_token_head")
    layer = filled(spec)
    layer.v_scale[TABLE[0, 0], :, 3] = float("nan")
    mine, theirs = both(layer, spec, queries=queries)
    assert torch.isnan(theirs[queries - 1]).any()
    assert (torch.isnan(mine) >= torch.isnan(theirs)).all()
    assert torch.allclose(mine[queries:], theirs[queries:], atol=1e-4)


@pytest.mark.parametrize("base", [HALVES, WIDE])
@pytest.mark.parametrize(("queries", "states"), [(1, 14), (12, 24)])
def test_rows_that_no_query_sees_do_not_matter(
    base: dict[str, Any], queries: int, states: int
) -> None:
    """Between the tokens that stay and the window, in a block that both touch."""
    spec = SinkAttention(**base, sink_tokens=3, window=4)
    layer = filled(spec, states)
    # Queries begin at 12 or later, and windows at 9 or later.
    for side in (layer.k, layer.v):
        side[TABLE.long()[:, 0], :, 3:9] = float("nan")
    mine, theirs = both(layer, spec, queries=queries, states=states)
    assert torch.isfinite(theirs).all()
    assert torch.allclose(mine, theirs, atol=1e-3)


def test_a_schedule_serves_what_it_was_made_for() -> None:
    spec = FullAttention(**WIDE)
    layer = filled(spec)
    lengths, queries = torch.tensor([20, 20]), torch.tensor([1, 1])
    made = schedule(split_of(layer, 4, tile=16, rows=16), lengths, queries)
    mine, theirs = both(layer, spec)
    q = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(5))
    where: dict[str, Any] = {
        "tables": TABLE, "lengths": lengths, "queries": queries, "tile": 16, "rows": 16,
    }  # fmt: skip
    assert torch.equal(attend(layer, q, prepared=made, **where), mine)
    assert torch.allclose(mine, theirs, atol=1e-5)
    window = replace(layer, spec=SinkAttention(**WIDE, sink_tokens=2, window=4))
    others = [
        schedule(split_of(layer, 4, tile=16, rows=16, max_queries=40), lengths, queries),
        schedule(split_of(layer, 8, tile=16, rows=16), lengths, queries),
        schedule(split_of(window, 4, tile=16, rows=16), lengths, queries),
        schedule(made.split, lengths[:1], queries[:1]),
    ]
    for other in others:
        with pytest.raises(AtlasError) as refusal:
            attend(layer, q, prepared=other, **where)
        assert refusal.value.code is Code.BAD_TENSOR
    with pytest.raises(AtlasError) as refusal:  # a table less than there are sequences
        attend(layer, q, prepared=made, **{**where, "tables": TABLE[:1], "queries": None})
    assert refusal.value.code is Code.BAD_TENSOR


def test_queries_may_start_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_DEBUG", "1")
    spec = FullAttention(**WIDE)
    layer = filled(spec)
    q = torch.randn(7, 4, 16)
    out = torch.full_like(q, float("nan"))
    where: dict[str, Any] = {"tables": TABLE, "lengths": torch.tensor([20, 20])}
    attend(layer, q, starts=torch.tensor([3, 5, 6]), out=out, tile=16, rows=16, **where)
    theirs = kernels.attend(layer, q[3:6], queries=torch.tensor([2, 1]), **where)
    assert torch.allclose(out[3:6], theirs, atol=1e-5)
    assert torch.isnan(out[[0, 1, 2, 6]]).all()


def test_a_softcap_has_no_sign() -> None:
    layer = filled(FullAttention(**WIDE))
    mine, theirs = both(layer, FullAttention(**WIDE), softcap=-2.0)
    assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"sink_logits": torch.randn(4, 3)[:, 0]},
        {"sink_logits": torch.zeros(4, dtype=torch.int32)},
        {"lengths": torch.tensor([20, 0])},
        {"max_queries": 1, "queries": torch.tensor([2, 1])},
        {"queries": None, "starts": torch.tensor([0, 1, 9])},
    ],
)
def test_batches_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setenv("KVATLAS_DEBUG", "1")
    spec = FullAttention(**WIDE)
    layer = filled(spec)
    where: dict[str, Any] = {
        "tables": TABLE, "lengths": torch.tensor([20, 20]), "queries": torch.tensor([1, 1]), **more,
    }  # fmt: skip
    with pytest.raises(AtlasError) as refusal:
        attend(layer, torch.zeros(3 if "max_queries" in more else 2, 4, 16), **where)
    assert refusal.value.code is Code.BAD_TENSOR


@pytest.mark.parametrize("cache", ["auto", "fp8", "nvfp4", "turboquant_4bit_nc", *SCALED])
def test_halves_are_enough(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Dots of halves, as on a GPU: what is added to codes and taken out again cancels."""
    monkeypatch.setattr(formats, "dot_of", lambda _: tl.float16)
    dim = 128 if cache in ("nvfp4", "turboquant_4bit_nc") else 64  # what is walked as words
    spec = FullAttention(**{**HALVES, "head_dim": dim}, cache=cache)
    check_attend(
        spec, "LBHNC", "cpu", lengths=[150, 40], queries=[1, 1], tolerance=1e-3, tile=32, rows=16,
        max_queries=1,
    )  # fmt: skip
