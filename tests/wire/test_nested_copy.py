"""Strided copies: the same bytes as run by run, and no byte beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying import copy_request
from kvatlas.copying.memory_copy import copy_runs
from kvatlas.copying.nested_copy import copy_nested, copy_pools
from kvatlas.geometry import NestedSteps
from kvatlas.geometry.nested_steps import Steps
from kvatlas.routing import Copy, route
from kvatlas.routing.binding import Starts
from tests.cases import each
from tests.wire.helpers import small


def grid(random: np.random.Generator, length: int, *, regular: bool) -> Copy:
    """Runs of a length, or of two, that do not touch each other's places."""
    heads, tokens, spans = (int(random.integers(1, 5)) for _ in range(3))
    step = length + int(random.integers(0, 3))
    src = (np.arange(heads)[:, None] * 5000 + np.arange(tokens) * step).reshape(-1)
    dst = np.arange(heads * tokens) * step
    if not regular:
        src = random.permutation(src)
    lengths = np.full(spans, length)
    lengths[: int(random.integers(0, spans + 1))] = max(1, length // 2)
    rows = random.permutation(spans) * 40_000
    return Copy(0, 0, rows, random.permutation(rows), lengths, starts=Starts.of(src, dst))


@pytest.mark.parametrize("length", [1, 3, 512, 1024, 1536, 2000])
@pytest.mark.parametrize("regular", [True, False])
def test_every_run_arrives(length: int, *, regular: bool) -> None:
    random = np.random.default_rng(length)
    for _ in range(5):
        one = grid(random, length, regular=regular)
        src = random.integers(0, 256, 200_000, dtype=np.uint8)
        there, expected = np.zeros(200_000, np.uint8), np.zeros(200_000, np.uint8)
        copy_pools([one], {0: src}, {0: there})
        spans = zip(one.source.tolist(), one.destination.tolist(), one.length.tolist(), strict=True)
        for a, b, n in spans:
            for x, y in zip(
                one.starts.source.tolist(), one.starts.destination.tolist(), strict=True
            ):
                expected[b + y : b + y + n] = src[a + x : a + x + n]
        assert np.array_equal(there, expected)


def test_many_runs_in_no_order_are_looked_up_one_by_one() -> None:
    random = np.random.default_rng(0)
    src, dst = random.permutation(1000) * 8, np.arange(1000) * 8
    data, there = random.integers(0, 256, 8000, dtype=np.uint8), np.zeros(8000, np.uint8)
    one = np.zeros(1, np.int64)
    copy_pools([Copy(0, 0, one, one, one + 8, starts=Starts.of(src, dst))], {0: data}, {0: there})
    assert np.array_equal(there.reshape(-1, 8), data.reshape(-1, 8)[src // 8])


def test_runs_that_leave_a_pool_are_refused() -> None:
    starts, pools = Starts.of(np.array([0, 60]), np.array([0, 4])), {0: np.zeros(64, np.uint8)}
    for at in (0, -1, 2**63 - 8):
        spans = np.array([at]), np.array([0]), np.array([8])
        with pytest.raises(AtlasError) as refusal:
            copy_pools([Copy(0, 0, *spans, starts=starts)], pools, {0: np.zeros(64, np.uint8)})
        assert refusal.value.code == Code.OUT_OF_BOUNDS


MEMORY = np.zeros(64, np.uint8)
ONE = np.array([0])
BAD_NESTED: list[tuple[Code, NestedSteps, Any]] = [
    (Code.OUT_OF_BOUNDS, NestedSteps(np.array([-4]), ONE, ()), 4),
    (Code.OUT_OF_BOUNDS, NestedSteps(ONE, ONE, (Steps(3, -1, 1),)), 4),
    (Code.OUT_OF_BOUNDS, NestedSteps(ONE, ONE, (Steps(8, 1, 9),)), 4),
    (Code.OUT_OF_BOUNDS, NestedSteps(np.array([2**63 - 1]), ONE, ()), 4),
    (Code.BAD_SIZE, NestedSteps(ONE, ONE, ()), 0),
    (Code.BAD_SIZE, NestedSteps(ONE, ONE, (Steps(0, 1, 1),)), 4),
    (Code.NOT_AN_INTEGER, NestedSteps(ONE, ONE, ()), 4.0),
    (Code.NOT_AN_INTEGER, NestedSteps(np.array([0.5]), ONE, ()), 4),
    (Code.BAD_SIZE, NestedSteps(np.array([0, 8]), ONE, ()), 4),
]


@each(BAD_NESTED)
def test_nested_runs_from_outside_are_looked_at(code: Code, at: NestedSteps, length: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        copy_nested(MEMORY, MEMORY.copy(), at, length)
    assert refusal.value.code == code


BAD_RUNS: list[tuple[Code, Any, Any]] = [
    (Code.OUT_OF_BOUNDS, np.array([-1]), np.array([4])),
    (Code.OUT_OF_BOUNDS, np.array([2**63 - 1]), np.array([4])),
    (Code.BAD_SIZE, ONE, np.array([0])),
    (Code.OUT_OF_BOUNDS, ONE, np.array([4 << 20], np.uint64)),
    (Code.OUT_OF_BOUNDS, ONE, np.array([4 << 20], np.uint32)),
    (Code.OUT_OF_BOUNDS, ONE, np.array([2**63], np.uint64)),
    (Code.OUT_OF_BOUNDS, ONE, np.array([127], np.int8)),
    (Code.OUT_OF_BOUNDS, ONE, [127]),
    (Code.OUT_OF_BOUNDS, range(0, 64, 60), np.array([8, 8])),
    (Code.BAD_SIZE, ONE, np.array([1, 2])),
    (Code.NOT_AN_INTEGER, np.array([0.5]), np.array([4])),
    (Code.NOT_AN_INTEGER, ONE, np.array([[4]])),
]


@each(BAD_RUNS)
def test_runs_from_outside_are_looked_at(code: Code, at: Any, length: Any) -> None:
    for ends in ((at, np.zeros_like(at)), (np.zeros_like(at), at)):
        with pytest.raises(AtlasError) as refusal:
            copy_runs(MEMORY, MEMORY.copy(), *ends, length)
        assert refusal.value.code == code


@each([MEMORY[::2], MEMORY.view(np.int32), MEMORY.reshape(8, 8), b"\0" * 64])
def test_a_buffer_is_one_row_of_bytes(buffer: Any) -> None:
    copies: list[Callable[[], object]] = [
        lambda: copy_runs(MEMORY, buffer, ONE, ONE, ONE + 1),
        lambda: copy_nested(buffer, MEMORY, NestedSteps(ONE, ONE, ()), 1),
    ]
    for act in copies:
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code == Code.BAD_TENSOR


def test_memory_that_cannot_be_written_is_not_written() -> None:
    kept = np.frombuffer(bytes(64), np.uint8)
    with pytest.raises(AtlasError) as refusal:
        copy_runs(MEMORY, kept, ONE, ONE, ONE + 1)
    assert refusal.value.code == Code.BAD_TENSOR
    copy_nested(kept, MEMORY.copy(), NestedSteps(ONE, ONE, ()), 1)


def test_copies_between_pools_that_are_not_there_are_refused() -> None:
    made = small("dense")
    pools = {0: {0: np.zeros(made.pools[0].nbytes, np.uint8)}}
    few = {0: {0: np.zeros(8, np.uint8)}}
    way, about = route(made, made), {"source_blocks": [0], "destination_blocks": [1], "tokens": 16}
    copy = Copy(0, 7, ONE, ONE, ONE + 1)
    acts: list[tuple[Code, Callable[[], object]]] = [
        (Code.OUT_OF_BOUNDS, lambda: copy_pools([copy], pools[0], pools[0])),
        (Code.OUT_OF_BOUNDS, lambda: copy_request(way, pools, few, **about)),
        (Code.OUT_OF_BOUNDS, lambda: copy_request(way, few, pools, **about)),
        (Code.OUT_OF_BOUNDS, lambda: copy_request(way, pools, {0: {}}, **about)),
        (Code.BAD_RANK, lambda: copy_request(way, {}, pools, **about)),
        (Code.BAD_RANK, lambda: copy_request(way, pools, {1: pools[0]}, **about)),
    ]
    for number, (code, act) in enumerate(acts):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code == code, number
