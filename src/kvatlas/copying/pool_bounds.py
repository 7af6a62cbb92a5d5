"""Check that the runs of copies are inside their regions before anything is posted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy


class SizedRegion(Protocol):
    """A memory region. The check needs only its size."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""


def check_bounds(
    copies: Iterable[Copy],
    source: Mapping[int, SizedRegion],
    destination: Mapping[int, SizedRegion],
) -> None:
    """Raise `out_of_bounds` if a run is not inside its regions. Regions are given by pool index.

    For speed, each span is combined only with the smallest and the largest start.
    """
    for copy in copies:
        ends = (
            (copy.source_pool, copy.source, source),
            (copy.destination_pool, copy.destination, destination),
        )
        for end, (pool, spans, regions) in enumerate(ends):
            nbytes = _region_bytes(pool, regions)
            room = nbytes if copy.cast is None else nbytes // copy.cast.items[end]
            if len(copy) and not _inside(copy.starts.at(end), spans, copy.length, room):
                raise _outside(pool, nbytes)


def _region_bytes(pool: int, regions: Mapping[int, SizedRegion]) -> int:
    if pool not in regions:
        raise AtlasError(
            Code.OUT_OF_BOUNDS,
            "A copy uses a pool that is not registered",
            got=f"pool {pool}, but only pools {sorted(regions)} are registered",
            hint="Register every pool before the handshake",
        )
    return regions[pool].nbytes


def _outside(pool: int, nbytes: int) -> AtlasError:
    return AtlasError(
        Code.OUT_OF_BOUNDS,
        got=f"bytes outside 0..{nbytes - 1} of pool {pool}",
        hint="Check that the memory was allocated for this plan",
    )


def _inside(starts: Int64s, spans: Int64s, length: Int64s, nbytes: int) -> bool:
    first, last = int(starts.min()), int(starts.max())
    if int(spans.min()) + first < 0 or last > nbytes or int(length.min()) < 1:
        return False
    # Lengths are subtracted from the size, not added to the offsets: large sums wrap around.
    return bool((spans <= nbytes - last - length).all())
