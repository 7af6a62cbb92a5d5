"""The oracle held to itself: fast and slow walks agree, and sources hold what is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from kvatlas.planning import Plan
from tests.planning.models import SMALL
from tests.routing import oracle
from tests.routing.cases import moving, small_plan
from tests.routing.oracle import Move, Side

PLANS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"tp": 2}, {"tp": 4, "layout": "BLHNC"}),
    ("dense", {"tp": 8, "dcp": 2}, {"block_size": 32, "backend": "FLASHINFER"}),
    ("sliding", {"tp": 2, "layout": "LBHNC"}, {"policy": "uniform"}),
    ("mamba hybrid", {"tp": 1}, {"tp": 4, "policy": "vllm"}),
    ("cut hybrid", {"tp": 2}, {"tp": 1, "policy": "vllm"}),
    ("conv hybrid", {"pp": 2}, {"pack": 1}),
]


@cache
def move_of(index: int) -> Move:
    name, one, other = PLANS[index]
    src, dst = small_plan(SMALL[name], **one), small_plan(SMALL[name], **other)
    return moving(src, dst, 33, single=True) if index % 2 else moving(src, dst, (3, 37), seed=1)


@pytest.mark.parametrize("index", range(len(PLANS)))
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_walk_by_arrays_is_a_walk_by_elements(index: int, side: Side) -> None:
    move = move_of(index)
    last = len(oracle.ranks(move.plan(side))) - 1
    slow = oracle.walk_slowly(move, side, last)
    fast: dict[tuple[int, int], int] = {}
    for elements in oracle.held(move, side, last):
        at, marks = elements.bytes()
        assert not fast.keys() & {(elements.pool, byte) for byte in at.tolist()}
        fast.update(
            {
                (elements.pool, byte): mark
                for byte, mark in zip(at.tolist(), marks.tolist(), strict=True)
            }
        )
    assert fast == slow


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_every_element_that_is_needed_is_kept_by_a_source(index: int) -> None:
    """So that a comparison with the oracle can succeed, and only with the right bytes."""
    move = move_of(index)
    kept: set[tuple[str, str, int]] = set()
    for rank in oracle.ranks(move.source):
        for found in oracle.held(move, "source", rank):
            kept |= {(found.layer, found.field, n) for n in found.number.tolist()}
    wanted: set[tuple[str, str, int]] = set()
    for rank in oracle.ranks(move.destination):
        for found in oracle.held(move, "destination", rank):
            wanted |= {(found.layer, found.field, n) for n in found.number.tolist()}
    assert wanted
    assert wanted == kept


def test_values_are_as_good_as_random() -> None:
    marks = oracle.values("layers.0.attn", "k", np.arange(1 << 16), 8)
    other = oracle.values("layers.1.attn", "k", np.arange(1 << 16), 8)
    for byte in range(8):
        assert np.bincount(marks[:, byte], minlength=256).min() > 150
        assert np.mean(marks[:, byte] == other[:, byte]) < 0.01
        assert np.mean(marks[1:, byte] == marks[:-1, byte]) < 0.01
        assert np.mean(marks[:, byte] == marks[:, byte - 1]) < 0.01


def test_the_fewest_descriptors_are_found_by_bytes() -> None:
    class Pieces:
        source = np.array([10, 0, 14, 30])
        destination = np.array([20, 10, 24, 40])
        length = np.array([4, 5, 6, 1])

    assert oracle.minimum(Pieces) == 3
    Pieces.source, Pieces.destination, Pieces.length = (
        np.array([4, 0]),
        np.array([8, 4]),
        np.array([4, 4]),
    )
    assert oracle.minimum(Pieces) == 1


def test_plans_here_are_small() -> None:
    for move in map(move_of, range(len(PLANS))):
        for side in (move.source, move.destination):
            assert isinstance(side, Plan)
            assert sum(pool.nbytes for pool in side.pools) <= 1 << 21
