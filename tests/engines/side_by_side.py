"""Several caches in one batch: each keeps sequences of its own, the model runs once for all.

Forward passes of a tiny model cost more than what its cache does, so one pass serves
every order and pack. What each member is asked is what a model would ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from kvatlas.engines.transformers import AtlasCache
from kvatlas.engines.transformers.cache_layers import PagedStateLayer
from kvatlas.engines.transformers.paged_attention import WRITTEN, page_attention, page_mask

NAME = "kvatlas_side_by_side"


class SideBySide(Cache):
    """Member caches, each with the same number of neighbouring sequences."""

    def __init__(self, members: Sequence[AtlasCache]) -> None:
        super().__init__(layers=members[0].layers)
        self.members = members
        self._lender: Sequence[PagedStateLayer] = ()
        self._lent: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for index, layer in enumerate(members[0].layers):
            if isinstance(layer, PagedStateLayer):
                layers = [member.layers[index] for member in members]
                layer.conv_states = JoinedStates(self, layers, "conv")  # type: ignore[assignment]
                layer.recurrent_states = JoinedStates(self, layers, "ssm")  # type: ignore[assignment]

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows.chunk(len(self.members))

    def ask(self, question: Callable[..., Any], *rows: torch.Tensor) -> list[Any]:
        """Each member's answer about its own sequences."""
        self.give_back()
        parts = zip(*map(self.split, rows), strict=True) if rows else [()] * len(self.members)
        return [question(member, *part) for member, part in zip(self.members, parts, strict=True)]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        pairs = self.ask(lambda m, k, v: m.update(k, v, layer_idx), key_states, value_states)
        _UPDATED.set((self, layer_idx))
        return tuple(map(torch.cat, zip(*pairs, strict=True)))

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> torch.Tensor:
        return torch.cat(
            self.ask(lambda m, keys: m.update_indexer(keys, layer_idx), indexer_key_states)
        )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        (sizes,) = set(self.ask(lambda m: m.get_mask_sizes(query_length, layer_idx)))
        _EXPECTED.set((self, query_length, layer_idx))
        return sizes  # type: ignore[no-any-return]

    def update_conv_state(self, states: Any, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        return torch.cat(self.ask(lambda m, s: m.update_conv_state(s, layer_idx), states))

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        return torch.cat(
            self.ask(lambda m, s: m.update_recurrent_state(s, layer_idx), recurrent_states)
        )

    def lend(self, layers: Sequence[PagedStateLayer], name: str) -> torch.Tensor | None:
        """The states of all members in one tensor, which the model may change."""
        if self._lender is not layers or name in self._lent:
            self.give_back()
        self._lender = layers
        lent = [state for layer in layers if (state := layer.lend(name)) is not None]
        if not lent:
            return None
        self._lent[name] = (torch.cat(lent), lent)
        return self._lent[name][0]

    def give_back(self) -> None:
        """Copy what the model has changed to the tensors that members lent."""
        for changed, lent in self._lent.values():
            for part, whole in zip(lent, self.split(changed), strict=True):
                part.copy_(whole)
        self._lent = {}


@dataclass
class JoinedStates:
    """`conv_states` or `recurrent_states` of one layer of all members."""

    cache: SideBySide
    layers: Sequence[PagedStateLayer]
    name: str

    def __getitem__(self, _: int) -> torch.Tensor | None:
        return self.cache.lend(self.layers, self.name)


_EXPECTED: ContextVar[tuple[SideBySide, int, int] | None] = ContextVar("_EXPECTED", default=None)
_UPDATED: ContextVar[tuple[SideBySide, int] | None] = ContextVar("_UPDATED", default=None)


def _mask(batch_size: int, attention_mask: torch.Tensor | None = None, **more: Any) -> Any:
    expected = _EXPECTED.get()
    assert expected is not None
    cache, length, layer = expected
    rows = batch_size // len(cache.members)
    masks: list[Any] = []
    for index, member in enumerate(cache.members):
        member.get_mask_sizes(length, layer)
        mask = None if attention_mask is None else cache.split(attention_mask)[index]
        mine = dict(more)
        mine["mask_function"] = _rows_from(more["mask_function"], index * rows)
        masks.append(page_mask(batch_size=rows, attention_mask=mask, **mine))
    return torch.cat(masks)


def _rows_from(function: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
    return lambda row, head, q, kv: function(row + first, head, q, kv)


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    indices: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    updated = _UPDATED.get()
    assert updated is not None
    cache, index = updated
    assert index == module.layer_idx
    parts = zip(*map(cache.split, (query, key, value, attention_mask)), strict=True)
    answers = []
    chosen = [None] * len(cache.members) if indices is None else cache.split(indices)
    for member, own, (q, k, v, mask) in zip(cache.members, chosen, parts, strict=True):
        WRITTEN.set((index, member.layers[index]))
        answers.append(page_attention(module, q, k, v, mask, indices=own, **more)[0])
    return torch.cat(answers), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
