"""The books of a tier: which row has what, who uses it, and which one goes when room is needed.

A row is free, or being filled by the ranks of a topology, or whole. Only whole rows are
ever found. A row that somebody reads or fills stays; of the others, the one that was
used longest ago makes room.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvatlas.planning import Plan
from kvatlas.tier.ingest import Delivery, Intake
from kvatlas.tier.keys import Cover, Need, covers


class Stored(NamedTuple):
    """How many keys of a call are whole now, wait for other ranks, or found no room."""

    whole: int
    waiting: int
    no_room: int


@dataclass(eq=False)
class Row:
    """One row of a pool that is being filled, or whole."""

    pool: int
    number: int
    group: int
    key: bytes
    cover: Cover
    whole: bool = False
    verified: bool = True
    """Its bytes have been held against their checksum since the tier was opened."""
    checksum: int = 0
    sequence: int = 0
    pins: int = 0
    dropped: bool = False
    """Nobody finds it any more; its room is free when the last pin goes."""
    parts: dict[int, Delivery] = field(default_factory=dict)
    filling: set[int] = field(default_factory=set)
    """Ranks that write to it now."""
    slot: tuple[Any, ...] = ()
    """What the ranks that fill it find it by."""

    @property
    def name(self) -> tuple[int, bytes]:
        """What it is found by."""
        return self.group, self.key


@dataclass
class Claim:
    """What one rank may fill in one call, and what the call holds fast meanwhile."""

    rank: int
    rows: dict[tuple[int, int], tuple[Need, Row]] = field(default_factory=dict)
    pinned: list[Row] = field(default_factory=list)
    whole: int = 0
    waiting: int = 0
    no_room: int = 0


class Books:
    """Rows by key; every access is guarded."""

    def __init__(self, plan: Plan, cleared: Callable[[Row], None]) -> None:
        self.plan = plan
        self.lock = threading.RLock()
        self.sequence = 0
        self.evicted = 0
        self._cleared = cleared
        self._free = {p.index: list(range(p.blocks - 1, -1, -1)) for p in plan.pools}
        self._whole: dict[tuple[int, bytes], Row] = {}
        self._filling: dict[tuple[Any, ...], Row] = {}
        self._recent: dict[int, OrderedDict[Row, None]] = {
            pool.index: OrderedDict() for pool in plan.pools
        }

    def __len__(self) -> int:
        with self.lock:
            return len(self._whole)

    def free(self, pool: int) -> int:
        """Rows of a pool that hold nothing."""
        with self.lock:
            return len(self._free[pool])

    def restore(self, rows: Sequence[Row]) -> list[Row]:
        """Take over rows that were whole when a file was closed; the ones that were replaced."""
        older = []
        with self.lock:
            for row in sorted(rows, key=lambda one: one.sequence):
                if row.name in self._whole:
                    older.append(self._whole[row.name])
                self._whole[row.name] = row
            kept = set(self._whole.values())
            for pool, numbers in self._free.items():
                taken = {row.number for row in kept if row.pool == pool}
                self._free[pool] = [number for number in numbers if number not in taken]
            for row in sorted(kept, key=lambda one: one.sequence):
                self._recent[row.pool][row] = None
            self.sequence = max((row.sequence for row in kept), default=0)
        return older

    # -- finding ------------------------------------------------------------------------

    def find(self, need: Need) -> Row | None:
        """The whole row that has what is needed."""
        with self.lock:
            row = self._whole.get((need.group, need.key)) if need.key is not None else None
            if row is None or not covers(row.cover, need.cover, exact=self._exact(need.group)):
                return None
            return row

    def has(self, group: int, key: bytes) -> bool:
        """Whether a key is there at all."""
        with self.lock:
            return (group, key) in self._whole

    def names(self) -> list[tuple[int, bytes]]:
        """Every (group, key) that is whole, the one used longest ago first."""
        with self.lock:
            return [row.name for rows in self._recent.values() for row in rows if row.whole]

    def pin(self, needs: Sequence[Need]) -> list[Row] | None:
        """All rows that are needed, held fast; None where one is absent."""
        with self.lock:
            rows = [self.find(need) for need in needs]
            found = [row for row in rows if row is not None]
            if len(found) < len(rows):
                return None
            for row in found:
                row.pins += 1
            self._touch(zip((need.entry for need in needs), found, strict=True))
            return found

    def unpin(self, rows: Iterable[Row]) -> None:
        """Let go."""
        with self.lock:
            for row in rows:
                row.pins -= 1
                self._free_dropped(row)

    def drop(self, row: Row) -> None:
        """Make a row absent now, and free as soon as nobody uses it."""
        with self.lock:
            if row.dropped:
                return
            row.dropped = True
            if self._whole.get(row.name) is row:
                del self._whole[row.name]
            self._recent[row.pool].pop(row, None)
            self._cleared(row)
            self._free_dropped(row)

    def drop_keys(self, keys: Iterable[tuple[int, bytes]]) -> int:
        """Make keys absent; how many were there."""
        with self.lock:
            rows = [self._whole[name] for name in keys if name in self._whole]
            for row in rows:
                self.drop(row)
            return len(rows)

    # -- filling ------------------------------------------------------------------------

    def claim(self, needs: Sequence[Need], intake: Intake, rank: int) -> Claim:
        """Rows for a rank to fill: one for each key that is absent, while there is room."""
        claim = Claim(rank)
        with self.lock:
            present = [(need, self.find(need)) for need in needs if need.key is not None]
            for _, row in present:
                if row is not None:  # held fast first, so that no key makes room for another
                    row.pins += 1
                    claim.pinned.append(row)
            claim.whole = len(claim.pinned)
            try:
                for need, found in present:
                    if found is None:
                        self._claim_one(claim, need, intake)
            except BaseException:
                self.arrived(claim, intake, None)
                self.release(claim)
                raise
            there = [(need.entry, row) for need, row in present if row is not None]
            self._touch([*there, *((need.entry, row) for need, row in claim.rows.values())])
        return claim

    def _claim_one(self, claim: Claim, need: Need, intake: Intake) -> None:
        assert need.key is not None  # noqa: S101
        slot = (need.group, need.key, need.cover, intake.number)
        row = self._filling.get(slot)
        if row is None:
            pool = self.plan.groups[need.group].pool
            number = self._room(pool)
            if number is None:
                claim.no_room += 1
                return
            row = Row(pool, number, need.group, need.key, need.cover, slot=slot)
            self._filling[slot] = row
            self._recent[pool][row] = None
        elif claim.rank in row.parts or claim.rank in row.filling:
            claim.waiting += 1  # another call brings this part, or has
            return
        row.filling.add(claim.rank)
        claim.rows[need.group, need.entry] = need, row

    def arrived(
        self, claim: Claim, intake: Intake, brought: dict[Any, Delivery] | None
    ) -> list[Row]:
        """A rank has written its part, or failed; the rows that have all of their bytes now."""
        ready = []
        with self.lock:
            for need, row in claim.rows.values():
                row.filling.discard(claim.rank)
                if brought is not None:
                    row.parts[claim.rank] = brought[need.shape]
                if row.filling:
                    claim.waiting += brought is not None
                elif row.parts and intake.whole(need.shape, row.parts):
                    row.pins += 1  # until it is settled
                    del self._filling[row.slot]
                    ready.append(row)
                elif row.parts:
                    claim.waiting += brought is not None
                else:
                    self._forget(row)
        return ready

    def number(self, rows: Iterable[Row]) -> None:
        """Give rows that are about to be settled their place in the sequence."""
        with self.lock:
            for row in rows:
                self.sequence += 1
                row.sequence = self.sequence

    def settle(self, rows: Iterable[Row], *, whole: bool = True) -> None:
        """Rows that are committed can be found; those that could not be are free again."""
        with self.lock:
            for row in rows:
                row.parts.clear()
                older = self._whole.get(row.name)
                exact = self._exact(row.group)
                if not whole or (older and covers(older.cover, row.cover, exact=exact)):
                    self.drop(row)
                else:
                    if older is not None:
                        self.drop(older)
                    row.whole = True
                    self._whole[row.name] = row
                row.pins -= 1
                self._free_dropped(row)

    def release(self, claim: Claim) -> None:
        """Let go of what a call held fast."""
        self.unpin(claim.pinned)
        claim.pinned.clear()

    # -- room ---------------------------------------------------------------------------

    def _room(self, pool: int) -> int | None:
        if not self._free[pool]:
            victim = next((row for row in self._recent[pool] if _idle(row)), None)
            if victim is None:
                return None
            self.evicted += victim.whole
            if victim.whole:
                self.drop(victim)
            else:
                self._forget(victim)
        return self._free[pool].pop()

    def _touch(self, rows: Iterable[tuple[int, Row]]) -> None:
        # The last tokens first: without its beginning the rest of a prefix is of no use.
        for _, row in sorted(rows, key=lambda one: -one[0]):
            if row in self._recent[row.pool]:
                self._recent[row.pool].move_to_end(row)

    def _forget(self, row: Row) -> None:
        """Free a row that was never whole."""
        del self._filling[row.slot]
        del self._recent[row.pool][row]
        self._free[row.pool].append(row.number)

    def _free_dropped(self, row: Row) -> None:
        if row.dropped and not row.pins:
            self._free[row.pool].append(row.number)

    def _exact(self, group: int) -> bool:
        return self.plan.groups[group].kind == "recurrent"


def _idle(row: Row) -> bool:
    return not row.pins and not row.filling
