"""Brute force: what the algebra must agree with, found without it.

Nothing here multiplies a stride. Orders are walked byte by byte with a counter,
and sets of bytes are Python sets.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvatlas import Placement

ORDERS = ["".join(order) for order in permutations("LBHNC")]

Coordinate = dict[str, int]


def coordinates(sizes: Mapping[str, int]) -> Iterator[Coordinate]:
    """Every coordinate, the first axis slowest."""
    for values in product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, values, strict=True))


def walk(order: Sequence[str], sizes: Mapping[str, int]) -> dict[tuple[int, ...], int]:
    """Addresses of a packed buffer, found by writing it from its first byte to its last."""
    addresses = {}
    for address, values in enumerate(product(*(range(sizes[axis]) for axis in order))):
        place = dict(zip(order, values, strict=True))
        addresses[tuple(place[axis] for axis in sorted(sizes))] = address
    return addresses


def key(coordinate: Coordinate) -> tuple[int, ...]:
    return tuple([coordinate[axis] for axis in sorted(coordinate)])


def sizes_of(placement: Placement) -> dict[str, int]:
    return dict(zip(placement.axes, placement.sizes, strict=True))


def items(placement: Placement) -> list[tuple[Coordinate, int]]:
    """Every coordinate with its address, one call for each."""
    return [(c, placement(**c)) for c in coordinates(sizes_of(placement))]


def byte_list(placement: Placement) -> list[int]:
    """Every byte that the placement names, as often as it names it."""
    return [start + i for _, start in items(placement) for i in range(placement.item)]


def maximal_runs(taken: Iterable[int]) -> list[tuple[int, int]]:
    """(start, length) of the runs in a set of bytes."""
    runs: list[tuple[int, int]] = []
    for byte in sorted(set(taken)):
        if runs and runs[-1][0] + runs[-1][1] == byte:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((byte, 1))
    return runs
