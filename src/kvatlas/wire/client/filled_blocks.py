"""Find and claim the blocks that a pull fills.

The module caches which entries of the block tables a pull fills. Requests with the same tokens and
the same lengths of block tables share a cached result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Route
from kvatlas.routing.request_shape import Lengths, table_lengths
from kvatlas.wire.block_ledger import BlockClaim, BlockLedger

_KEPT = 128
"""The maximum number of cached shapes; the least recently used is dropped first."""

_Key = tuple[tuple[int, int], Lengths]
_Entries = dict[int, list[tuple[int, slice | Int64s]]]
"""For each pool, a list of (group, indices of the block table entries that a pull fills)."""


class FilledBlocks:
    """Claims the blocks that pulls along one route fill. Any thread may use it."""

    def __init__(self, ledger: BlockLedger, rank: int) -> None:
        self._ledger, self._rank = ledger, rank
        self._kept: OrderedDict[_Key, _Entries] = OrderedDict()
        self._lock = threading.Lock()

    def claim(
        self,
        incoming: Route,
        request: str,
        blocks: Any,
        tables: Mapping[int, Int64s],
        tokens: tuple[int, int],
        layers: Collection[str] | None,
    ) -> BlockClaim:
        """Claim the blocks that a pull fills.

        `tables` contains the same block tables as `blocks`, as arrays by group. The tables are
        validated only for the first pull with these tokens and table lengths. For later pulls, the
        caller must validate `tables`.
        """
        key = (tokens, table_lengths(tables))
        entries = self._kept.get(key) if layers is None else None
        if entries is not None:
            return self._claim(request, tables, entries)
        filled = incoming.filled_blocks(
            destination_rank=self._rank, destination_blocks=blocks, tokens=tokens, layers=layers
        )
        entries = {}
        for group, own in filled.items():
            pool = incoming.destination.groups[group].pool
            entries.setdefault(pool, []).append((group, _as_slice(own)))
        if layers is None:
            with self._lock:
                self._kept[key] = entries
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return self._claim(request, tables, entries)

    def _claim(self, request: str, tables: Mapping[int, Int64s], entries: _Entries) -> BlockClaim:
        blocks = {}
        for pool, groups in entries.items():
            # A copy, because the caller may reuse its arrays.
            blocks[pool] = np.concatenate([tables[group][own] for group, own in groups])
        return self._ledger.claim("filling", request, blocks)


def _as_slice(entries: Int64s) -> slice | Int64s:
    """Return consecutive indices as a slice, which is faster to apply, and others unchanged."""
    if len(entries) and int(entries[-1] - entries[0]) == len(entries) - 1:
        return slice(int(entries[0]), int(entries[-1]) + 1)
    return np.asarray(entries)
