"""Several caches in one batch: each keeps rows of its own, and the model runs once for all.

Forward passes of a tiny model cost more than what its cache does, so one pass serves
every order and pack. What each member is asked is what a model would ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from kvatlas.engines.transformers import AtlasCache
from kvatlas.engines.transformers.paged_attention import page_attention, page_mask, pages_written

NAME = "kvatlas_side_by_side"


class SideBySide(Cache):
    """Member caches, each with the same number of neighbouring rows."""

    def __init__(self, members: Sequence[AtlasCache]) -> None:
        super().__init__(layers=members[0].layers)
        self.members = members
        self._lent: dict[tuple[int, str], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows.chunk(len(self.members))

    def ask(self, question: Callable[..., Any], *rows: torch.Tensor) -> list[Any]:
        """Each member's answer about its own rows."""
        self._give_back()
        parts = zip(*map(self.split, rows), strict=True) if rows else [()] * len(self.members)
        return [question(member, *part) for member, part in zip(self.members, parts, strict=True)]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        found = self.ask(lambda m, k, v: m.update(k, v, layer_idx), key_states, value_states)
        _UPDATED.set((self, layer_idx))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes = set(self.ask(lambda m: m.get_mask_sizes(query_length, layer_idx)))
        _ASKED.set((self, query_length, layer_idx))
        assert len(sizes) == 1
        found: tuple[int, int] = sizes.pop()
        return found

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._lend(layer_idx, "conv", lambda m: m.get_conv_state(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._lend(layer_idx, "ssm", lambda m: m.get_recurrent_state(layer_idx, state_idx))

    def update_conv_state(self, states: Any, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        found = self.ask(lambda m, s: m.update_conv_state(s, layer_idx), states)
        return torch.cat(found)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        found = self.ask(lambda m, s: m.update_recurrent_state(s, layer_idx), recurrent_states)
        return torch.cat(found)

    def _lend(self, index: int, name: str, question: Any) -> torch.Tensor | None:
        self._give_back(but=index)
        lent = [question(member) for member in self.members]
        if lent[0] is None:
            return None
        self._lent[index, name] = (torch.cat(lent), lent)
        return self._lent[index, name][0]

    def _give_back(self, but: int | None = None) -> None:
        for key in [key for key in self._lent if key[0] != but]:
            changed, lent = self._lent.pop(key)
            for part, whole in zip(lent, self.split(changed), strict=True):
                part.copy_(whole)


_ASKED: ContextVar[tuple[SideBySide, int, int] | None] = ContextVar("_ASKED", default=None)
_UPDATED: ContextVar[tuple[SideBySide, int] | None] = ContextVar("_UPDATED", default=None)


def _mask(batch_size: int, attention_mask: torch.Tensor | None = None, **more: Any) -> Any:
    asked = _ASKED.get()
    assert asked is not None
    cache, length, layer = asked
    rows = batch_size // len(cache.members)
    found: list[Any] = []
    for index, member in enumerate(cache.members):
        member.get_mask_sizes(length, layer)
        mask = None if attention_mask is None else cache.split(attention_mask)[index]
        mine = dict(more)
        mine["mask_function"] = _rows_from(more["mask_function"], index * rows)
        found.append(page_mask(batch_size=rows, attention_mask=mask, **mine))
    return torch.cat(found)


def _rows_from(function: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
    return lambda row, head, q, kv: function(row + first, head, q, kv)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    updated = _UPDATED.get()
    assert updated is not None
    cache, index = updated
    assert index == module.layer_idx
    parts = zip(*map(cache.split, (query, key, value, attention_mask)), strict=True)
    found = []
    for member, (q, k, v, mask) in zip(cache.members, parts, strict=True):
        pages, count = member.layers[index], q.shape[-2]
        pages_written(index, pages, pages.seen - count, count)
        found.append(page_attention(module, q, k, v, mask, **more)[0])
    return torch.cat(found), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
