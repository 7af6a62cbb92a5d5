"""Block tables: which blocks store the tokens of each sequence, for the layers of one group.

The position of a token is the number of stored tokens before it in its sequence. If attention reads
the pages directly, padding on the left is not stored, so the sequences of a batch may differ in
length. The positions of this padding are negative and have no slot. Beam search makes sequences
share blocks copy-on-write: a block is copied, for all layers of its group, just before one of its
owners writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.kernels import AppendStep, append_step, copy_blocks, zero_blocks
from kvatlas.planning import Group
from kvatlas.pool import NO_BLOCK, BlockIds
from kvatlas.specs import Visibility


class BlockTable:
    """The blocks of all sequences of a batch, for the layers of one group."""

    def __init__(self, group: Group, layers: Sequence[LayerCache], free: BlockIds) -> None:
        self.block = group.block
        self.recurrent = group.kind == "recurrent"
        alike = {layer.spec.visibility for layer in layers}
        self.visibility = alike.pop() if len(alike) == 1 else Visibility()
        self.keep_all = False
        """Whether blocks that leave a window are kept, so that tokens can be removed later."""
        self.padded = False
        """Whether stored tokens may include padding. Chunk boundaries are then unknown."""
        self.reserve_blocks: Callable[[int], None] | None = None
        """Reserves blocks for a number of tokens, if a `BlockPool` manages this table."""
        self.sequences: list[list[int]] = []
        self.layers = list(layers)
        self.free = free
        self._slots: dict[range, Tensor] = {}
        self._to_read: dict[range, tuple[Tensor, Tensor | None]] = {}
        self._append_steps: dict[tuple[int, int, int], AppendStep] = {}
        self._reserved: range | None = None
        self._ready = 0
        """Number of tokens for which every sequence already has unshared blocks."""
        self._ids: Tensor | None = None
        self._ids_are_old = True

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.layers[0].buffer.device

    # -- sequences ------------------------------------------------------------------

    def admit(self, count: int, *, padded: bool) -> None:
        """Begin a batch of `count` sequences.

        In a recurrent group, allocate one block for each sequence. If `padded` is true, stored
        tokens may include padding, so chunk boundaries are unknown.
        """
        self.padded = padded
        self.sequences = [[self._take()] if self.recurrent else [] for _ in range(count)]
        self._changed()

    def assign(self, blocks: list[int]) -> None:
        """Use `blocks`, which a `BlockPool` has allocated, for the only sequence of the batch."""
        self.sequences = [blocks]
        self._changed()

    def blocks_to_select(self, chosen: Sequence[int]) -> int:
        """Return how many free blocks `select` needs: one for each state that it copies."""
        return max(0, len(chosen) - len(self.sequences)) if self.recurrent else 0

    def select(self, chosen: Sequence[int]) -> None:
        """Continue with the sequences `chosen`, in that order. A sequence may be chosen twice.

        Attention blocks are shared until they are written to. Recurrent states are written at every
        step, so the state of a sequence that is chosen twice is copied immediately.
        """
        old = self.sequences
        if self.reserve_blocks is not None:
            self._check_pool_keeps(chosen == [0], f"a selection of sequences {chosen}")
        elif self.recurrent:
            for i in set(range(len(old))) - set(chosen):
                self.free.release(old[i])
            self.sequences = []
            for place, i in enumerate(chosen):
                again = i in chosen[:place]
                self.sequences.append([self._copy(old[i][0])] if again else old[i])
        else:
            self.sequences = [list(old[i]) for i in chosen]
            for blocks in self.sequences:
                self.free.share(blocks)
            for blocks in old:
                self.free.release(blocks)
        self._changed()

    def can_crop(self, lengths: Sequence[int]) -> bool:
        """Return whether the sequences can be cropped to `lengths` tokens and then continue.

        The result is false if a block that the next token attends to has been freed.
        """
        return not any(
            NO_BLOCK
            in blocks[self._first_visible(length) // self.block : ceil_div(length, self.block)]
            for blocks, length in zip(self.sequences, lengths, strict=True)
        )

    def crop(self, lengths: Sequence[int]) -> None:
        """Crop the sequences to `lengths` tokens and free the blocks after them."""
        self._check_pool_keeps(self.reserve_blocks is None, f"a crop to {list(lengths)} tokens")
        for blocks, length in zip(self.sequences, lengths, strict=True):
            kept = ceil_div(length, self.block)
            self.free.release(blocks[kept:])
            del blocks[kept:]
        self._changed()

    # -- slots ----------------------------------------------------------------------

    def reserve(self, start: int, count: int, padding: Sequence[int]) -> Tensor:
        """Reserve slots for tokens start .. start + count - 1, and return them.

        A slot is the position of a token in the pages: block id * block size + offset. The result
        is a tensor [sequences, count]. `padding` is the number of tokens on the left of each
        sequence that have no slot. All layers of a group reserve the same tokens. The first
        call allocates the blocks, and copies blocks that sequences share.
        """
        tokens = range(start, start + count)
        self._take_blocks(tokens, padding)
        return self.slots(tokens, padding)

    def reserve_next(self, start: int, padding: Sequence[int]) -> list[int]:
        """Reserve a slot for the token at index `start` of each sequence; return one per sequence.

        Unlike `reserve`, this method does no work on the device.
        """
        self._take_blocks(range(start, start + 1), padding)
        slots = []
        for blocks, skipped in zip(self.sequences, padding, strict=True):
            index, state = divmod(start - skipped, self.block)
            slots.append(blocks[index] * self.block + state if index >= 0 else -1)
        return slots

    def _take_blocks(self, tokens: range, padding: Sequence[int]) -> None:
        """Allocate unshared blocks for `tokens`, unless another layer has done so."""
        if self._reserved == tokens:
            return
        self._forget_slots()
        if tokens.stop > self._ready:
            for blocks, skipped in zip(self.sequences, padding, strict=True):
                first, stop = (max(token - skipped, 0) for token in (tokens.start, tokens.stop))
                self._prepare(blocks, first, stop)
            if self.reserve_blocks is None and self.visibility == Visibility():
                # Without padding, all sequences fill their last block at the same token.
                self._ready = 0 if any(padding) else ceil_div(tokens.stop, self.block) * self.block
        self._reserved = tokens

    def append_step(self, start: int, count: int, first: int) -> AppendStep:
        """Return a function that stores tokens start .. start + count - 1 of every sequence.

        The function then gathers tokens first .. start + count - 1, which attention reads.
        Sequences must have no padding.
        """
        step = self._append_steps.get((start, count, first))
        if step is None:
            self._take_blocks(range(start, start + count), [0] * len(self.sequences))
            step = self._append_steps[start, count, first] = append_step(
                self.ids, block=self.block, start=start, count=count, first=first,
                visible=self._first_visible(start),
            )  # fmt: skip
        return step

    def slots(self, tokens: range, padding: Sequence[int]) -> Tensor:
        """Return the slots of `tokens` as a tensor [sequences, tokens]; -1 for unstored tokens."""
        if tokens not in self._slots:
            skipped = torch.tensor(padding, device=self.device).unsqueeze(1)
            positions = torch.arange(tokens.start, tokens.stop, device=self.device) - skipped
            blocks = self.ids.gather(1, (positions // self.block).clamp(min=0))
            missing = (positions < 0) | (blocks == NO_BLOCK)
            slots = blocks * self.block + positions % self.block
            self._slots[tokens] = slots.masked_fill(missing, -1)
        return self._slots[tokens]

    def slots_to_read(
        self, tokens: range, start: int, padding: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a tuple (slots, mask) for `tokens`; attention must not read masked tokens.

        Tokens that are not stored or not visible are masked, and their slot is 0. The mask is None
        if all tokens can be read. With chunked attention, tokens of a chunk that ended before
        `start` are masked, because they may never have been stored. All layers of a group read the
        same tokens, and only the first call may wait for the device.
        """
        if tokens not in self._to_read:
            slots = self.slots(tokens, padding)
            self._to_read = {tokens: (slots, None)}
            if self.visibility == Visibility() and max(padding) <= tokens.start:
                return slots, None  # all are stored
            firsts = [skipped + self._first_visible(max(start - skipped, 0)) for skipped in padding]
            unseen = torch.tensor(firsts, device=self.device).unsqueeze(1) - tokens.start
            missing = (slots < 0) | (torch.arange(len(tokens), device=self.device) < unseen)
            if bool(missing.any()):
                self._to_read = {tokens: (slots.clamp(min=0), missing)}
        return self._to_read[tokens]

    @property
    def ids(self) -> Tensor:
        """Block ids [sequences, blocks], padded with `NO_BLOCK`.

        The tensor is updated in place while its capacity suffices, because a captured graph
        refers to its address.
        """
        if self._ids is None or self._ids_are_old:
            count, width = len(self.sequences), max(1, *map(len, self.sequences))
            if self._ids is None or self._ids.shape[0] != count or self._ids.shape[1] < width:
                room = 1 if self.recurrent else 1 << width.bit_length()
                self._ids = torch.empty((count, room), dtype=torch.long, device=self.device)
            room = self._ids.shape[1]
            filled = [blocks + [NO_BLOCK] * (room - len(blocks)) for blocks in self.sequences]
            self._ids.copy_(torch.tensor(filled))
            self._ids_are_old = False
        return self._ids

    def kernel_ids(self, layer: LayerCache, block: int | None = None) -> Tensor:
        """Return the kernel block ids of all blocks, or only of the block with the id `block`.

        One block of the plan may consist of several kernel blocks of a layer.
        """
        ids = self.ids if block is None else torch.tensor([block], device=self.device)
        return layer.kernel_ids(ids)

    # -- inside ---------------------------------------------------------------------

    def _first_visible(self, position: int) -> int:
        """Return the first position that a token at `position` attends to."""
        visibility = self.visibility
        if visibility.chunk is not None and self.padded:
            visibility = Visibility(window=visibility.chunk)
        return int(visibility.first(position))

    @staticmethod
    def _check_pool_keeps(keeps: bool, got: str) -> None:
        if not keeps:
            problem = "Prefix reuse supports neither beam search nor cropping"
            hint = "For beam search or cropping, use an AtlasCache without PrefixReuse"
            raise AtlasError(Code.ENGINE_REFUSES, problem, got=got, hint=hint)

    def _prepare(self, blocks: list[int], first: int, stop: int) -> None:
        """Allocate the blocks that a sequence needs to write positions first .. stop - 1.

        Blocks before the window are freed, and shared blocks are replaced by copies.
        """
        if self.reserve_blocks is not None:
            self.reserve_blocks(stop)
            return
        if not self.keep_all:
            for index in range(min(self._first_visible(first) // self.block, len(blocks))):
                if blocks[index] != NO_BLOCK:
                    self._replace(blocks, index, NO_BLOCK)
        end = ceil_div(stop, self.block)
        while len(blocks) < end:
            blocks.append(self._take())
            self._ids_are_old = True
        for index in range(first // self.block, end):
            if self.free.is_shared(blocks[index]):
                self._replace(blocks, index, self._copy(blocks[index]))

    def _replace(self, blocks: list[int], index: int, block: int) -> None:
        self.free.release([blocks[index]])
        blocks[index] = block
        self._ids_are_old = True

    def _take(self) -> int:
        """Allocate a free block, and zero it if it is for a recurrent state.

        Models read parts of a state before they have written all of it.
        """
        block = self.free.take()
        if self.recurrent:
            for layer in self.layers:
                zero_blocks(layer, self.kernel_ids(layer, block))
        return block

    def _copy(self, block: int) -> int:
        copy = self._take()
        self.copy(block, copy)
        return copy

    def copy(self, source: int, destination: int) -> None:
        """Copy the block `source` to the block `destination` in all layers of the group."""
        for layer in self.layers:
            old, new = (self.kernel_ids(layer, one) for one in (source, destination))
            copy_blocks(layer, old, layer, new)

    def _changed(self) -> None:
        self._ids_are_old, self._reserved, self._ready = True, None, 0
        self._forget_slots()

    def _forget_slots(self) -> None:
        self._slots, self._to_read, self._append_steps = {}, {}, {}
