"""`RowStoring`: store one rank's part of a request in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from kvatlas.copying.memory_copy import is_on_gpu
from kvatlas.errors import AtlasError, Code
from kvatlas.tier.ingest import Ingest
from kvatlas.tier.namespaces import RowName
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_numbers import RowNumbers
from kvatlas.tier.row_objects import RowShare
from kvatlas.tier.row_runs import RowRuns
from kvatlas.tier.row_traffic import RowTraffic, StagedObject
from kvatlas.tier.storage import TierStorage
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import batches

Puts = dict[Future[list[str]], list[RowName]]
"""Writes in flight, and the rows of each."""


_AHEAD = 3
"""Number of writes in flight while pools are read for the next."""


class RowStoring:
    """Stores one rank's part of a request's rows, from its pools through staging memory."""

    def __init__(
        self,
        traffic: RowTraffic,
        storage: TierStorage,
        ingest: Ingest,
        about: tuple[int, Any, tuple[int, int]],
        rows: Mapping[NeededBlock, RowName],
        pools: Mapping[int, Any],
    ) -> None:
        """Compute the copies from a rank's pools into rows. `about` is (rank, blocks, tokens).

        Raises an error if the rank holds only a part of an object.
        """
        self._traffic, self._storage, self._ingest = traffic, storage, ingest
        self._rank, self._rows = about[0], rows
        self._numbered = RowNumbers(traffic.names.cut.plan, rows)
        with storage.metrics.phase("bind"):
            numbers, as_grids = self._numbered.numbers, not is_on_gpu(pools)
            copies, deliveries = ingest.copies(*about, numbers, as_grids=as_grids)
            self._runs = RowRuns(copies, "destination", self._numbered)
            self._shares = {shape: self._share(shape[0], *own) for shape, own in deliveries.items()}
            """The objects that the rank writes, for each `NeededBlock.shape`."""
            traffic.know_shares(ingest.number, self._rank, self._shares)
        self._write = storage.writing(ingest.route.source, self._rank, pools)

    def start(self, deadline: Deadline, *, paced: bool) -> tuple[Puts, list[RowName]]:
        """Copy rows from the pools and start writing them to the store.

        Returns the writes in flight, and the rows for which no staging memory became free. With
        `paced`, pools are read only as fast as the store accepts rows. This leaves staging memory
        and the processor to others, and does not delay a caller that waits for the store anyway.
        """
        under_way: Puts = {}
        no_room: list[RowName] = []
        plan, staging = self._traffic.names.cut.plan, self._traffic.staging
        for some in batches(plan, self._numbered.numbers, staging.at_once):
            if paced and len(under_way) >= _AHEAD:
                wait_for([list(under_way)[-_AHEAD]], deadline.left)
            own = {need: self._rows[need] for need in some}
            rows = self._traffic.stage(some, deadline)
            if rows is None:
                no_room += own.values()
                continue
            objects: list[StagedObject] = []
            try:
                for need, row in own.items():
                    if not self._shares[need.shape].filled:
                        self._traffic.zero(row, some[need], rows)
                self._storage.carry("store", self._runs.at(rows.places, staging), self._write)
                for need, row in own.items():
                    mine = self._shares[need.shape].whole
                    objects += self._traffic.staged(row, some[need], rows, mine)
            except BaseException:
                staging.give_back(rows.lease)
                raise
            started = self._traffic.put(objects)
            self._traffic.give_back_after(started, rows.lease)
            under_way[started] = list(own.values())
        return under_way, no_room

    def _share(self, group: int, brought: Any, needed: Any) -> RowShare:
        """Return which objects the rank writes in the rows of a group.

        `brought` are the byte ranges of a row that the rank writes, and `needed` the ranges that
        all ranks must write. Raises an error if the rank holds only a part of an object.
        """
        cut = self._traffic.names.cut
        first = self._rank == self._ingest.sources[0]
        share = cut.groups[group].share(brought, needed, first=first)
        if share.partly:
            source = self._ingest.route.source
            problem = "A rank of this topology holds only a part of some objects of the tier"
            got = (
                f"tp={source.tp}, pp={source.pp}, dcp={source.dcp} for a tier with "
                f"shards={cut.shards}, stages={cut.stages}"
            )
            hint = (
                f"In all engines, open the tier with stages={source.pp} and with shards= set to a "
                f"multiple of {source.tp}"
            )
            raise AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
        return share
