"""New tokens stored and all in sight gathered at once, in Triton's interpreter, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvatlas.cache import allocate
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import append_step
from kvatlas.kernels import triton as gpu
from kvatlas.planning import plan
from kvatlas.specs import FullAttention
from tests.kernels.triton.cases import ORDERS, Pool, check_append


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_appended_in_every_order(order: str) -> None:
    check_append(FullAttention(heads=2, head_dim=32, dtype="fp16"), order, "cpu")


@pytest.mark.parametrize(
    "form",
    [
        {"head_dim": 48, "v_dim": 16, "dtype": "fp32"},
        {"head_dim": 5, "dtype": "fp16"},
        {"head_dim": 32, "packing": "tiled_planes"},
        {"head_dim": 32, "packing": "transposed"},
    ],
)
def test_tokens_are_appended_to_odd_rows(form: dict[str, Any]) -> None:
    check_append(FullAttention(heads=3, **form), "LBHNC", "cpu", block=16)


def test_blocks_that_kernels_split_are_appended_to() -> None:
    """A block of the tables is two of the kernels'."""
    made = plan("Qwen3-8B", memory="128MiB", max_len=512, block_size=128, backend="FLASHINFER")
    layer = next(iter(allocate(made).values()))
    assert (layer.block_states, layer.kernel_blocks.size("N")) == (128, 64)
    twin = replace(layer, buffer=layer.buffer.clone())
    tables, about = torch.tensor([[3, 1], [2, 0]]), {"block": 128, "first": 0, "visible": 0}
    for start, count in ((0, 130), (130, 1)):
        k, v = (torch.randn(2, 8, count, 128).to(layer.k.dtype) for _ in "kv")
        by_kernel = gpu.TableAppend(tables, start=start, count=count, **about)(layer, k, v)
        by_torch = append_step(tables, start=start, count=count, **about)(twin, k, v)
        for mine, other in zip(by_kernel, by_torch, strict=True):
            assert mine.equal(other)
            assert mine[:, :, start:].equal(k if mine is by_kernel[0] else v)
        assert layer.buffer.equal(twin.buffer)


@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "torch"])
def test_what_cannot_be_appended(by_kernels: bool) -> None:
    spec = FullAttention(heads=2, head_dim=16, dtype="fp16")
    layer, rows = Pool(spec, "LBNHC", "cpu").layer, torch.zeros(2, 2, 1, 16, dtype=torch.float16)
    tables = torch.zeros(2, 3, dtype=torch.long)
    where = {"block": layer.block_states, "start": 4, "count": 1, "first": 0, "visible": 0}
    make: Any = gpu.TableAppend if by_kernels else append_step
    step = make(tables, **where)
    turned = rows.transpose(0, 2)  # two tokens of one sequence, not one of two
    for k, v in ((rows.float(), rows), (rows, rows[:, :1]), (rows[:1], rows[:1]), (turned, turned)):
        assert refusal(partial(step, layer, k, v)) is Code.BAD_TENSOR
    for wrong in (tables.float(), tables[0], tables.bool(), tables.to(torch.int16)):
        assert refusal(partial(make, wrong, **where)) is Code.BAD_TENSOR
    quantised = Pool(FullAttention(heads=2, head_dim=16, cache="fp8"), "LBNHC", "cpu").layer
    assert refusal(partial(step, quantised, rows, rows)) is Code.NO_KERNEL
    other = make(tables, **{**where, "block": 2 * layer.block_states})
    assert refusal(partial(other, layer, rows, rows)) is Code.CONTRADICTORY


def test_tokens_that_no_step_has() -> None:
    step_of = partial(append_step, torch.zeros(2, 3, dtype=torch.long), block=16, count=1)
    for tokens in ({"start": 48}, {"start": 4, "first": 5}, {"start": 4, "visible": 5}):
        assert refusal(partial(step_of, **tokens)) is Code.OUT_OF_RANGE
    assert refusal(partial(step_of, start=-1)) is Code.NEGATIVE
    for start in (4.5, "4", None):
        assert refusal(partial(step_of, start=start)) is Code.NOT_AN_INTEGER
    assert refusal(lambda: append_step([[0]], block=16, start=0, count=1)) is Code.BAD_TENSOR  # type: ignore[arg-type]
    many = torch.zeros(65_536, 1, dtype=torch.long)
    about = {"block": 16, "start": 0, "count": 1, "first": 0, "visible": 0}
    assert refusal(lambda: gpu.TableAppend(many, **about)) is Code.NO_KERNEL


def refusal(call: Callable[[], object]) -> Code:
    with pytest.raises(AtlasError) as refused:
        call()
    return refused.value.code
