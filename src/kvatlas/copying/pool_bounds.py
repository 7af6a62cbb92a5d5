"""Bounds checks of byte ranges in regions, made before anything is posted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy, RunGrid


class SizedRegion(Protocol):
    """Anything with a size in bytes."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


def check_bounds(
    copies: Iterable[Copy], src: Mapping[int, SizedRegion], dst: Mapping[int, SizedRegion]
) -> None:
    """Raise an error for ranges that leave the regions of either end."""
    for copy in copies:
        ends = (copy.src_pool, copy.src, src), (copy.dst_pool, copy.dst, dst)
        for pool, starts, regions in ends:
            nbytes = _region_bytes(pool, regions)
            if len(starts) and not _inside(starts, copy.length, nbytes):
                raise _outside(pool, nbytes)


def check_grid_bounds(
    grids: Iterable[RunGrid], src: Mapping[int, SizedRegion], dst: Mapping[int, SizedRegion]
) -> None:
    """Raise an error for grids that leave the regions of either end. Checks only their extremes."""
    for grid in grids:
        ends = (grid.src_pool, 0, grid.src, src), (grid.dst_pool, 1, grid.dst, dst)
        for pool, end, spans, regions in ends:
            starts, nbytes = grid.starts.at(end), _region_bytes(pool, regions)
            room = nbytes if grid.cast is None else nbytes // grid.cast.items[end]
            first, last = int(starts.min()) + int(spans.min()), int(starts.max())
            if first < 0 or last > room or not _inside(spans + last, grid.length, room):
                raise _outside(pool, nbytes)


def _region_bytes(pool: int, regions: Mapping[int, SizedRegion]) -> int:
    if pool not in regions:
        raise AtlasError(
            Code.OUT_OF_BOUNDS,
            "A range is in a region that is not registered",
            got=f"pool {pool}; registered are {sorted(regions)}",
            hint="Register every pool before the handshake",
        )
    return regions[pool].nbytes


def _outside(pool: int, nbytes: int) -> AtlasError:
    return AtlasError(
        Code.OUT_OF_BOUNDS,
        got=f"bytes outside 0..{nbytes - 1} of pool {pool}",
        hint="Check that the memory was allocated for this plan",
    )


def _inside(starts: Int64s, length: Int64s, nbytes: int) -> bool:
    # Taken away from the size, not added to the start: sums of large numbers wrap around.
    return bool(starts.min() >= 0 and length.min() > 0 and (starts <= nbytes - length).all())
