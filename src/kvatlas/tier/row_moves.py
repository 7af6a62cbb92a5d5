"""Move rows from staging memory into a rank's pools, unchanged or converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvatlas.planning import Plan
from kvatlas.routing import ConvertedStream
from kvatlas.routing.converted_stream import ConvertedPart
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_numbers import RowNumbers
from kvatlas.tier.row_runs import RowRuns
from kvatlas.tier.row_traffic import StagedRows
from kvatlas.tier.staging_rows import StagingRows
from kvatlas.tier.storage import Read, TierStorage


class RowMoves(Protocol):
    """Moves rows of a tier into one rank's pools, and selects the objects that the rank needs."""

    def objects(self, need: NeededBlock) -> list[int]:
        """Return the indices of the objects of row `need` that the rank needs."""
        ...

    def deliver(self, needs: Iterable[NeededBlock], rows: StagedRows) -> None:
        """Move the rows in `needs` from staging memory into the rank's pools."""
        ...


class CopiedRows:
    """Copies rows unchanged from staging memory into a rank's pools."""

    def __init__(
        self,
        runs: RowRuns,
        numbered: RowNumbers,
        staged: tuple[TierStorage, StagingRows],
        read: Read,
    ) -> None:
        self._runs, self._numbered = runs, numbered
        (self._storage, self._staging), self._read = staged, read

    def objects(self, need: NeededBlock) -> list[int]:
        """Return the indices of the objects of row `need` from which the rank copies bytes."""
        return self._runs.objects(*self._numbered.place(need), self._staging)

    def deliver(self, needs: Iterable[NeededBlock], rows: StagedRows) -> None:
        """Copy the rank's part of the staged rows into its pools."""
        del needs  # `rows.places` lists the same rows
        self._storage.carry("fetch", self._runs.at(rows.places, self._staging), self._read)


class ConvertedRows:
    """Converts rows, one by one, from staging memory into a rank's pools."""

    def __init__(
        self,
        stream: ConvertedStream,
        numbered: RowNumbers,
        staged: tuple[TierStorage, StagingRows],
        into: tuple[Plan, int, Mapping[int, Any]],
    ) -> None:
        """Convert the rows of `stream` into one rank's pools. `into` is (plan, rank, pools)."""
        self._stream, self._numbered = stream, numbered
        (self._storage, self._staging), self._into = staged, into

    def _parts(self, need: NeededBlock) -> Iterator[ConvertedPart]:
        return self._stream.parts_of_entry(need.group, self._numbered.entry(need))

    def objects(self, need: NeededBlock) -> list[int]:
        """Return the indices of the objects of row `need` from which the rank converts bytes."""
        starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        pool, number = self._numbered.place(need)
        begin = number * self._numbered.block_bytes(pool)
        for part in self._parts(need):
            copy = part.copy(0)
            starts.append(copy.source - begin)
            lengths.append(np.array(copy.length))
        cut = self._staging.cut.groups[need.group]
        overlap = cut.overlap(np.concatenate(starts), np.concatenate(lengths))
        found: list[int] = np.flatnonzero(overlap).tolist()
        return found

    def deliver(self, needs: Iterable[NeededBlock], rows: StagedRows) -> None:
        """Convert the rows in `needs` into the rank's pools."""
        for need in needs:
            pool, number = self._numbered.place(need)
            begin = number * self._numbered.block_bytes(pool)
            to = rows.places[pool][number] * self._staging.row_bytes[pool]
            frame = self._staging.frames[need.group]
            moved = partial(frame.moved, end="source", begin=begin, to=to)
            self._storage.convert(self._parts(need), *self._into, moved=moved)
