"""The layers of an `AtlasCache` as transformers asks for them: attention, recurrent, both, none.

Models change recurrent states in place, in one tensor for the batch, while the states of its
sequences lie in scattered blocks. So a model is lent a tensor, and what it made of it is
written to the pages when the cache is next asked for anything.
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
from kvatlas.kernels import read, read_latent, read_states, write, write_latent, write_states
from kvatlas.specs import Attention, LatentAttention, Recurrent, State

Pair = tuple[Tensor, Tensor]
"""K and V, or the latent and the rotary part of MLA as one head: [batch, heads, tokens, D]."""

_MODEL_AXES = {"conv": ("RT",), "ssm": ("HKV", "HPS", "RS")}
"""Axes of one sequence's state as modeling code has them; pages may have another order."""


class PagedAttentionLayer(CacheLayerMixin):
    """K and V, or latents, of one layer in the pages of its group."""

    supports_early_init = False

    def __init__(self, batch: SequenceBatch, pages: LayerCache, table: BlockTable) -> None:
        super().__init__()
        self.batch = batch
        self.pages = pages
        self.table = table
        self.latent = isinstance(pages.spec, LatentAttention)
        plain = isinstance(pages.spec, Attention) and pages.spec.cache == "auto"
        self._dtype = pages.field("k").dtype if plain else None
        """Of K and V that pages hold as they are; None where they are quantised."""
        self.reach = pages.spec.visibility.window or pages.spec.visibility.chunk
        """The most tokens that a window or a chunk holds; None for all."""
        self.is_sliding = self.reach is not None
        self.seen = 0
        """Tokens of the batch so far, padding included."""

    @property
    def is_croppable(self) -> bool:
        """Tokens can be taken back while nothing was left behind."""
        return self.reach is None or self.table.keep_all

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any) -> Pair:
        """Store new tokens; return all in sight, or the new ones alone where pages are read."""
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

    def _write_tokens(self, key_states: Tensor, value_states: Tensor, slots: Tensor) -> None:
        # By token; a latent is the row of one head, which its kernels leave out.
        k, v = (s.transpose(1, 2).flatten(0, 1 + self.latent) for s in (key_states, value_states))
        (write_latent if self.latent else write)(self.pages, k, v, slots)

    def _in_sight(self, start: int, heads: int, dtype: torch.dtype) -> Pair:
        """What the mask of transformers covers, gathered; zeros where nothing is stored."""
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
        """Tensors for K and V of so many tokens, in memory for up to an eighth more.

        Rows grow with every step: memory of the same size is at hand from the step before,
        where torch would ask the device for more of it, which takes longer than the step.
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
        """(number, first) of the tokens that `update` will return."""
        offset = self._offset(self.seen)
        return self.seen + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, or -1."""
        return self.reach or -1

    def activate_past_recording(self) -> None:
        """Leave no block behind from now on."""
        self.table.keep_all = True

    def reset(self) -> None:
        """Forget; the batch gives the blocks back."""
        self.seen = 0


@dataclass(frozen=True)
class LentState:
    """A layer's `conv_states` or `recurrent_states`: models read item 0 and change it in place."""

    layer: PagedStateLayer
    name: str

    def __getitem__(self, index: int) -> Tensor | None:
        if index:
            hint = "Models with several states of one kind are not served"
            raise AtlasError(Code.ENGINE_REFUSES, got=f"{self.name} state {index}", hint=hint)
        return self.layer.lend(self.name)


class PagedStateLayer(LinearAttentionCacheLayerMixin):
    """The conv and ssm states of one layer, in a block of each sequence, or one for each part."""

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
        """Nothing to do: the pages are there."""

    def lend(self, name: str) -> Tensor | None:
        """A state for the model to read and to change in place; None before there is one."""
        self.batch.lend(self.settle)
        if not self.has_previous_state[0]:
            return None
        if name not in self._lent:
            states = read_states(self.parts, self._blocks)
            for field, rows in states.items():
                self._lent.setdefault(field, rows.permute(self._to_model[field]).contiguous())
        return self._lent.get(name)

    def settle(self) -> None:
        """Write what was lent to the pages."""
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
        """Keep the last inputs; return the new ones behind those that were kept before."""
        self.batch.admit(conv_states.shape[0])
        before = self.lend("conv")
        if before is not None:
            conv_states = torch.cat((before.to(conv_states.dtype), conv_states), dim=-1)
        taps = self.parts[0].place("conv").size("T")
        short = max(0, taps - conv_states.shape[-1])
        self._keep("conv", torch.nn.functional.pad(conv_states, (short, 0))[..., -taps:])
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Keep a new state."""
        self.batch.admit(recurrent_states.shape[0])
        self._keep("ssm", recurrent_states)
        return recurrent_states

    def _keep(self, name: str, states: Tensor) -> None:
        self._lent.pop(name, None)
        self._write({name: states})
        self.has_previous_state[0] = True

    def activate_past_recording(self) -> None:
        """Refused: a recurrent state holds no past."""
        raise cannot_take_back("recurrent states")

    def reset(self) -> None:
        """Forget; the batch gives the blocks back."""
        self._lent = {}
        self.has_previous_state[0] = False


class PagedHybridLayer(PagedAttentionLayer, PagedStateLayer):
    """Attention and a recurrent state side by side in one decoder layer."""

    is_croppable = False

    def __init__(self, attention: PagedAttentionLayer, states: PagedStateLayer) -> None:
        PagedAttentionLayer.__init__(self, attention.batch, attention.pages, attention.table)
        PagedStateLayer.__init__(self, states.batch, states.parts, states.state_tables)

    activate_past_recording = PagedStateLayer.activate_past_recording

    def reset(self) -> None:
        """Forget both."""
        PagedAttentionLayer.reset(self)
        PagedStateLayer.reset(self)


class EmptyLayer(LinearAttentionCacheLayerMixin):
    """A decoder layer that keeps nothing, such as an MLP."""

    is_croppable = True

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the plan has no page for it."""
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "The plan has no page for this decoder layer",
            got="new tokens or states of it",
            hint="Plan from the config of the model that runs",
        )

    update_conv_state = update_recurrent_state = update

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""


def model_axes(state: State) -> str | None:
    """Axes of a recurrent state as modeling code has them; None where it keeps no such state."""
    own = {axis for axis, _ in state.axes}
    return next((axes for axes in _MODEL_AXES.get(state.name, ()) if set(axes) == own), None)


def cannot_take_back(got: str) -> AtlasError:
    """A refusal to go back to fewer tokens."""
    return AtlasError(
        Code.CANNOT_TAKE_BACK,
        got=got,
        hint="Begin again with reset, or keep what a window leaves with activate_past_recording",
    )
