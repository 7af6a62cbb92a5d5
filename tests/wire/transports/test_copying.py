"""Copies inside one process, and the rows that NIXL is given, against plain loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.copying.memory_copy import STEP, copy_runs
from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.routing import Copy
from kvatlas.wire import TRANSPORT_NAMES, Memory, make_transport
from kvatlas.wire.transports.errors import cannot_import
from kvatlas.wire.transports.handles import Stepwise
from kvatlas.wire.transports.nixl_strided import describe


def carried_out(src: np.ndarray, dst: np.ndarray, copy: Copy) -> int:
    return sum(1 for _ in copy_runs(src, dst, copy.source, copy.destination, copy.length))


@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 100_000, (1 << 20) + 1, STEP + 5])
def test_one_run_of_any_size(size: int) -> None:
    src = np.random.default_rng(0).integers(0, 256, size + 9, dtype=np.uint8)
    dst = np.full(size + 20, 7, np.uint8)
    carried_out(src, dst, Copy(0, 0, np.array([3]), np.array([11]), np.array([size])))
    assert np.array_equal(dst[11 : 11 + size], src[3 : 3 + size])
    assert (dst[:11] == 7).all()
    assert (dst[11 + size :] == 7).all()


def test_a_hundred_thousand_short_runs_take_no_loop() -> None:
    count, rng = 100_000, np.random.default_rng(0)
    src = rng.integers(0, 256, count * 40, dtype=np.uint8)
    dst = np.zeros(count * 32, np.uint8)
    from_at, to_at = rng.permutation(count) * 40 + 3, rng.permutation(count) * 32
    start = time.process_time()
    carried_out(src, dst, Copy(0, 0, from_at, to_at, np.broadcast_to(np.int64(32), count)))
    assert time.process_time() - start < 1
    want = np.zeros_like(dst).reshape(-1, 32)
    want[to_at // 32] = src[from_at[:, None] + np.arange(32)]
    assert np.array_equal(dst.reshape(-1, 32), want)


def test_work_goes_in_steps_that_can_be_given_up() -> None:
    size = 4 * STEP
    src, dst = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    whole = Copy(0, 0, np.array([0]), np.array([0]), np.array([size]))
    handle = Stepwise(copy_runs(src, dst, whole.source, whole.destination, whole.length))
    assert not handle.poll()
    assert dst.sum() == STEP
    with pytest.raises(AtlasError) as refusal:
        handle.wait(time.monotonic())
    assert refusal.value.code is Code.DEADLINE
    handle.release()
    with pytest.raises(AtlasError) as refusal:
        handle.poll()
    assert refusal.value.code is Code.CANCELLED
    assert 0 < dst.sum() < size


@pytest.mark.parametrize(
    "problem", [AtlasError(Code.WIRE_FAILED, "rule", got=1, hint="hint"), OSError("disk")]
)
def test_a_failure_stays_one(problem: Exception) -> None:
    def steps() -> Iterator[None]:
        yield
        raise problem

    handle = Stepwise(steps())
    assert not handle.poll()
    for _ in range(2):
        with pytest.raises(AtlasError) as refusal:
            handle.poll()
        assert refusal.value.code is Code.WIRE_FAILED


@st.composite
def runs(draw: st.DrawFn) -> list[Copy]:
    copies = []
    for pool in range(draw(st.integers(1, 3))):
        rows = draw(
            st.lists(
                st.tuples(st.sampled_from([1, 8, 8, 8, 24]), st.integers(0, 40)),
                min_size=1,
                max_size=20,
            )
        )
        length = np.array([size for size, _ in rows])
        starts = np.array([place * draw(st.sampled_from([1, 8])) for _, place in rows])
        copies.append(Copy(pool, pool, starts, starts, length))
    return copies


@given(runs())
def test_rows_name_every_run(copies: list[Copy]) -> None:
    regions = {pool: Memory(10_000 * (pool + 1), 400, f"cuda:{pool}") for pool in range(3)}
    rows, indices = describe(copies, regions, source=True)
    flat = []
    for address, size, device, stride, count in rows.tolist():
        assert stride >= size  # NIXL takes no rows that overlap themselves
        region = regions[device]
        assert address >= region.address
        assert address + (count - 1) * stride + size <= region.address + region.nbytes
        flat += [(address + nth * stride, size, device) for nth in range(count)]
    want = [
        (regions[copy.source_pool].address + start, size, copy.source_pool)
        for copy in copies
        for start, size in zip(copy.source.tolist(), copy.length.tolist(), strict=True)
    ]
    assert [flat[index] for index in indices.tolist()] == want


def test_a_grid_of_a_large_pool_is_one_row() -> None:
    at = np.random.default_rng(0).permutation(1_000_000) * 4096
    same = np.broadcast_to(np.int64(4096), len(at))
    rows, indices = describe(
        [Copy(0, 0, at, at, same)], {0: Memory(1 << 40, 1 << 40)}, source=False
    )
    assert rows.tolist() == [[1 << 40, 4096, 0, 4096, 1 << 28]]
    assert np.array_equal(indices, at // 4096)


def test_a_grid_too_fine_for_indices_has_rows_of_its_own() -> None:
    at = np.array([5, 900])
    rows, indices = describe(
        [Copy(0, 0, at, at, np.array([1, 1]))], {0: Memory(64, 1 << 40)}, source=True
    )
    assert rows.tolist() == [[69, 1, 0, 1, 1], [964, 1, 0, 1, 1]]
    assert indices.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "modules"), [("nixl", ("nixl", "nixl._api")), ("mooncake", ("mooncake.engine",))]
)
def test_a_library_that_is_missing(
    name: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.wire.transports.nixl_agents._BUILDS", ())
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as refusal:
        make_transport(name)
    assert refusal.value.code is Code.MISSING_EXTRA
    assert f"kvatlas[{name}]" in refusal.value.hint
    assert ("mooncake-transfer-engine" in refusal.value.hint) == (name == "mooncake")


def test_a_library_that_does_not_load_is_not_called_missing() -> None:
    problem = ImportError("libibverbs.so.1: cannot open shared object file")
    error = cannot_import("mooncake", problem)
    assert error.code is Code.MISSING_EXTRA
    assert "cannot be loaded" in str(error)
    assert "libibverbs" in str(error)


def test_names_are_in_the_order_of_preference() -> None:
    assert TRANSPORT_NAMES == ("cuda", "nixl", "mooncake", "tcp", "shm", "memory")
    with pytest.raises(AtlasError):
        make_transport("carrier pigeon")


def test_an_option_that_a_transport_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(AtlasError, match="Its options are host, shared"):
        make_transport("tcp", hosts="127.0.0.1")
