"""The checks of the GPU benchmark can fail: kernels that err a little are found wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

with patch.dict(os.environ, KVATLAS_BENCH_DEVICE="cpu"):
    from benchmarks.gpu import attention, exact, report
    from benchmarks.gpu.cells import Case, Cell, Measured

from kvatlas import kernels  # noqa: E402
from kvatlas.kernels.triton import attend  # noqa: E402
from kvatlas.specs import CrossAttention, FullAttention  # noqa: E402

SPEC = FullAttention(heads=2, head_dim=64)
INT8 = FullAttention(heads=2, head_dim=64, cache="int8_per_token_head")
CASES: dict[str, Callable[[dict[str, Any]], Case]] = {
    "decode": partial(attention.decode, SPEC, "LBNHC", 16, (1, 70), 4, 2),
    "decode of int8": partial(attention.decode, INT8, "BHLNC", 16, (1, 70), 2, 1),
    "prefill": partial(attention.prefill, SPEC, "LBHNC", 16, (1, 70)),
    "latent": partial(attention.latent, (1, 70), "auto", "LBNHC", "GB/s", heads=8),
}


def shorter(given: dict[str, Any]) -> None:
    given["lengths"] = given["lengths"] - 1


def elsewhere(given: dict[str, Any]) -> None:
    """The last sequence reads its first page in place of its second."""
    given["tables"] = given["tables"].clone()
    given["tables"][-1, 1] = given["tables"][-1, 0]


def unwritten(given: dict[str, Any]) -> None:
    given["out"] = torch.empty_like(given["out"])


def erring(name: str, err: Callable[[dict[str, Any]], None]) -> Any:
    """A kernel that is called with something else than it was given."""
    kernel = getattr(attention, name)

    def act(*some: Any, **given: Any) -> Any:
        err(given)
        return kernel(*some, **given)

    return patch.object(attention, name, act)


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_right_is_found_so_and_what_is_not_is_not(name: str) -> None:
    torch.manual_seed(7)
    case = CASES[name]({})
    assert case.right()
    called = "attend_latent" if name == "latent" else "attend"
    for err in (elsewhere, unwritten) if name == "prefill" else (elsewhere, unwritten, shorter):
        with erring(called, err):
            assert not case.right(), err.__name__


def test_the_public_function_is_a_case_too() -> None:
    case = attention.decode(SPEC, "LBNHC", 16, (2, 70), 4, 1, {}, public=True)
    assert case.right()
    with patch.object(kernels, "attend", lambda *_, **__: torch.zeros(2, 8, 64)):
        assert not case.right()


def test_queries_that_see_what_comes_after_them_are_found() -> None:
    case = CASES["prefill"]({})
    ahead = CrossAttention(heads=2, head_dim=64, source=70)

    def act(layer: Any, q: Any, **given: Any) -> Any:
        return attend(replace(layer, spec=ahead), q, **given)

    with patch.object(attention, "attend", act):
        assert not case.right()


def test_one_state_of_many_is_missed_in_no_sequence() -> None:
    """The rows of float64 without a state that no key was drawn from: still too far off."""
    torch.manual_seed(7)
    length = 8192
    q = torch.randn(1, 8, 64)
    k, v = torch.randn(2, length, 2, 64)
    pairs = exact.decoded(1, length, 16)
    k[pairs.states] = exact.drawn(
        k[pairs.states], q.expand(len(pairs.states), -1, -1), pairs.logits,
        torch.arange(len(pairs.states)),
    )  # fmt: skip
    at = torch.arange(length)
    wanted = exact.attention(q, k, v, 64**-0.5, torch.tensor([length - 1]))
    allowed = exact.tolerance("auto", "cuda")
    assert exact.close(wanted.bfloat16(), wanted, allowed)
    page = at[5000:5016]
    assert not set(page.tolist()) & set(pairs.states.tolist())
    for missing in (at[-1:], at[:1], page):
        left = torch.ones(length, dtype=torch.bool)
        left[missing] = False
        without = exact.attention(
            q, k[left], v[left], 64**-0.5, torch.tensor([int(left.sum()) - 1])
        )
        assert not exact.close(without.bfloat16(), wanted, allowed)


def test_orders_that_lie_apart_are_told() -> None:
    cells = [Cell("decode", str(i), lambda _: None, apart=0.05) for i in range(2)]  # type: ignore[arg-type,return-value]
    figures = [Measured(cell, 100.0 - 4 * i, 1.0, 0.0, True) for i, cell in enumerate(cells)]
    (near,) = report.apart(figures)
    assert (near.verdict, round(near.share or 0, 3)) == ("ok", 0.04)
    (far,) = report.apart([figures[0], figures[1]._replace(figure=90.0)])
    assert far.verdict == "below"
    (wrong,) = report.apart([figures[0], figures[1]._replace(right=False)])
    assert wrong.verdict == "skipped"
