"""`Layer`: one cache of a model, as the config readers yield it."""

from __future__ import annotations

import msgspec

from kvatlas.specs import AnySpec


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cache: its name, the index of its decoder layer, and its spec.

    >>> from kvatlas.specs import FullAttention
    >>> name = "model.layers.7.self_attn.attn"
    >>> Layer(name=name, index=7, spec=FullAttention(heads=8, head_dim=128)).spec.page_bytes(16)
    65536
    """

    name: str
    index: int
    spec: AnySpec
