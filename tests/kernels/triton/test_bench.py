"""The checks of the GPU benchmark can fail: kernels that err a little are found wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

with patch.dict(os.environ, KVATLAS_BENCH_DEVICE="cpu"):
    from benchmarks.gpu import (
        attention,
        compare,
        compiling,
        exact,
        goals,
        host_time,
        report,
        turns,
        units,
        writes,
    )
    from benchmarks.gpu.cells import Beside, Cell, Measured
    from benchmarks.gpu.replays import Case
from triton.runtime import jit

from kvatlas import kernels
from kvatlas.kernels.triton import attend
from kvatlas.specs import CrossAttention, FullAttention

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


def test_a_cell_that_took_turns_with_its_limit_is_held_to_that() -> None:
    results = report.Results()
    results.limits["copy"] = 4000.0
    (cell,) = [one for one in writes.cells() if one.name == "nvfp4"]
    alone = Measured(cell, 3000.0, 1.0, 0.0, True)
    # 8 GB in 4 ms are 2,000 GB/s.
    beside = alone._replace(beside=Beside(4.0, 8e9))
    assert [results.share(one) for one in (alone, beside)] == [0.75, 1.5]
    (small,) = [one for one in attention.cells() if one.group == "decode 64 x 8192, nvfp4"]
    assert results.share(Measured(small, 1.0, 2.0, 0.0, True, beside=Beside(5.0, 1.0))) == 2.5


def test_a_goal_is_met_only_where_every_cell_is_right_and_reaches_it() -> None:
    results = report.Results()
    results.limits |= {"copy": 4000.0, "dense": 4500.0, "flash": 320.0, "matrix product": 700.0}
    every = [*attention.cells(), *writes.cells()]
    held = [cell for cell in every if cell.group in goals.GROUPS]
    assert {cell.group for cell in held} == goals.GROUPS
    results.cells = [Measured(cell, 4000.0, 1.0, 0.0, True) for cell in held]
    rows = {row.what: row for row in goals.of_cells(results)}
    assert len(rows) == len(goals.GOALS)
    # Cells that are as fast as bf16 do not reach 1.8 times that; the others exceed all bars.
    missed = {"decode, nvfp4", "decode, turboquant 4 bit", "decode, int4"}
    assert {what for what, row in rows.items() if row.met == "NO"} == missed
    assert rows["decode, nvfp4"][1:3] == ("180% of bf16 tokens", "100.0%")
    assert rows["prefill 8192, bf16"].wanted == "500 TFLOP/s"
    for wrong in ({"right": False}, {"figure": None, "note": "no kernel"}, {"figure": 499.0}):
        (first, *others) = [r for r in results.cells if r.cell.group == "prefill of 8192 tokens"]
        bad = report.Results()
        bad.limits, bad.cells = results.limits, [first._replace(**wrong), *others]
        (row,) = goals.of_cells(bad)
        assert row.met == "NO", wrong
        assert row.checked == ("3 right" if "figure" in wrong and "note" not in wrong else
                               "1 WRONG" if "right" in wrong else "1 skipped")  # fmt: skip


def test_a_kernel_is_compiled_once_and_not_launched(tmp_path: Path) -> None:
    done: list[Any] = []

    class Kernel:
        fn = staticmethod(test_orders_that_lie_apart_are_told)

    def run(self: Any, key: str, *, grid: Any, warmup: bool) -> None:
        done.append((grid, warmup, jit.JITFunction._do_compile(self, key, "signature")))

    def compiled(_: Any, key: str, signature: str) -> str:
        return f"{key} {signature}"

    of_jit = jit.JITFunction
    claims = [compiling.Claims(tmp_path) for _ in range(2)]
    with patch.object(of_jit, "run", run), patch.object(of_jit, "_do_compile", compiled):
        for worker in claims:
            with compiling.compiling_only(worker):
                for key in ("one", "other"):
                    of_jit.run(Kernel(), key, grid=(1,), warmup=False)
    assert [one[1] for one in done] == [True] * 4
    assert [one[2] for one in done] == ["one signature", "other signature", None, None]
    assert claims[0].taken() == 2


def test_trees_are_timed_by_turns_and_what_is_wrong_is_not_timed() -> None:
    asked: list[str] = []

    class Tree:
        def __init__(self, name: str, right: bool, times: list[float]) -> None:
            self.name, self.right, self.times = name, right, times

        def ask(self, *request: Any) -> dict[str, Any]:
            asked.append(f"{self.name} {request[0]}")
            return {"value": self.right if request[0] == "build" else self.times.pop()}

    old, new = Tree("old", True, [1.0, 9.0, 1.1]), Tree("new", True, [1.2, 1.0, 1.3])
    found = compare.compare((old, new), ("decode", "LBNHC"))
    assert asked[:2] == ["old build", "new build"]
    assert [one.split()[0] for one in asked[2:]] == ["old", "new", "new", "old", "old", "new"]
    assert (found.old, found.new, found.slower) == (1.1, 1.2, True)
    wrong = Tree("new", False, [])
    old.times = [1.0, 1.0, 1.0]
    found = compare.compare((old, wrong), ("decode", "LBNHC"))
    assert (found.old, found.new, found.slower) == (1.0, "WRONG", True)


def test_whatever_a_call_launches_is_launched_again_by_itself() -> None:
    launched: list[Any] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **more: Any) -> None:
        launched.append((self, given, grid, warmup, more))

    kernels_of_call = [jit.JITFunction.__new__(jit.JITFunction) for _ in range(2)]

    def call() -> None:
        for number, kernel in enumerate(kernels_of_call):
            kernel[(7, number)](number, tile=16)

    with patch.object(jit.JITFunction, "run", run):
        again = host_time.bare_launches(call)
        assert len(again) == len(launched) == 2
        for act in again:
            act()
    assert launched[:2] == launched[2:]


def test_a_tree_that_lacks_cells_or_is_wrong_like_the_other_does_not_pass() -> None:
    old = [("decode", "BHLNC"), ("decode", "LBNHC"), ("write", "fp8"), ("write", "int8")]
    new = [("decode", "LBNHC"), ("decode", "another"), ("write", "int8")]
    assert compare.chosen((old, new), [], every=False) == ([old[1], old[3]], [old[2]])
    assert compare.chosen((old, new), ["decode"], every=True) == ([old[1]], [old[0]])
    assert compare.chosen((old, new), ["decoed"], every=True) == ([], [])
    both = {("WRONG", "WRONG"): True, ("not timed", "missing"): True, ("no room", "no room"): False}
    for (before, now), fails in both.items():
        assert compare.Compared(old[0], before, now).slower is fails


def test_the_hosts_time_of_calls_is_compared_like_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(turns.__file__).parent)
    side = turns.Side()
    host = side._host
    assert {(host.GROUP, name) for name in host.NAMES} < set(side.cells())
    made: list[str] = []
    monkeypatch.setattr(host, "step_of", lambda name: partial(made.append, name))
    monkeypatch.setattr(host, "milliseconds", lambda step: (step(), 2.5)[1])
    assert side.build(host.GROUP, "write")
    assert side.time() == 2.5
    assert made == ["write", "write"]


def test_shares_of_units_are_of_the_whole_time_of_a_kernel() -> None:
    shares = [name for name in units._METRICS if "pct_of_peak" in name]
    assert shares
    assert all(name.endswith("_elapsed") for name in shares)
