"""`RowStoring`: one rank's part of a request on its way into a store."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.ingest import Ingest
from kvatlas.tier.namespaces import RowName
from kvatlas.tier.numbered_copies import NumberedCopies, NumberedRows
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_objects import RowShare
from kvatlas.tier.row_traffic import RowTraffic, StagedObject
from kvatlas.tier.storage import TierStorage, Write
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import batches

Puts = dict[Future[list[str]], list[RowName]]
"""What is on its way: the rows of each call."""


class RowStoring:
    """Rows of one request, from one rank's pools by staging memory to a store."""

    def __init__(
        self,
        traffic: RowTraffic,
        ingest: Ingest,
        rank: int,
        rows: Mapping[NeededBlock, RowName],
    ) -> None:
        self._traffic, self._ingest, self._rank, self._rows = traffic, ingest, rank, rows
        self._plan = traffic.names.cut.plan
        self._numbered = NumberedRows(self._plan, rows)

    def start(
        self,
        blocks: Any,
        tokens: tuple[int, int],
        storage: TierStorage,
        write: Write,
        deadline: Deadline,
    ) -> tuple[Puts, list[RowName]]:
        """Read the pools and begin to put; what is on its way, and rows that found no room."""
        with storage.metrics.phase("bind"):
            ids = self._numbered.numbers
            runs, deliveries = self._ingest.copies(self._rank, blocks, tokens, ids)
            copies = NumberedCopies(runs, "dst", self._numbered)
            shares = {shape: self._share(shape[0], *own) for shape, own in deliveries.items()}
            self._traffic.know_shares(self._ingest.number, self._rank, shares)
        under_way: Puts = {}
        no_room: list[RowName] = []
        staging = self._traffic.staging
        for some in batches(self._plan, ids, staging.at_once):
            own = {need: self._rows[need] for need in some}
            rows = self._traffic.stage(some, deadline)
            if rows is None:
                no_room += own.values()
                continue
            objects: list[StagedObject] = []
            try:
                for need, row in own.items():
                    if not shares[need.shape].filled:
                        self._traffic.zero(row, some[need], rows)
                storage.carry("store", copies.at(rows.places, staging), write)
                for need, row in own.items():
                    mine = shares[need.shape].whole
                    objects += self._traffic.staged(row, some[need], rows, mine)
            except BaseException:
                staging.give_back(rows.lease)
                raise
            started = self._traffic.put(objects)
            self._traffic.give_back_after(started, rows.lease)
            under_way[started] = list(own.values())
        return under_way, no_room

    def _share(self, group: int, brought: Any, needed: Any) -> RowShare:
        """The objects that this rank brings to rows of a group; refused where it cuts one."""
        cut = self._traffic.names.cut
        first = self._rank == self._ingest.sources[0]
        share = cut.groups[group].share(brought, needed, first=first)
        if share.partly:
            src = self._ingest.route.src
            problem = "A rank of this topology has only a part of some objects of the tier"
            got = f"tp {src.tp}, pp {src.pp}, dcp {src.dcp}; "
            got += f"rows cut for {cut.shards} shards and {cut.stages} stages"
            hint = "Open the tier with shards= a multiple of tp and stages= pp, for the whole fleet"
            raise AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
        return share
