"""The sequences of a batch: their padding, their block tables, and how attention reads pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvatlas.engines.transformers.block_table import BlockTable
from kvatlas.errors import AtlasError, Code


class StepTensors(NamedTuple):
    """What attention of every layer needs to know of the tokens of a step."""

    lengths: Tensor
    """Stored tokens of each sequence, the new ones included."""
    queries: Tensor
    """New ones that are stored."""
    stored: Tensor | None
    """Which of the new ones [sequences, tokens] are stored; None for all."""


class FixedStep(NamedTuple):
    """A token for each sequence, in tensors that stay where they are from step to step."""

    tensors: StepTensors
    slots: Mapping[BlockTable, Tensor]
    """Where each group stores the new token of each sequence."""


class SequenceBatch:
    """What all layers of a cache share."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.size = 0
        """Sequences, or beams of them."""
        self.number = 0
        """Counts batches, and choices among the sequences of one."""
        self.padding: list[int] = []
        """Tokens on the left of each sequence that are padding and not stored."""
        self.paged_tokens: tuple[int, int] | None = None
        """(start, count) of the tokens for which attention said that it reads the pages."""
        self.fixed: FixedStep | None = None
        """What layers use in place of their own count of tokens, while a graph is captured."""
        self._take_back: Callable[[], None] | None = None
        self._step: tuple[tuple[int, int], StepTensors] | None = None

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
        self._begin_anew()
        if len(self.padding) != size:
            self.padding = [0] * size

    def begin_on_pool(self, reserve_blocks: Callable[[int], None]) -> None:
        """Begin with one sequence whose blocks a pool deals out."""
        self.clear()
        for table in self.tables:
            table.reserve_blocks, table.padded = reserve_blocks, False
        self.size, self.padding = 1, [0]

    def clear(self) -> None:
        """End the batch and give all blocks back; a pool's are its own to give back."""
        for table in self.tables:
            if table.reserve_blocks is not None:
                table.reserve_blocks, table.sequences = None, []
            table.select([])
        self.size, self.padding = 0, []
        self.paged_tokens = self._take_back = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.number += 1
        self._step = None

    def select(self, indices: Tensor) -> None:
        """Go on with these sequences, given by their numbers or by a mask over them."""
        self.settle()
        chosen = torch.arange(self.size)[indices.cpu()].tolist()
        self._require({table: table.blocks_to_select(chosen) for table in self.tables})
        for table in self.tables:
            table.select(chosen)
        self.padding = [self.padding[i] for i in chosen]
        self.size = len(chosen)
        self._begin_anew()
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

    def step_tensors(self, start: int, count: int) -> StepTensors:
        """Lengths and queries of a step of `count` tokens from `start` on, for all layers."""
        if self.fixed is not None:
            return self.fixed.tensors
        if self._step is None or self._step[0] != (start, count):
            device = self.tables[0].device
            padding = torch.tensor(self.padding, device=device)
            lengths = (start + count - padding).clamp(min=0)
            if max(self.padding) <= start:
                made = StepTensors(lengths, torch.full_like(lengths, count), None)
            else:
                tokens = torch.arange(start, start + count, device=device)
                stored = tokens >= padding.unsqueeze(1)
                made = StepTensors(lengths, stored.sum(1), stored)
            self._step = (start, count), made
        return self._step[1]

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
            raise masked_otherwise()

    def masks_left_padding_alone(self, mask: Tensor) -> Tensor:
        """Whether a mask [sequences, tokens] hides the padding and nothing else, on its device."""
        padding = torch.tensor(self.padding, device=mask.device).unsqueeze(1)
        tokens = torch.arange(mask.shape[-1], device=mask.device)
        return (mask.bool() == (tokens >= padding)).all()


def masked_otherwise() -> AtlasError:
    """A refusal of a mask with which pages cannot be read."""
    return AtlasError(
        Code.ENGINE_REFUSES,
        "Attention that reads pages takes padding on the left of the first tokens only",
        got="padding elsewhere, or padding that was stored under another attention",
        hint="Use attn_implementation sdpa or eager from the first token on",
    )
