"""The sequences of a batch: their padding, their block tables, and how attention reads pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvatlas.engines.transformers.block_table import BlockTable
from kvatlas.errors import AtlasError, Code


class SequenceBatch:
    """What all layers of a cache share."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.size = 0
        """Sequences, or beams of them."""
        self.padding: list[int] = []
        """Tokens on the left of each sequence that are padding and not stored."""
        self.paged_tokens: tuple[int, int] | None = None
        """(start, count) of the tokens for which attention said that it reads the pages."""
        self._take_back: Callable[[], None] | None = None

    def admit(self, size: int) -> None:
        """Begin a batch of `size` sequences, unless it has begun with as many."""
        if self.size == size:
            return
        if self.size:
            raise AtlasError(
                Code.BAD_TENSOR,
                "The batch size changed between two calls",
                got=f"{size} sequences after {self.size}",
                hint="Use reset, batch_select_indices or batch_repeat_interleave between them",
            )
        self._require({table: size for table in self.tables if table.recurrent})
        for table in self.tables:
            table.admit(size, padded=self.paged_tokens is None)
        self.size = size
        if len(self.padding) != size:
            self.padding = [0] * size

    def begin_on_pool(self, reserve_blocks: Callable[[int], None]) -> None:
        """Begin with one sequence whose blocks a pool deals out."""
        self.clear()
        for table in self.tables:
            table.reserve_blocks = reserve_blocks
        self.size, self.padding = 1, [0]

    def clear(self) -> None:
        """End the batch and give all blocks back; a pool's are its own to give back."""
        for table in self.tables:
            if table.reserve_blocks is not None:
                table.reserve_blocks, table.sequences = None, []
            table.select([])
        self.size, self.padding = 0, []
        self.paged_tokens = self._take_back = None

    def select(self, indices: Tensor) -> None:
        """Go on with these sequences, given by their numbers or by a mask over them."""
        self.settle()
        chosen = torch.arange(self.size)[indices.cpu()].tolist()
        self._require({table: table.blocks_to_select(chosen) for table in self.tables})
        for table in self.tables:
            table.select(chosen)
        self.padding = [self.padding[i] for i in chosen]
        self.size = len(chosen)
        if not chosen:
            self.clear()

    def _require(self, needs: Mapping[BlockTable, int]) -> None:
        """Refuse what some pool has too few blocks for, before any table changes."""
        for free in {table.free for table in needs}:
            free.require(sum(n for table, n in needs.items() if table.free is free))

    # -- states that are lent to models ---------------------------------------------

    def lend(self, take_back: Callable[[], None]) -> None:
        """One layer at a time lends states to the model; others' are written to the pages first."""
        if self._take_back != take_back:
            self.settle()
            self._take_back = take_back

    def settle(self) -> None:
        """Write to the pages what the model was lent and has changed in place."""
        if self._take_back is not None:
            self._take_back()
            self._take_back = None

    # -- how pages are read ---------------------------------------------------------

    def expect_paged_attention(
        self, mask: Tensor | None, size: int, start: int, count: int
    ) -> None:
        """Attention will read the pages for `count` tokens from `start` on.

        `mask` [sequences, tokens] tells padding apart, which is then not stored.
        """
        self.paged_tokens = (start, count)
        padding = [0] * size if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
        if start == 0 and not self.size:
            self.padding = padding
        if mask is None:
            return
        tokens = torch.arange(start, start + count, device=mask.device)
        left = tokens < torch.tensor(padding, device=mask.device).unsqueeze(1)
        if self.padding != padding or not bool(
            (mask[:, start : start + count].bool() | left).all()
        ):
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "Attention that reads pages takes padding on the left of the first tokens only",
                got="padding elsewhere, or padding that was stored under another attention",
                hint="Use attn_implementation sdpa or eager from the first token on",
            )
