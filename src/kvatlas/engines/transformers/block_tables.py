"""Block tables: which blocks hold the states of each row of a batch, for one group.

A row's position counts its own stored tokens. Padding on the left is not stored, so
rows of one batch may be unlike in length; positions before the first are negative and
have no slot. Rows may share blocks after a beam search has chosen among them: a block
is copied for all layers of its group just before one of its owners writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvatlas.cache import LayerCache
from kvatlas.engines.transformers.block_ids import Blocks
from kvatlas.geometry import ceil_div
from kvatlas.kernels import copy_blocks, zero_blocks
from kvatlas.planning import Group

GONE = -1
"""Stands for a block that a window has left behind."""


class Table:
    """The blocks of every row, for the layers of one group."""

    def __init__(self, group: Group, layers: Sequence[LayerCache], blocks: Blocks) -> None:
        self.block = group.block
        self.recurrent = group.kind == "recurrent"
        self.window = group.window if group.kind.startswith("sliding") else None
        self.chunk = group.window if group.kind.startswith("chunked") else None
        self.keep_all = False
        """Nothing is left behind, so that tokens can be taken back."""
        self.padded = False
        """Rows may hold padding, so that chunks begin nobody knows where."""
        self.rows: list[list[int]] = []
        self._layers = list(layers)
        self.blocks = blocks
        self._slots: dict[range, torch.Tensor] = {}
        self._reserved: range | None = None
        self._ids: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._layers[0].buffer.device

    # -- rows -----------------------------------------------------------------------

    def admit(self, count: int, *, padded: bool) -> None:
        """Rows for a new batch; a recurrent row gets the block that it will keep."""
        self.padded = padded
        self.rows = [[self._fresh()] if self.recurrent else [] for _ in range(count)]
        self._changed()

    def copies(self, chosen: Sequence[int]) -> int:
        """Blocks more than it has now that `select` takes at once: states that come twice."""
        return max(0, len(chosen) - len(self.rows)) if self.recurrent else 0

    def clear(self) -> None:
        """Give everything back."""
        self._drop(block for row in self.rows for block in row)
        self.rows = []
        self._changed()

    def select(self, chosen: Sequence[int]) -> None:
        """Rows `chosen` of the old ones, in that order; some may be chosen twice.

        Attention shares blocks until they are written to. States are written at every
        step, so a state that is chosen twice is copied at once.
        """
        old = self.rows
        if not self.recurrent:
            self.rows = [list(old[i]) for i in chosen]
            for block in (block for row in self.rows for block in row if block != GONE):
                self.blocks.share(block)
            self._drop(block for row in old for block in row)
        else:
            self._drop(block for i in set(range(len(old))) - set(chosen) for block in old[i])
            self.rows = []
            for place, i in enumerate(chosen):
                again = i in chosen[:place]
                self.rows.append([self._copied(old[i][0])] if again else old[i])
        self._changed()

    def sees(self, lengths: Sequence[int]) -> bool:
        """Whether all is still there that rows of these lengths go on from."""
        return not any(
            GONE in row[self._first_seen(length) // self.block : ceil_div(length, self.block)]
            for row, length in zip(self.rows, lengths, strict=True)
        )

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep `lengths` tokens of each row, and give blocks behind them back."""
        for row, length in zip(self.rows, lengths, strict=True):
            kept = ceil_div(length, self.block)
            self._drop(row[kept:])
            del row[kept:]
        self._changed()

    # -- places ---------------------------------------------------------------------

    def reserve(self, start: int, count: int, skipped: Sequence[int]) -> torch.Tensor:
        """Slots [rows, count] for the next tokens, of which `start` came before.

        `skipped` are the tokens of each row that are padding and have no slot. All
        layers of the group ask the same, and the first one finds the blocks.
        """
        places = range(start, start + count)
        if self._reserved == places:
            return self.slots(places, skipped)
        self._slots.clear()
        for row, skip in zip(self.rows, skipped, strict=True):
            first, stop = max(start - skip, 0), start + count - skip
            if not self.keep_all:
                self._leave(row, self._first_seen(first))
            for _ in range(len(row), ceil_div(max(stop, 0), self.block)):
                row.append(self._fresh())
                self._ids = None
            for index in range(first // self.block, ceil_div(max(stop, 0), self.block)):
                self._own(row, index)
        self._reserved = places
        return self.slots(places, skipped)

    def slots(self, places: range, skipped: Sequence[int]) -> torch.Tensor:
        """Slots [rows, places] of tokens by their place in the batch; negative for none."""
        if places not in self._slots:
            self._slots[places] = self._find(places, skipped)
        return self._slots[places]

    def _find(self, places: range, skipped: Sequence[int]) -> torch.Tensor:
        skip = torch.tensor(skipped, device=self.device).unsqueeze(1)
        at = torch.arange(places.start, places.stop, device=self.device) - skip
        ids = self.ids
        blocks = ids.gather(1, (at // self.block).clamp(min=0))
        gone = (at < 0) | (blocks == GONE)
        return (blocks * self.block + at % self.block).masked_fill(gone, -1)

    @property
    def ids(self) -> torch.Tensor:
        """Block ids [rows, blocks], filled up with blocks that are gone."""
        if self._ids is None:
            width = max(1, *map(len, self.rows))
            filled = [row + [GONE] * (width - len(row)) for row in self.rows]
            self._ids = torch.tensor(filled, dtype=torch.long, device=self.device)
        return self._ids

    def kernel_ids(self, layer: LayerCache) -> torch.Tensor:
        """The same as kernels number blocks, where a block is several kernel blocks."""
        return self._split(layer, self.ids)

    # -- inside ---------------------------------------------------------------------

    def _first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        if self.chunk is not None and not self.padded:
            return position // self.chunk * self.chunk
        reach = self.window or self.chunk
        return 0 if reach is None else max(0, position - reach + 1)

    def _leave(self, row: list[int], first: int) -> None:
        for index in range(min(first // self.block, len(row))):
            if row[index] != GONE:
                self._drop([row[index]])
                row[index] = GONE
                self._ids = None

    def _own(self, row: list[int], index: int) -> None:
        """Copy a block before it is written to, if others own it too."""
        if self.blocks.shared(row[index]):
            mine = self._copied(row[index])
            self._drop([row[index]])
            row[index] = mine
            self._ids = None

    def _fresh(self) -> int:
        """A block of the pool; states are read before all of them is written."""
        block = self.blocks.take()
        if self.recurrent:
            for layer in self._layers:
                zero_blocks(layer, self._split(layer, torch.tensor([block], device=self.device)))
        return block

    def _copied(self, block: int) -> int:
        copy = self._fresh()
        for layer in self._layers:
            old, new = torch.tensor([[block], [copy]], device=self.device)
            copy_blocks(layer, self._split(layer, old), layer, self._split(layer, new))
        return copy

    def _split(self, layer: LayerCache, ids: torch.Tensor) -> torch.Tensor:
        placed = layer.placement
        split = placed.size("k") if "k" in placed.axes else 1
        if split == 1:
            return ids
        inner = torch.arange(split, device=ids.device)
        return (ids.unsqueeze(-1) * split + inner).flatten(-2)

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != GONE:
                self.blocks.drop(block)

    def _changed(self) -> None:
        self._ids = self._reserved = None
        self._slots.clear()
