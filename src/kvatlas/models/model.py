"""`Model`: what a whole model caches, layer by layer, without a word about memory.

A model is a name, a few numbers that topologies must respect, and one `Layer` for
each cache that it keeps. A decoder layer may keep several caches (attention and an
indexer, attention and Mamba side by side) or none (an MLP, a layer that shares
another's cache), so layers are named by their cache, as engines name them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.specs import AnySpec, Indexer


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cache: its name, the decoder layer that owns it, and what it keeps.

    >>> [layer.name for layer in Model.load("DeepSeek-V3.2").layers if layer.index == 7]
    ['model.layers.7.self_attn.indexer.k_cache', 'model.layers.7.self_attn.attn']
    """

    name: str
    index: int
    spec: AnySpec


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model caches.

    `layers` are in the order in which an engine registers them.

    >>> model = Model.load("gpt-oss-20b")
    >>> model.layers[0].name, model.layers[0].spec.window
    ('model.layers.0.attn.attn', 128)
    """

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    depth: int
    """Decoder layers, those without a cache included: what pipeline stages divide."""
    attention_heads: int
    """Query heads, which tensor parallelism must divide; 0 where there are none."""
    repeats_heads: bool = True
    """Whether vLLM's implementation repeats kv heads where there are more ranks."""
    output_groups: int | None = None
    """Groups of the output projection, where it has such: vLLM deals them out to ranks."""
    dtype: str = "bf16"
    max_len: int | None = None
    cache: str = "auto"
    """The cache dtype that the checkpoint asks for."""
    source: str = ""
    confidence: str = ""
    warnings: tuple[str, ...] = ()
    """What was assumed where the config did not say."""

    @classmethod
    def load(cls, source: Any, **options: Any) -> Model:
        """A model from a config, a catalogue name or a hub id: see `kvatlas.models.loading`."""
        from kvatlas.models.loading import load

        return load(source, **options)

    def with_cache(self, kv_dtype: str) -> Model:
        """The same model with its attention kept in `kv_dtype`.

        Recurrent states, indexers and compressors keep what they have: engines
        choose those apart from the cache dtype.

        >>> Model.load("Llama-3.1-8B").with_cache("fp8").layers[0].spec.page(16).content
        256
        """
        from kvatlas.models.cache_dtypes import cached, check_cache

        cache = check_cache(kv_dtype)
        sparse = any(isinstance(layer.spec, Indexer) for layer in self.layers)
        layers = tuple(
            msgspec.structs.replace(layer, spec=cached(layer.spec, cache, sparse=sparse))
            for layer in self.layers
        )
        return msgspec.structs.replace(self, layers=layers, cache=cache)
