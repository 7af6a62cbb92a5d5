"""`AtlasCache`: a cache for transformers that is stored as a plan specifies.

Pass it as `past_key_values=` (`cache_params=` for Mamba models) to `generate()` or to a forward
call. With `attn_implementation="kvatlas"`, attention reads the pages directly. With any other
implementation, the K and V of visible tokens are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from kvatlas.cache import Cache, LayerCache, allocate
from kvatlas.engines.transformers.block_table import BlockTable
from kvatlas.engines.transformers.cache_layers import (
    EmptyLayer,
    PagedAttentionLayer,
    PagedHybridLayer,
    PagedIndexedLayer,
    PagedStateLayer,
    Pair,
    cannot_take_back,
    model_axes,
)
from kvatlas.engines.transformers.paged_attention import MASKED, WRITTEN
from kvatlas.engines.transformers.plan_for_model import make_plan
from kvatlas.engines.transformers.sequence_batch import SequenceBatch
from kvatlas.errors import AtlasError, Code
from kvatlas.models import Layer
from kvatlas.planning import Plan
from kvatlas.pool import BlockPool
from kvatlas.specs import Attention, Indexer, LatentAttention, Recurrent, Spec

AnyLayer = PagedAttentionLayer | PagedStateLayer | EmptyLayer
_PLAIN_KEYS = ("bf16", "fp16", "fp32")
"""The dtypes in which the keys of indexers are stored. Models do not compute with scaled keys."""


class AtlasCache(TransformersCache):
    """A transformers cache that stores its data in the pages of a kvatlas `Cache`.

    Attention layers store K and V. MLA layers store the latent and the rotary part, before they
    are expanded to heads, and the keys of an indexer if the model has one. Recurrent layers store
    their conv and ssm states in one block per sequence. The conv state is one input shorter than in
    transformers' own cache, which stores one input that it never reads.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(
    ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ... )
    >>> AtlasCache.from_config(config, batch=3, max_len=64, layout="BHLNC")
    <AtlasCache llama BHLNC: 0 sequences, 0 of 13 blocks used>
    """

    def __init__(self, cache: Cache, pool: BlockPool | None = None) -> None:
        plan = cache.plan
        if plan.ranks > 1:
            raise AtlasError(
                Code.BAD_TOPOLOGY,
                "AtlasCache requires a plan for one rank",
                got=f"a plan for tp {plan.tp} and pp {plan.pp}",
                hint="Make the plan with tp=1 and pp=1",
            )
        self._cache = cache
        self.pool = pool or BlockPool(plan, null_block=False)
        """The allocator of blocks. By default it reserves no null block: padding is not stored."""
        self.blocks = self.pool.ids
        """The free and used block ids of each pool."""
        parts: list[list[LayerCache]] = [[] for _ in plan.groups]
        for name in plan.layers:
            for group, part in zip(self._groups_of(name), cache.parts(name), strict=True):
                parts[group].append(part)
        self._tables = [
            BlockTable(group, layers, self.blocks[group.pool])
            for group, layers in zip(plan.groups, parts, strict=True)
        ]
        self.batch = SequenceBatch(self._tables)
        super().__init__(layers=self._build())

    @classmethod
    def from_config(
        cls, config: Any, *, batch: int, max_len: int, device: Any = "cpu", **options: Any
    ) -> AtlasCache:
        """Plan and allocate a cache for `batch` sequences of `max_len` tokens.

        `config` is the model's transformers config. Each beam of a beam search counts as a
        sequence. `options` are passed to `make_plan`: layout, pack, cache dtype, block size.
        """
        plan = make_plan(config, batch=batch, max_len=max_len, **options)
        return cls(allocate(plan, device=device))

    def __repr__(self) -> str:
        total = sum(ids.count for ids in self.blocks.values())
        used = total - sum(ids.free for ids in self.blocks.values())
        lengths = f" of {self.lengths} tokens" if self.batch.size else ""
        return (
            f"<AtlasCache {self.plan.model} {self.plan.layout}: "
            f"{self.batch.size} sequences{lengths}, {used} of {total} blocks used>"
        )

    # -- parts ----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the cache."""
        return self._cache.plan

    @property
    def cache(self) -> Cache:
        """The pages, after states that the model updated in place have been written back."""
        self.batch.settle()
        return self._cache

    @property
    def lengths(self) -> list[int]:
        """Number of stored tokens of each sequence.

        Padding is not stored, and not counted, if attention reads the pages directly.
        """
        return [self.seen - skipped for skipped in self.batch.padding]

    @property
    def seen(self) -> int:
        """Number of tokens computed so far, including padding; 0 for models without attention."""
        return max((layer.seen for layer in self._attention), default=0)

    @property
    def batch_size(self) -> int:
        """Number of sequences, or -1 before the first call."""
        return self.batch.size or -1

    @property
    def _attention(self) -> list[PagedAttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedAttentionLayer)]

    @property
    def _recurrent(self) -> list[PagedStateLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedStateLayer)]

    def _groups_of(self, name: str) -> list[int]:
        """Return the indices of the groups that store a layer's cache.

        The layer's cache may be split into parts, if the layer is recurrent. The result contains
        the group of each part.
        """
        plan = self.plan
        return [plan.region_of(name, part)[0].group for part in range(plan.parts(name))]

    def _build(self) -> list[AnyLayer]:
        by_name = {layer.name: layer for region in self.plan.regions for layer in region.layers}
        built: dict[int, AnyLayer] = {}
        indexers = [layer for layer in by_name.values() if isinstance(layer.spec, Indexer)]
        for layer in by_name.values():
            if isinstance(layer.spec, Indexer):
                continue
            made, other = self._layer(layer), built.get(layer.index)
            if isinstance(other, PagedAttentionLayer) and isinstance(made, PagedStateLayer):
                made = PagedHybridLayer(other, made)
            elif isinstance(other, PagedStateLayer) and isinstance(made, PagedAttentionLayer):
                made = PagedHybridLayer(made, other)
            elif other is not None:
                raise _not_served(layer)
            built[layer.index] = made
        for layer in indexers:
            attention = built.get(layer.index)
            if not isinstance(attention, PagedAttentionLayer) or not attention.latent:
                raise _not_served(layer)
            if not _has_plain_keys(layer.spec):
                raise _not_served(layer)
            (group,), (keys,) = self._groups_of(layer.name), self._cache.parts(layer.name)
            built[layer.index] = PagedIndexedLayer(attention, keys, self._tables[group])
        return [built.get(index) or EmptyLayer() for index in range(max(built) + 1)]

    def _layer(self, layer: Layer) -> PagedAttentionLayer | PagedStateLayer:
        spec, parts = layer.spec, self._cache.parts(layer.name)
        tables = [self._tables[group] for group in self._groups_of(layer.name)]
        if isinstance(spec, Recurrent) and all(map(model_axes, spec.layer_states())):
            return PagedStateLayer(self.batch, parts, tables)
        if _is_plain(spec):
            return PagedAttentionLayer(self.batch, parts[0], tables[0])
        raise _not_served(layer)

    # -- called by models -----------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Pair:
        """Store the K and V of new tokens in a layer; return the K and V that attention reads."""
        self.batch.settle()
        MASKED.set(None)
        layer = self.layers[layer_idx]
        visible: Pair = layer.update(key_states, value_states)
        WRITTEN.set((layer_idx, layer))
        return visible

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return a tuple (number of tokens that a layer attends to, index of the first of them)."""
        self.batch.settle()
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedAttentionLayer):
            layer = next(iter(self._attention), None)
        MASKED.set(layer)
        return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]

    # -- sequences and tokens -------------------------------------------------------

    def blocks_of(self, sequence: int) -> dict[int, list[int]]:
        """Return the block ids of one sequence, by group index, as `Route.bind` expects them."""
        self.batch.settle()
        return {group: list(table.sequences[sequence]) for group, table in enumerate(self._tables)}

    def adopt(self, tokens: int, sequences: int = 1) -> list[dict[int, list[int]]]:
        """Begin a batch of sequences of `tokens` tokens each; the caller then writes their caches.

        Returns the block ids of each sequence, by group index. The caller must fill these blocks
        before the model computes further tokens.

        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> cache = AtlasCache.from_config(LlamaConfig(**sizes), batch=1, max_len=64)
        >>> cache.adopt(40)
        [{0: [0, 1, 2]}]
        >>> cache
        <AtlasCache llama LBNHC: 1 sequences of [40] tokens, 3 of 5 blocks used>
        """
        self.reset()
        self.batch.admit(sequences)
        for table in self._tables:
            table.padded = False
            if not table.recurrent:
                table.reserve(0, tokens, self.batch.padding)
        self._go_on_behind(tokens)
        return [self.blocks_of(sequence) for sequence in range(sequences)]

    def adopt_from_pool(self, tokens: int, reserve_blocks: Callable[[int], None]) -> None:
        """Begin with one sequence whose first `tokens` tokens a `BlockPool` has cached.

        `PrefixReuse` calls this. `reserve_blocks(n)` must reserve blocks for the first n tokens.
        """
        self.reset()
        self.batch.begin_on_pool(reserve_blocks)
        if tokens:
            self._go_on_behind(tokens)

    def _go_on_behind(self, tokens: int) -> None:
        for layer in self._attention:
            layer.seen = tokens
        for layer in self._recurrent:
            layer.has_previous_state[0] = True

    def count_tokens(self, count: int) -> None:
        """Record that a `DecodeGraph` has stored `count` more tokens of each sequence."""
        for layer in self._attention:
            layer.seen += count

    def reset(self) -> None:
        """Forget all sequences and free their blocks."""
        for layer in self.layers:
            layer.reset()
        self.batch.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with the beams `beam_idx`, in this order. A beam may be chosen twice.

        Beams share attention blocks copy-on-write. Recurrent states are copied.
        """
        self.batch.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these sequences and free the blocks of the others."""
        self.batch.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        self.batch.select(torch.arange(self.batch.size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every sequence.

        As in transformers, `tokens_to_remove` is zero or negative: -3 removes three tokens.
        """
        count = -tokens_to_remove
        if not 0 <= count <= self.seen:
            raise AtlasError(
                Code.CANNOT_TAKE_BACK,
                f"tokens_to_remove must be between -{self.seen} and 0",
                got=tokens_to_remove,
                hint="Pass a negative number: -3 removes the last three tokens",
            )
        if not count:
            return
        if any(layer.has_previous_state[0] for layer in self._recurrent):
            raise cannot_take_back("a cache with recurrent states")
        lengths = [max(0, length - count) for length in self.lengths]
        attention = [table for table in self._tables if not table.recurrent]
        if not all(table.can_crop(lengths) for table in attention):
            hint = "Call activate_past_recording on the cache before the first token"
            raise cannot_take_back("a sliding window that has already freed blocks", hint)
        for table in attention:
            table.crop(lengths)
        for layer in self._attention:
            layer.seen -= count

    is_compileable = False
    """Block tables change between steps, so transformers must not compile. See `DecodeGraph`."""


def _is_plain(spec: Spec) -> bool:
    """Return whether `PagedAttentionLayer` supports a spec.

    The spec must store K and V, or one latent, for every token, and have no sink tokens.
    """
    sees = spec.visibility
    if isinstance(spec, LatentAttention):
        plain = spec.compress == 1 and spec.cache in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
        return plain and sees.window is None
    return isinstance(spec, Attention) and sees.causal and not sees.sink_tokens


def _has_plain_keys(spec: Spec) -> bool:
    """Return whether an indexer stores a key for each token, without scales."""
    return isinstance(spec, Indexer) and spec.tokens_per_state == 1 and spec.cache in _PLAIN_KEYS


def _not_served(layer: Layer) -> AtlasError:
    return AtlasError(
        Code.ENGINE_REFUSES,
        "AtlasCache supports only layers that cache K and V, a latent (with or without the keys of "
        "an indexer), or conv and ssm states",
        got=f"{layer.name}: {type(layer.spec).__name__}",
        hint="Use transformers' own cache for this model",
    )
