"""The sequences of a batch: their padding, their block tables and the tensors of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvatlas.engines.transformers.block_table import BlockTable
from kvatlas.errors import AtlasError, Code


class StepTensors(NamedTuple):
    """The length of each sequence in one step, and its number of new tokens.

    All attention layers use the same tensors.
    """

    lengths: Tensor
    """Number of stored tokens of each sequence, including the new tokens."""
    queries: Tensor
    """Number of new tokens of each sequence that are stored."""
    stored: Tensor | None
    """Boolean mask [sequences, tokens] of the new tokens to store; None if all are stored."""


class FixedStep(NamedTuple):
    """A decode step of one token per sequence, in tensors whose addresses never change."""

    tensors: StepTensors
    slots: Mapping[BlockTable, Tensor]
    """The slot of each sequence's new token, for each group's block table."""


class SequenceBatch:
    """The state that all layers of a cache share: sequences, padding and block tables."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.size = 0
        """Number of sequences. Each beam counts as one."""
        self.number = 0
        """Incremented whenever a batch begins or its sequences are reselected."""
        self.padding: list[int] = []
        """Number of padding tokens on the left of each sequence. They are not stored."""
        self.paged_tokens: tuple[int, int] | None = None
        """(start, count) of the tokens whose attention reads the pages directly."""
        self.fixed: FixedStep | None = None
        """The fixed tensors of a `DecodeGraph`, while the model runs on them; otherwise None."""
        self._take_back: Callable[[], None] | None = None
        self._step: tuple[tuple[int, int], StepTensors] | None = None

    def admit(self, size: int) -> None:
        """Begin a batch of `size` sequences, unless one of this size has begun already."""
        if self.size == size:
            return
        if self.size:
            raise AtlasError(
                Code.BAD_TENSOR,
                "The batch size changed between two calls",
                got=f"{size} sequences after {self.size}",
                hint="Between the calls, call reset, batch_select_indices or "
                "batch_repeat_interleave",
            )
        self._require({table: size for table in self.tables if table.recurrent})
        for table in self.tables:
            table.admit(size, padded=self.paged_tokens is None)
        self.size = size
        self._begin_anew()
        if len(self.padding) != size:
            self.padding = [0] * size

    def begin_on_pool(self, reserve_blocks: Callable[[int], None]) -> None:
        """Begin a batch of one sequence whose blocks a `BlockPool` allocates.

        `reserve_blocks(n)` must reserve blocks for the first n tokens.
        """
        self.clear()
        for table in self.tables:
            table.reserve_blocks, table.padded = reserve_blocks, False
        self.size, self.padding = 1, [0]

    def clear(self) -> None:
        """End the batch and free its blocks, except those that a `BlockPool` manages."""
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
        """Continue with the given sequences. `indices` are integers or a boolean mask."""
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
        """Raise an error if a pool has too few free blocks.

        `needs` is the number of blocks that each table needs.
        """
        for free in {table.free for table in needs}:
            free.require(sum(n for table, n in needs.items() if table.free is free))

    # -- states that are lent to models ---------------------------------------------

    def lend(self, take_back: Callable[[], None]) -> None:
        """Register `take_back`, the function that writes a layer's lent states to the pages.

        Only one layer lends states to the model at a time. The states that another layer has lent
        are written back first.
        """
        if self._take_back != take_back:
            self.settle()
            self._take_back = take_back

    def settle(self) -> None:
        """Write the recurrent states that a model has updated in place back to the pages."""
        if self._take_back is not None:
            self._take_back()
            self._take_back = None

    # -- how pages are read ---------------------------------------------------------

    def step_tensors(self, start: int, count: int) -> StepTensors:
        """Return the tensors of a step that computes tokens start .. start + count - 1.

        Each sequence has an entry for its length and one for its number of new tokens.
        """
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
        """Record that attention reads tokens start .. start + count - 1 from the pages.

        `mask` [sequences, tokens] is False for padding, which is not stored. A batch of `size`
        sequences without a mask has no padding. Raise an error if the mask hides more than left
        padding.
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
        """Return whether a mask [sequences, tokens] hides the left padding and nothing else.

        The result is a boolean tensor on the mask's device.
        """
        padding = torch.tensor(self.padding, device=mask.device).unsqueeze(1)
        tokens = torch.arange(mask.shape[-1], device=mask.device)
        return (mask.bool() == (tokens >= padding)).all()


def masked_otherwise() -> AtlasError:
    """Return the error for a mask that hides more than left padding."""
    return AtlasError(
        Code.ENGINE_REFUSES,
        "Paged attention supports padding only on the left of the prompt, and only if no padding "
        "token is in the cache",
        got="a mask that hides other tokens",
        hint='Pad on the left, or use attn_implementation="sdpa" for the whole request',
    )
