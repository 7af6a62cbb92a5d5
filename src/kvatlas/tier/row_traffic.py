"""`RowTraffic`: move rows between staging memory and a store and verify every object."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.tier.namespaces import LEVELS, Namespace, RowName
from kvatlas.tier.object_header import HEADER, ObjectPlace, checksum, header, is_sound
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_objects import RowShare
from kvatlas.tier.staging_rows import RowLease, StagingRows
from kvatlas.tier.store_calls import Deadline, StoreCalls
from kvatlas.tier.stores import ABSENT, ObjectStore

_REMEMBERED = 4096
"""Number of cached (row shape, rank) pairs with their objects."""
_NAMES_AT_ONCE = 16_384
"""Maximum number of objects in one lookup."""
_MARKED_FOR = 60.0
"""Seconds after which marks are written again, because stores may evict them."""


class StagedObject(NamedTuple):
    """An object of a row and its place in staging memory: a header followed by its bytes."""

    name: str
    place: ObjectPlace
    memory: Bytes

    @property
    def parts(self) -> tuple[str, list[Bytes]]:
        """Return the name and the memory of the object, as `ObjectStore.put` expects them."""
        return self.name, [self.memory]

    @property
    def header(self) -> Bytes:
        """The memory of the object's header."""
        return self.memory[:HEADER]

    @property
    def payload(self) -> Bytes:
        """The bytes after the header."""
        return self.memory[HEADER:]


class StagedRows(NamedTuple):
    """Leased staging rows. `places[pool][number]` is the staging row of placeholder `number`."""

    lease: RowLease
    places: dict[int, dict[int, int]]


class RowTraffic:
    """Moves the objects of one namespace between a store and staging memory."""

    def __init__(self, store: ObjectStore, names: Namespace, staging: StagingRows) -> None:
        self.store, self.names, self.staging = store, names, staging
        self.calls = StoreCalls(store.calls_at_once)
        self._pool_of = [group.pool for group in names.cut.plan.groups]
        self._marked_until = 0.0
        self._marking: Future[None] | None = None
        self._shares: dict[tuple[int, int, Any], RowShare] = {}

    # -- lookups ------------------------------------------------------------------------

    def present(self, rows: Sequence[RowName], deadline: Deadline) -> list[tuple[bool, bool]]:
        """Return, for each row, (whether all of its objects exist, whether at least one exists)."""
        return self._present([self.names.objects(row) for row in rows], deadline)

    def begun(self, rows: Sequence[RowName], deadline: Deadline) -> list[bool]:
        """Return for each row whether its first object exists."""
        return list(self._exist([self.names.objects(row)[0] for row in rows], deadline))

    def brought(
        self, rows: Mapping[NeededBlock, RowName], source: tuple[int, int], deadline: Deadline
    ) -> list[bool]:
        """Return, for each row, whether the store has all objects that one rank contributes to it.

        `source` is (`Ingest.number`, rank). The objects that the rank contributes are known once it
        has stored a row with the same `NeededBlock.shape`. Until then, all objects of the row must
        exist.
        """
        names = []
        for need, row in rows.items():
            share = self._shares.get((*source, need.shape))
            own = self.names.objects(row)
            names.append(own if share is None else [own[index] for index in share.whole])
        return [whole for whole, _ in self._present(names, deadline)]

    def know_shares(self, ingest: int, rank: int, shares: Mapping[Any, RowShare]) -> None:
        """Record, for each `NeededBlock.shape`, which objects a rank writes to such a row."""
        if len(self._shares) > _REMEMBERED:
            self._shares.clear()
        for shape, share in shares.items():
            self._shares[ingest, rank, shape] = share

    def _present(self, names: list[list[str]], deadline: Deadline) -> list[tuple[bool, bool]]:
        there = self._exist([name for own in names for name in own], deadline)
        found = [list(islice(there, len(own))) for own in names]
        return [(all(own), any(own)) for own in found]

    def _exist(self, names: list[str], deadline: Deadline) -> Iterator[bool]:
        parts = [names[at : at + _NAMES_AT_ONCE] for at in range(0, len(names), _NAMES_AT_ONCE)]
        found: list[bool] = []
        for some in parts:
            started = self.calls.start(partial(self.store.exists, some))
            answer = self.calls.result(started, deadline)
            found += [one is True for one in self._as_many(answer, some)]
        return iter(found)

    def why_absent(self, deadline: Deadline) -> str:
        """Return the reason for a miss: "other_LEVEL", or "absent" if all levels match.

        The levels are tenant, model, weights, dtype and format, in this order. LEVEL is the first
        one at which nothing in the store matches this namespace. "older_format" means that the
        tenant has objects only in a format that this version does not read.
        """
        if time.monotonic() >= self._marked_until:
            there = list(self._exist(self.names.marks, deadline))
            if not there[0] and any(self._exist(self.names.older_marks, deadline)):
                return "older_format"
            if False in there:
                return f"other_{LEVELS[there.index(False)]}"
            self._marked_until = time.monotonic() + _MARKED_FOR
        return "absent"

    def mark(self) -> Future[None] | None:
        """Start writing this namespace's marks. Return None if a recent write suffices."""
        under_way = self._marking is not None and not self._marking.done()
        if under_way or time.monotonic() < self._marked_until:
            return None
        marks = self.names.mark_objects()

        def call() -> None:
            self.store.put(marks)
            self._marked_until = time.monotonic() + _MARKED_FOR

        self._marking = self.calls.start(call)
        return self._marking

    def forget_marks(self) -> None:
        """Forget that marks were written, so that the next store operation writes them again."""
        self._marked_until = 0.0

    # -- rows in flight -----------------------------------------------------------------

    def stage(self, numbers: Mapping[NeededBlock, int], deadline: Deadline) -> StagedRows | None:
        """Lease staging memory for rows, or return None if too little becomes free in time."""
        pools = [self._pool_of[need.group] for need in numbers]
        lease = self.staging.lease({pool: pools.count(pool) for pool in set(pools)}, deadline)
        if lease is None:
            return None
        free = {pool: iter(rows) for pool, rows in lease.items()}
        places: dict[int, dict[int, int]] = {pool: {} for pool in free}
        for pool, number in zip(pools, numbers.values(), strict=True):
            places[pool][number] = next(free[pool])
        return StagedRows(lease, places)

    def staged(
        self, row: RowName, number: int, rows: StagedRows, indices: Sequence[int]
    ) -> list[StagedObject]:
        """Return the objects of a staged row that have the given indices."""
        pool = self._pool_of[row.group]
        memory, frame = (
            self.staging.row(pool, rows.places[pool][number]),
            self.staging.frames[row.group],
        )
        names, mine, digest = self.names.objects(row), self.names.digest, row.digest
        return [
            StagedObject(
                names[index], ObjectPlace(mine, digest, index), memory[frame.object(index)]
            )
            for index in indices
        ]

    def put(self, objects: Sequence[StagedObject]) -> Future[list[str]]:
        """Start storing objects. The result contains the names of objects that found no space."""

        def call() -> list[str]:
            for one in objects:
                payload = one.payload
                one.header[:] = header(one.place, payload.nbytes, checksum([payload]))
            kept = self._as_many(self.store.put([one.parts for one in objects]), objects)
            return [one.name for one, done in zip(objects, kept, strict=True) if done is not True]

        return self.calls.start(call)

    def get(self, objects: Sequence[StagedObject]) -> Future[None]:
        """Start reading objects. The future raises an error if one is missing or damaged."""

        def call() -> None:
            for one in objects:
                one.header[:] = 0  # the header of an earlier object must not pass the check
            sizes = self._as_many(self.store.get([one.parts for one in objects]), objects)
            gone = [one.name for one, size in zip(objects, sizes, strict=True) if size == ABSENT]
            if gone:
                problem = "An object was evicted from the store after the lookup"
                hint = "Compute these tokens instead of fetching them"
                raise AtlasError(Code.MISSING_BLOCKS, problem, got=gone[0], hint=hint)
            damaged = [
                one.name
                for one, size in zip(objects, sizes, strict=True)
                if size != one.memory.nbytes or not is_sound(one.header, one.place, [one.payload])
            ]
            if damaged:
                self.store.remove(damaged)  # so that it can be stored again
                problem = "The checksum of an object does not match its bytes"
                hint = (
                    "Compute these tokens instead of fetching them. The damaged object was removed"
                )
                raise AtlasError(Code.CHECKSUM, problem, got=damaged[0], hint=hint)

        return self.calls.start(call)

    def give_back_after(self, started: Future[Any], lease: RowLease) -> None:
        """Arrange that leased staging rows are given back once `started` has finished."""
        started.add_done_callback(lambda _: self.staging.give_back(lease))

    def _as_many(self, answers: object, asked: Sequence[object]) -> list[object]:
        """Return the results of a call to the store.

        Raises an error unless they are a list with one result per object.
        """
        if isinstance(answers, list) and len(answers) == len(asked):
            return answers
        problem = "The store must return a list with one result per object"
        results = f"{len(answers)} results" if isinstance(answers, list) else type(answers).__name__
        got = f"{results} for {len(asked)} objects"
        hint = "Check that the store implements ObjectStore, and update its client"
        raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint)

    def zero(self, row: RowName, number: int, rows: StagedRows) -> None:
        """Fill a staged row with zeros.

        Call this first for a row with fewer tokens than its block, so that equal rows have equal
        bytes.
        """
        pool = self._pool_of[row.group]
        self.staging.row(pool, rows.places[pool][number])[:] = np.uint8(0)
