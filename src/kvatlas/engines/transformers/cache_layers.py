"""The layers of an `AtlasCache`: attention, indexed, recurrent, hybrid and empty layers.

All of them implement the layer interface of transformers' caches. Models update recurrent states in
place, in one contiguous tensor per batch, but the states are stored in scattered blocks. A layer
therefore lends the model a temporary tensor and writes it back to the pages at the next access
to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvatlas.cache import LayerCache
from kvatlas.engines.transformers.block_table import BlockTable
from kvatlas.engines.transformers.sequence_batch import SequenceBatch
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.kernels import (
    read,
    read_latent,
    read_rows,
    read_states,
    write,
    write_latent,
    write_rows,
    write_states,
)
from kvatlas.specs import Attention, LatentAttention, Recurrent, State

Pair = tuple[Tensor, Tensor]
"""K and V, each [batch, heads, tokens, D]. For MLA: the latent and the rotary part, one head."""

_MODEL_AXES = {"conv": ("RT",), "ssm": ("HKV", "HPS", "RS")}
"""Axis orders of one sequence's state in modeling code. Pages may use another order."""


class PagedAttentionLayer(CacheLayerMixin):
    """The K and V, or the latents, of one layer, stored in the pages of its group."""

    supports_early_init = False
    indexed = False
    """Whether an indexer selects the tokens to which each query attends."""

    def __init__(self, batch: SequenceBatch, pages: LayerCache, table: BlockTable) -> None:
        super().__init__()
        self.batch = batch
        self.pages = pages
        self.table = table
        self.latent = isinstance(pages.spec, LatentAttention)
        plain = isinstance(pages.spec, Attention) and pages.spec.cache == "auto"
        self._dtype = pages.field("k").dtype if plain else None
        """The dtype of K and V in the pages; None if they are quantised."""
        self.reach = pages.spec.visibility.window or pages.spec.visibility.chunk
        """The size of the attention window or chunk in tokens; None if attention is full."""
        self.is_sliding = self.reach is not None
        self.seen = 0
        """Number of tokens seen so far, including padding."""

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed: attention is full, or blocks before a window are kept."""
        return self.reach is None or self.table.keep_all

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: the pages are already allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any) -> Pair:
        """Store the K and V of new tokens; return the K and V for the attention function.

        If attention reads the pages directly, return the new K and V unchanged. Otherwise return
        the K and V of all visible tokens.
        """
        if self.batch.fixed is not None:
            self._write_tokens(key_states, value_states, self.batch.fixed.slots[self.table])
            return key_states, value_states
        batch, start, count = self.batch, self.seen, key_states.shape[-2]
        batch.admit(key_states.shape[0])
        paged = batch.paged_tokens == (start, count)
        alike = key_states.dtype == value_states.dtype == self._dtype
        if alike and not paged and not any(batch.padding):
            step = self.table.append_step(start, count, self._offset(start))
            pair = step(self.pages, key_states, value_states)
            self.seen += count
            return pair
        slots = self.table.reserve(start, count, batch.padding)
        self._write_tokens(key_states, value_states, slots.flatten())
        self.seen += count
        if paged:
            return key_states, value_states
        keys, values = self._in_sight(start, key_states.shape[1], key_states.dtype)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def reads_pages(self, count: int) -> bool:
        """Return whether attention of the last `count` tokens reads the pages directly."""
        batch = self.batch
        return batch.fixed is not None or batch.paged_tokens == (self.seen - count, count)

    def positions(self, indices: Tensor) -> Tensor:
        """Return the positions of the tokens at `indices` [batch, ...].

        Indices count padding on the left, and positions do not, so padding has negative positions.
        In the fixed step of a `DecodeGraph`, positions equal indices.
        """
        if self.batch.fixed is not None or not any(self.batch.padding):
            return indices
        padding = torch.tensor(self.batch.padding, device=indices.device, dtype=indices.dtype)
        return indices - padding.view(-1, *[1] * (indices.dim() - 1))

    def _write_tokens(self, key_states: Tensor, value_states: Tensor, slots: Tensor) -> None:
        # Kernels expect one row per token. The head axis of latents, with one head, is dropped.
        k, v = (s.transpose(1, 2).flatten(0, 1 + self.latent) for s in (key_states, value_states))
        (write_latent if self.latent else write)(self.pages, k, v, slots)

    def _in_sight(self, start: int, heads: int, dtype: torch.dtype) -> Pair:
        """Return K and V of the tokens that transformers' mask covers.

        K and V of tokens that are not stored are zero.
        """
        tokens = range(self._offset(start), self.seen)
        slots, missing = self.table.slots_to_read(tokens, start, self.batch.padding)
        if self.latent:
            pair = read_latent(self.pages, slots.flatten())
        else:
            pair = read(self.pages, slots.flatten(), out=self._room(slots.numel(), heads, dtype))
        keys, values = (rows.view(*slots.shape, heads, -1) for rows in pair)
        if missing is not None:
            keys[missing], values[missing] = 0, 0
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _room(self, rows: int, heads: int, dtype: torch.dtype) -> Pair:
        """Allocate K and V for `rows` tokens, with up to an eighth of additional memory.

        The number of tokens grows at every step. Rounding it up lets torch's caching allocator
        reuse the memory of the previous step. A new device allocation would take longer than the
        step itself.
        """
        unit = 1 << max(0, rows.bit_length() - 4)
        room = ceil_div(rows, unit) * unit
        spec = self.pages.spec_as(Attention)
        k, v = (
            torch.empty((room, heads, dim), dtype=dtype, device=self.pages.buffer.device)[:rows]
            for dim in (spec.head_dim, spec.v_dim or spec.head_dim)
        )
        return k, v

    def _offset(self, start: int) -> int:
        return 0 if self.reach is None else max(start - self.reach + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of tokens that `update` will return, index of the first of these)."""
        offset = self._offset(self.seen)
        return self.seen + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Return the number of tokens computed so far, including padding."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the size of the window or chunk in tokens, or -1 if attention is full."""
        return self.reach or -1

    def activate_past_recording(self) -> None:
        """Keep blocks that leave the window, so that tokens can be removed later."""
        self.table.keep_all = True

    def reset(self) -> None:
        """Forget all tokens. `SequenceBatch.clear` frees the blocks."""
        self.seen = 0


class PagedIndexedLayer(PagedAttentionLayer):
    """The latents of one layer, and the keys of the indexer that selects tokens to attend to."""

    indexed = True

    def __init__(
        self, attention: PagedAttentionLayer, keys: LayerCache, key_table: BlockTable
    ) -> None:
        super().__init__(attention.batch, attention.pages, attention.table)
        self.keys = keys
        self.key_table = key_table

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the keys [batch, tokens, D] of new tokens; return the keys of all tokens.

        Models call this method after `update`. In the fixed step of a `DecodeGraph`, the result has
        a key for every slot of the block tables, and `mask_of_slots` excludes unused slots.
        """
        batch, table, count = self.batch, self.key_table, indexer_key_states.shape[1]
        if batch.fixed is not None:
            new, missing = batch.fixed.slots[table], None
        else:
            new = table.reserve(self.seen - count, count, batch.padding).flatten()
        rows = indexer_key_states.flatten(0, 1)
        write_rows(self.keys, rows, new, all_kept=max(batch.padding) <= self.seen - count)
        if batch.fixed is not None:
            slots = self._all_slots()
        else:
            tokens = range(self.seen)
            slots, missing = table.slots_to_read(tokens, self.seen - count, batch.padding)
        keys = read_rows(self.keys, slots.flatten()).view(*slots.shape, -1)
        if missing is not None:
            keys[missing] = 0
        return keys.to(indexer_key_states.dtype)

    def _all_slots(self) -> Tensor:
        """Return the slots [sequences, slots] of the block tables, in the order of tokens."""
        states = torch.arange(self.key_table.block, device=self.key_table.device)
        blocks = self.key_table.ids.clamp(min=0).unsqueeze(-1)
        return (blocks * self.key_table.block + states).flatten(1)

    def mask_of_slots(self, lengths: Tensor) -> Tensor:
        """Return a mask [batch, 1, 1, slots] of the keys that `update_indexer` returns.

        `lengths` contains a number of tokens for each sequence. The mask is true for the keys of
        this many first tokens.
        """
        count = self.key_table.ids.shape[1] * self.key_table.block
        return (torch.arange(count, device=lengths.device) < lengths.unsqueeze(1))[:, None, None]


@dataclass(frozen=True)
class LentState:
    """The `conv_states` or `recurrent_states` of a layer, as models access them.

    Item 0 is a tensor that models update in place.
    """

    layer: PagedStateLayer
    name: str

    def __getitem__(self, index: int) -> Tensor | None:
        if index:
            problem = "A layer of an AtlasCache can have only one state of each kind"
            hint = "Use transformers' own cache for this model"
            got = f"an access to {self.name}[{index}]"
            raise AtlasError(Code.ENGINE_REFUSES, problem, got=got, hint=hint)
        return self.layer.lend(self.name)


class PagedStateLayer(LinearAttentionCacheLayerMixin):
    """The conv and ssm states of one layer, stored in one block per sequence.

    A layer whose state is split into parts has one block per sequence and part.
    """

    is_croppable = False

    def __init__(
        self, batch: SequenceBatch, parts: Sequence[LayerCache], tables: Sequence[BlockTable]
    ) -> None:
        LinearAttentionCacheLayerMixin.__init__(self)
        self.batch = batch
        self.parts = parts
        self.state_tables = tables
        self.conv_states = LentState(self, "conv")
        self.recurrent_states = LentState(self, "ssm")
        self._lent: dict[str, Tensor] = {}
        self._to_model: dict[str, tuple[int, ...]] = {}
        for state in parts[0].spec_as(Recurrent).layer_states():
            axes = parts[0].place(state.name).axes
            self._to_model[state.name] = tuple(map(axes.index, f"B{model_axes(state)}"))

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: the pages are already allocated."""

    def lend(self, name: str) -> Tensor | None:
        """Return the state `conv` or `ssm`, which the model may update in place.

        Return None if no state is stored yet.
        """
        self.batch.lend(self.settle)
        if not self.has_previous_state[0]:
            return None
        if name not in self._lent:
            states = read_states(self.parts, self._blocks)
            for field, rows in states.items():
                self._lent.setdefault(field, rows.permute(self._to_model[field]).contiguous())
        return self._lent.get(name)

    def settle(self) -> None:
        """Write the lent states back to the pages."""
        if self._lent:
            self._write(self._lent)
            self._lent = {}

    def _write(self, states: dict[str, Tensor]) -> None:
        paged = {
            name: rows.movedim(tuple(range(rows.dim())), self._to_model[name])
            for name, rows in states.items()
        }
        write_states(self.parts, paged, self._blocks)

    @property
    def _blocks(self) -> list[Tensor]:
        return [table.ids[:, 0] for table in self.state_tables]

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store the convolution's last inputs.

        Return the previously stored inputs, followed by the new inputs `conv_states`.
        """
        self.batch.admit(conv_states.shape[0])
        before = self.lend("conv")
        if before is not None:
            conv_states = torch.cat((before.to(conv_states.dtype), conv_states), dim=-1)
        taps = self.parts[0].place("conv").size("T")
        short = max(0, taps - conv_states.shape[-1])
        self._keep("conv", torch.nn.functional.pad(conv_states, (short, 0))[..., -taps:])
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store a new recurrent state and return it."""
        self.batch.admit(recurrent_states.shape[0])
        self._keep("ssm", recurrent_states)
        return recurrent_states

    def _keep(self, name: str, states: Tensor) -> None:
        self._lent.pop(name, None)
        self._write({name: states})
        self.has_previous_state[0] = True

    def activate_past_recording(self) -> None:
        """Raise an error: a recurrent state does not record past tokens."""
        raise cannot_take_back("a layer with recurrent states")

    def reset(self) -> None:
        """Forget the states. `SequenceBatch.clear` frees the blocks."""
        self._lent = {}
        self.has_previous_state[0] = False


class PagedHybridLayer(PagedAttentionLayer, PagedStateLayer):
    """A decoder layer with both attention and a recurrent state."""

    is_croppable = False

    def __init__(self, attention: PagedAttentionLayer, states: PagedStateLayer) -> None:
        PagedAttentionLayer.__init__(self, attention.batch, attention.pages, attention.table)
        PagedStateLayer.__init__(self, states.batch, states.parts, states.state_tables)

    activate_past_recording = PagedStateLayer.activate_past_recording

    def reset(self) -> None:
        """Forget all tokens and states."""
        PagedAttentionLayer.reset(self)
        PagedStateLayer.reset(self)


class EmptyLayer(LinearAttentionCacheLayerMixin):
    """A decoder layer that caches nothing, such as an MLP."""

    is_croppable = True

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: the plan has no page for this layer."""
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "The plan has no page for this decoder layer",
            got="new tokens or states from the model",
            hint="Make the plan from the config of the model that is running",
        )

    update_conv_state = update_recurrent_state = update

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: this layer has no cache."""


def model_axes(state: State) -> str | None:
    """Return the axis order of a state in transformers' models; None for other states."""
    own = {axis for axis, _ in state.axes}
    return next((axes for axes in _MODEL_AXES.get(state.name, ()) if set(axes) == own), None)


def cannot_take_back(got: str, hint: str = "Call reset and compute the tokens again") -> AtlasError:
    """Return the error for a crop to an earlier state that is no longer stored."""
    return AtlasError(Code.CANNOT_TAKE_BACK, got=got, hint=hint)
