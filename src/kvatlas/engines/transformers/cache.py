"""`AtlasCache`: a transformers cache whose every byte lies where a plan says.

It is passed as `past_key_values=` (`cache_params=` for models that are called Mamba) to
`generate()` or to a forward call. Under `attn_implementation="kvatlas"` attention reads the
pages; under any other, rows in sight are gathered for it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvatlas.cache import Cache, LayerCache
from kvatlas.engines.transformers.batch import Batch, cannot_take_back
from kvatlas.engines.transformers.block_ids import Blocks
from kvatlas.engines.transformers.block_tables import Table
from kvatlas.engines.transformers.layers import AttentionPages, BothPages, NoPages, StatePages
from kvatlas.engines.transformers.paged_attention import masks_asked, pages_written
from kvatlas.engines.transformers.plan_for_model import make_cache
from kvatlas.engines.transformers.rows import KeyValueRows, LatentRows, Pair
from kvatlas.engines.transformers.states import state_fields
from kvatlas.errors import AtlasError, Code
from kvatlas.models import Layer
from kvatlas.planning import Plan
from kvatlas.specs import (
    Attention,
    CrossAttention,
    LatentAttention,
    Recurrent,
    SinkAttention,
    SlidingLatentAttention,
)

AnyPages = AttentionPages | StatePages | BothPages | NoPages


class AtlasCache(TransformersCache):
    """A cache for transformers in the pages of a kvatlas `Cache`.

    Attention layers keep K and V; MLA layers the latent and the rotary part, before they are
    expanded to heads; recurrent layers their conv and ssm states, in one block for each row.
    The conv state is one input shorter than in transformers' own cache, which keeps one that
    it never reads.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(
    ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ... )
    >>> cache = AtlasCache.from_config(config, batch=3, max_len=64, layout="BHLNC")
    >>> print(cache.plan)  # doctest: +NORMALIZE_WHITESPACE
    llama, tp 1, policy atlas, order BHLNC: blocks of 16 tokens, 1 group(s), 13 x 4,096 bytes
    """

    def __init__(self, cache: Cache) -> None:
        plan = cache.plan
        if plan.tp * plan.pp > 1:
            raise AtlasError(
                Code.BAD_TOPOLOGY,
                "A transformers model keeps all heads of all layers in one place",
                got=f"a plan for tp {plan.tp} and pp {plan.pp}",
                hint="Plan with tp 1 and pp 1",
            )
        self._cache = cache
        self.blocks = {pool.index: Blocks(pool.blocks) for pool in plan.pools}
        """Which blocks of each pool are free."""
        self._tables = [self._table(index) for index in range(len(plan.groups))]
        self.batch = Batch(self._tables)
        super().__init__(layers=self._build())

    @classmethod
    def from_config(cls, config: Any, *, batch: int, max_len: int, **options: Any) -> AtlasCache:
        """A cache for `batch` rows of `max_len` tokens of the model that `config` describes.

        A row is a sequence, or one beam of it. `options` are those of `make_cache`: the
        layout, the pack, the cache dtype, the block size, the device.
        """
        return cls(make_cache(config, batch=batch, max_len=max_len, **options))

    # -- what it is made of ---------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Where everything lies."""
        return self._cache.plan

    @property
    def cache(self) -> Cache:
        """The pages, with everything written to them that models were lent."""
        self.settle()
        return self._cache

    @property
    def lengths(self) -> list[int]:
        """Stored tokens of each row; padding is none where pages are read."""
        return [self.seen - skipped for skipped in self.batch.skipped]

    @property
    def seen(self) -> int:
        """Tokens of the batch so far, padding included; 0 where there is no attention."""
        return max((p.seen for p in self.layers if isinstance(p, AttentionPages)), default=0)

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before there are some."""
        return self.batch.rows or -1

    def _table(self, index: int) -> Table:
        plan, group = self.plan, self.plan.groups[index]
        names = [
            layer.name
            for region in plan.regions
            if region.group == index
            for layer in region.layers
        ]
        layers = [part for name in dict.fromkeys(names) for part in self._in_group(name, index)]
        return Table(group, layers, self.blocks[group.pool])

    def _in_group(self, name: str, index: int) -> list[LayerCache]:
        """The parts of a layer that a group holds: others may be in another group."""
        parts = self._cache.parts(name)
        return [p for i, p in enumerate(parts) if self.plan.region_of(name, i)[0].group == index]

    def _build(self) -> list[AnyPages]:
        homes = {layer.name: layer for region in self.plan.regions for layer in region.layers}
        found: dict[int, AnyPages] = {}
        for layer in homes.values():
            pages, known = self._pages(layer), found.get(layer.index)
            if isinstance(known, AttentionPages) and isinstance(pages, StatePages):
                pages = BothPages(known, pages)
            elif isinstance(known, StatePages) and isinstance(pages, AttentionPages):
                pages = BothPages(pages, known)
            elif known is not None:
                raise _not_served(layer)
            found[layer.index] = pages
        return [found.get(index) or NoPages() for index in range(max(found) + 1)]

    def _pages(self, layer: Layer) -> AnyPages:
        spec, parts = layer.spec, self._cache.parts(layer.name)
        homes = [self.plan.region_of(layer.name, part)[0] for part in range(len(parts))]
        tables = [self._tables[region.group] for region in homes]
        unlike = (CrossAttention, SinkAttention, SlidingLatentAttention)
        if isinstance(spec, Attention) and not isinstance(spec, unlike):
            return AttentionPages(self.batch, KeyValueRows(parts[0], spec), tables[0])
        if isinstance(spec, LatentAttention) and not isinstance(spec, unlike):
            plain = spec.compress == 1 and spec.cache in ("auto", "fp8", "fp8_e4m3")
            if plain:
                return AttentionPages(self.batch, LatentRows(parts[0], spec), tables[0])
        if isinstance(spec, Recurrent):
            fields = state_fields(parts, spec)
            if fields is not None:
                return StatePages(self.batch, fields, tables)
        raise _not_served(layer)

    # -- what models ask ------------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> Pair:
        """Store new rows of a layer, and return what its attention is to see."""
        self.settle()
        masks_asked(None)
        pages = self.layers[layer_idx]
        found: Pair = pages.update(key_states, value_states)
        count = key_states.shape[-2]
        pages_written(layer_idx, pages, pages.seen - count, count)
        return found

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number, first place) of the rows that a layer's attention is to see."""
        self.settle()
        pages = self.layers[layer_idx]
        if not isinstance(pages, AttentionPages) and layer_idx == 0:
            pages = next((p for p in self.layers if isinstance(p, AttentionPages)), pages)
        masks_asked(pages if isinstance(pages, AttentionPages) else None)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's conv state to read and to change in place; None before there is one."""
        return self._lend(layer_idx, state_idx, "conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's ssm state to read and to change in place; None before there is one."""
        return self._lend(layer_idx, state_idx, "ssm")

    def _lend(self, layer_idx: int, state_idx: int, name: str) -> torch.Tensor | None:
        pages = self.layers[layer_idx]
        if state_idx or not isinstance(pages, StatePages):
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "A recurrent layer has one conv and one ssm state",
                got=f"state {state_idx} of layer {layer_idx}, a {type(pages).__name__}",
                hint="Plan from the config of the model that runs",
            )
        self.settle(but=pages)
        return pages.lend(name)

    def settle(self, but: StatePages | None = None) -> None:
        """Write to the pages what models were lent and have changed in place."""
        for pages in self.layers:
            if isinstance(pages, StatePages) and pages is not but:
                pages.settle()

    # -- rows and tokens ------------------------------------------------------------

    def blocks_of(self, row: int) -> dict[int, list[int]]:
        """The blocks of one row by group, as routes take them: what to send elsewhere."""
        self.settle()
        return {group: list(table.rows[row]) for group, table in enumerate(self._tables)}

    def adopt(self, tokens: int, rows: int = 1) -> list[dict[int, list[int]]]:
        """Begin with `rows` rows of `tokens` tokens that come from elsewhere.

        The blocks are taken and returned, by row and group; whoever asked fills them before
        the model goes on behind those tokens.

        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> cache = AtlasCache.from_config(LlamaConfig(**sizes), batch=1, max_len=64)
        >>> cache.adopt(40)
        [{0: [0, 1, 2]}]
        >>> cache.get_seq_length()
        40
        """
        self.reset()
        self.batch.admit(rows)
        for table in self._tables:
            if not table.recurrent:
                table.reserve(0, tokens, self.batch.skipped)
        for pages in self.layers:
            if isinstance(pages, AttentionPages):
                pages.seen = tokens
            if isinstance(pages, StatePages):
                pages.has_previous_state[0] = True
        return [self.blocks_of(row) for row in range(rows)]

    def reset(self) -> None:
        """Forget everything and give every block back."""
        for pages in self.layers:
            pages.reset()
        self.batch.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with these rows: attention shares blocks until it writes, states are copied."""
        self.settle()
        self.batch.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows alone, and give the others' blocks back."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.reorder_cache(torch.arange(self.batch.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: a number that is not positive, as in transformers."""
        count = abs(tokens_to_remove)
        if tokens_to_remove > 0 or count > self.seen:
            raise cannot_take_back(f"{tokens_to_remove} of {self.seen} tokens")
        if not count:
            return
        self.settle()
        if any(isinstance(p, StatePages) and p.has_previous_state[0] for p in self.layers):
            raise cannot_take_back("recurrent states")
        lengths = [max(0, length - count) for length in self.lengths]
        attention = [table for table in self._tables if not table.recurrent]
        if not all(table.sees(lengths) for table in attention):
            raise cannot_take_back("a window that has moved on")
        for table in attention:
            table.crop(lengths)
        for pages in self.layers:
            if isinstance(pages, AttentionPages):
                pages.seen -= count

    @property
    def is_compileable(self) -> bool:
        """Tables change from step to step, so no graph is captured."""
        return False


def _not_served(layer: Layer) -> AtlasError:
    return AtlasError(
        Code.ENGINE_REFUSES,
        "A layer keeps K and V, a latent, or conv and ssm states, as transformers keeps them",
        got=f"{layer.name}: {type(layer.spec).__name__}",
        hint="Run this model with transformers' own cache",
    )
