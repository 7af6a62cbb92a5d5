"""The layers of an `AtlasCache`, as transformers asks for them.

A layer is one of attention, recurrent, both side by side, or nothing (an MLP). What
all of them share (rows of the batch, padding, block tables) belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvatlas.engines.transformers.batch import Batch, cannot_take_back, not_planned
from kvatlas.engines.transformers.block_tables import Table
from kvatlas.engines.transformers.rows import Pair, Rows
from kvatlas.engines.transformers.states import StateField


class AttentionPages(CacheLayerMixin):
    """K and V, or latents, of one layer in the pages of its group."""

    supports_early_init = False

    def __init__(self, batch: Batch, rows: Rows, table: Table) -> None:
        super().__init__()
        self.batch = batch
        self.rows = rows
        self.table = table
        self.seen = 0
        """Tokens of the batch so far, padding included."""

    @property
    def is_sliding(self) -> bool:
        """A window or a chunk: transformers calls both so."""
        return self.rows.reach is not None

    @property
    def is_croppable(self) -> bool:
        """Tokens can be taken back while nothing was left behind."""
        return self.rows.reach is None or self.table.keep_all

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any) -> Pair:
        """Store new rows; return all that are in sight, or the new ones where pages are read."""
        self.batch.admit(key_states.shape[0])
        start, count = self.seen, key_states.shape[-2]
        slots = self.table.reserve(start, count, self.batch.skipped).flatten()
        self.rows.put(_by_token(key_states), _by_token(value_states), slots)
        self.seen += count
        if self.batch.reads_pages(start, count):
            return key_states, value_states
        return self._in_sight(start, key_states, value_states)

    def _in_sight(self, start: int, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """Rows that the mask of transformers covers, gathered; zeros where none is stored."""
        slots = self.table.slots(range(self._offset(start), self.seen), self.batch.skipped)
        flat = slots.flatten()
        missing = flat < 0
        keys, values = self.rows.get(flat.clamp(min=0))
        if bool(missing.any()):
            keys[missing], values[missing] = 0, 0
        keys, values = (rows.view(*slots.shape, *rows.shape[1:]) for rows in (keys, values))
        return keys.transpose(1, 2).to(k.dtype), values.transpose(1, 2).to(v.dtype)

    def _offset(self, start: int) -> int:
        return 0 if self.rows.reach is None else max(start - self.rows.reach + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number, first place) of the rows that `update` will return."""
        offset = self._offset(self.seen)
        return self.seen + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, or -1."""
        return -1 if self.rows.reach is None else self.rows.reach

    def activate_past_recording(self) -> None:
        """Leave nothing behind from now on."""
        self.table.keep_all = True

    def reset(self) -> None:
        """Forget; the batch gives the blocks back."""
        self.seen = 0


class StatePages(LinearAttentionCacheLayerMixin):
    """The conv and ssm states of one layer, in a block of each row or in one for each part."""

    is_compileable = False

    def __init__(
        self, batch: Batch, fields: dict[str, StateField], tables: Sequence[Table]
    ) -> None:
        self.init_states(batch, fields, tables)

    def init_states(
        self, batch: Batch, fields: dict[str, StateField], tables: Sequence[Table]
    ) -> None:
        """The states' own part of a layer; a table for each part that they are cut into."""
        LinearAttentionCacheLayerMixin.__init__(self)
        self.batch = batch
        self.fields = fields
        self.states = tuple(tables)
        self._lent: dict[str, torch.Tensor] = {}

    @property
    def is_croppable(self) -> bool:
        """A state cannot be taken back."""
        return False

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the pages are there."""

    @property
    def _blocks(self) -> list[torch.Tensor]:
        return [table.ids[:, 0] for table in self.states]

    def lend(self, name: str) -> torch.Tensor | None:
        """A state for the model to read and to change; None before there is one."""
        self.settle(name)
        if not self.has_previous_state[0] or name not in self.fields:
            return None
        self._lent[name] = self.fields[name].read(self._blocks)
        return self._lent[name]

    def settle(self, *names: str) -> None:
        """Write what was lent to the pages; all of it unless names are given."""
        for name in names or tuple(self._lent):
            if name in self._lent:
                self.fields[name].write(self._blocks, self._lent.pop(name))

    def update_conv_state(self, conv_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keep the last inputs; return them behind those that were kept before."""
        self.batch.admit(conv_states.shape[0])
        known = self.lend("conv")
        self._lent.pop("conv", None)
        if known is not None:
            conv_states = torch.cat((known.to(conv_states.dtype), conv_states), dim=-1)
        taps = self.fields["conv"].shape[-1]
        short = max(0, taps - conv_states.shape[-1])
        last = torch.nn.functional.pad(conv_states, (short, 0))[..., -taps:]
        self.fields["conv"].write(self._blocks, last)
        self.has_previous_state[0] = True
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Keep a new state."""
        self.batch.admit(recurrent_states.shape[0])
        self._lent.pop("ssm", None)
        self.fields["ssm"].write(self._blocks, recurrent_states)
        self.has_previous_state[0] = True
        return recurrent_states

    def activate_past_recording(self) -> None:
        """Refused: a state holds no past."""
        raise cannot_take_back("recurrent states")

    def reset(self) -> None:
        """Forget; the batch gives the blocks back."""
        self._lent.clear()
        self.has_previous_state[0] = False


class BothPages(AttentionPages, StatePages):
    """Attention and a recurrent state side by side in one decoder layer."""

    def __init__(self, attention: AttentionPages, states: StatePages) -> None:
        AttentionPages.__init__(self, attention.batch, attention.rows, attention.table)
        self.init_states(states.batch, states.fields, states.states)

    is_croppable = StatePages.is_croppable
    activate_past_recording = StatePages.activate_past_recording

    def reset(self) -> None:
        """Forget both."""
        AttentionPages.reset(self)
        StatePages.reset(self)


class NoPages(LinearAttentionCacheLayerMixin):
    """A decoder layer that keeps nothing, such as an MLP."""

    is_compileable = False
    is_croppable = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def update_conv_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refused: the plan has no page for it."""
        raise not_planned()

    def update_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refused: the plan has no page for it."""
        raise not_planned()

    def update(self, *_: Any, **__: Any) -> Pair:
        """Refused: the plan has no page for it."""
        raise not_planned()

    def activate_past_recording(self) -> None:
        """Nothing to record."""


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, elements] to [batch * tokens, heads, elements]."""
    return states.transpose(1, 2).flatten(0, 1)
