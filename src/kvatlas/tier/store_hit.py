"""`StoreHit`: the tokens of a request in an object store, to be fetched by any number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvatlas.copying.memory_copy import is_on_gpu
from kvatlas.errors import AtlasError
from kvatlas.planning import Plan
from kvatlas.routing.block_tables import checked_rank
from kvatlas.tier.converting import Converting, TierRoutes, converting_rows
from kvatlas.tier.hit import fetch_ends
from kvatlas.tier.namespaces import RowName
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_moves import ConvertedRows, CopiedRows, RowMoves
from kvatlas.tier.row_numbers import RowNumbers
from kvatlas.tier.row_runs import RowRuns
from kvatlas.tier.row_traffic import RowTraffic, StagedRows
from kvatlas.tier.storage import TierStorage
from kvatlas.tier.store_calls import Deadline

_AHEAD = 3
"""Number of batches that are prefetched while one is copied."""


class _Batch(NamedTuple):
    needs: list[NeededBlock]
    rows: StagedRows
    started: Future[None]


@dataclass(eq=False, repr=False)
class StoreHit:
    """Tokens of a request in an object store. If the store evicts them, a fetch raises an error."""

    start: int
    tokens: int
    """Number of leading tokens of the request that can be fetched."""
    rows: Mapping[NeededBlock, RowName]
    _traffic: RowTraffic
    _storage: TierStorage
    _routes: TierRoutes
    _plan: Plan
    """The tier's plan."""
    _timeout: float
    """Time limit of a fetch."""
    _missed: Callable[[AtlasError], None]
    """Counts a failed fetch."""
    _convert: Converting | None = None
    """The conversion of the rows to the cache's dtype. A fetch may override it."""

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        start: int | None = None,
        convert: Converting | None = None,
    ) -> None:
        """Fetch the tokens into one rank's blocks.

        If `start` is given, tokens before it are left unchanged. With `convert`, a layer is
        converted if its dtype in the tier differs from its dtype in the rank's cache. Rows are
        fetched in batches, and the next batches are prefetched while one is copied. Each row is
        verified before it is copied. If a row is damaged or missing, some blocks may have been
        overwritten, and their tokens must be computed.
        """
        with self._storage.using():
            rank = checked_rank(plan, rank, "destination")
            way = self._routes.to(plan, converting_rows(self._convert, convert))
            if not self.tokens or 0 not in way.sources(rank):
                return
            numbered, storage = RowNumbers(self._plan, self.rows), self._storage
            tokens = self.start if start is None else max(start, self.start), self.tokens
            ends = fetch_ends(numbered.tables(), rank, blocks, tokens)
            staged = storage, self._traffic.staging
            moves: RowMoves
            with storage.metrics.phase("bind"):
                if way.conversion is not None:
                    into = (plan, rank, pools or {})
                    moves = ConvertedRows(way.converted(**ends), numbered, staged, into)
                else:
                    gpu = is_on_gpu(pools)
                    copies = way.bind(**ends).copies if gpu else way.stream(**ends).grids()
                    read = storage.reading(plan, rank, pools or {})
                    moves = CopiedRows(RowRuns(copies, "source", numbered), numbered, staged, read)
            try:
                self._fetch(numbered.numbers, moves)
            except AtlasError as problem:
                self._missed(problem)
                raise

    def _fetch(self, numbers: Mapping[NeededBlock, int], moves: RowMoves) -> None:
        deadline, traffic = Deadline(self._timeout), self._traffic
        waiting = deque(batches(self._plan, numbers, traffic.staging.at_once))
        under_way: deque[_Batch] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < _AHEAD:
                    # Do not wait for more rows while holding some: two fetches could deadlock.
                    rows = traffic.stage(waiting[0], Deadline(0) if under_way else deadline)
                    if rows is None:
                        break
                    under_way.append(self._start(waiting.popleft(), moves, rows))
                if not under_way:
                    raise deadline.passed()
                first = under_way[0]
                traffic.calls.result(first.started, deadline)
                moves.deliver(first.needs, first.rows)
                traffic.staging.give_back(under_way.popleft().rows.lease)
        finally:
            for batch in under_way:
                traffic.give_back_after(batch.started, batch.rows.lease)

    def _start(
        self, numbers: Mapping[NeededBlock, int], moves: RowMoves, rows: StagedRows
    ) -> _Batch:
        """Start reading, for the rows in `numbers`, the objects that this rank needs."""
        wanted = []
        for need, number in numbers.items():
            wanted += self._traffic.staged(self.rows[need], number, rows, moves.objects(need))
        return _Batch(list(numbers), rows, self._traffic.get(wanted))

    def release(self) -> None:
        """Do nothing: object stores do not pin objects."""


def batches(
    plan: Plan, numbers: Mapping[NeededBlock, int], at_once: Callable[[int], int]
) -> Iterator[dict[NeededBlock, int]]:
    """Split the rows in `numbers`, in order, into batches that fit into staging memory."""
    some: dict[NeededBlock, int] = {}
    counts: dict[int, int] = {}
    for need, number in numbers.items():
        pool = plan.groups[need.group].pool
        if counts.get(pool, 0) == at_once(pool):
            yield some
            some, counts = {}, {}
        some[need] = number
        counts[pool] = counts.get(pool, 0) + 1
    if some:
        yield some
