"""Runs between addresses, at sums of starts and spans, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas.copying.address_runs import convert_address_runs, copy_address_runs, place_starts
from kvatlas.geometry import DType
from kvatlas.kernels.cast_scales import place_scales
from kvatlas.kernels.fp8_fp4_formats import to_fp8
from kvatlas.specs.cell_formats import ElementCast
from tests.kernels.triton.cases import check_cast_runs, check_repeated_runs, check_runs

SIZES = [512, 48, 20, 7, 4096, 2, 264, 1]
"""Bytes of a run: words of every width, and rows that fill no tile."""


def test_every_width_and_order_of_tables() -> None:
    for number, item in enumerate(SIZES):
        for programs in (0, 1, 3):
            check_runs(item, "cpu", alike=bool(number % 2), programs=programs, seed=number)


def test_runs_that_are_copied_again_and_again() -> None:
    for number, item in enumerate((512, 20, 7)):
        check_repeated_runs(item, "cpu", alike=bool(number % 2), seed=number)


def test_elements_that_change_their_type_on_the_way() -> None:
    pairs = [("bf16", "fp8"), ("fp8", "bf16"), ("fp32", "bf16"), ("fp16", "e5m2")]
    for number, (names, item) in enumerate(zip(pairs, (64, 128, 7, 20), strict=True)):
        scales = (0.5, 0.25) if number % 2 else (3.0, 3.0)  # a factor, or a divisor
        check_cast_runs(names, item, "cpu", alike=number > 1, programs=number, scales=scales)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_a_divisor_makes_too_large_saturates() -> None:
    """A quotient beyond float32 is no NaN, as codecs have it."""
    numbers = torch.tensor([3e38, -3e38, 1e38, float("inf"), -float("inf"), float("nan"), -0.0, 6])
    none, out = np.zeros(1, np.int64), torch.zeros(8, dtype=torch.uint8)
    for divisor in (0.3, 0.003):
        cast = ElementCast(DType.of("fp32"), DType.of("fp8"), ((1.0, divisor),))
        convert_address_runs(
            numbers.data_ptr(), out.data_ptr(), place_starts(none, none, "cpu"),
            (none, none, none + 8), cast, place_scales(cast, None, 1, "cpu"),
        )  # fmt: skip
        assert out.tolist() == to_fp8(numbers / divisor).view(torch.uint8).tolist()


def test_nothing_to_copy() -> None:
    none: Any = np.zeros(0, np.int64)
    starts = place_starts(np.zeros(1, np.int64), np.zeros(1, np.int64), "cpu")
    copy_address_runs(8, 8, starts, (none, none, none))
    copy_address_runs(8, 8, place_starts(none, none, "cpu"), (np.zeros(1, np.int64),) * 3)
