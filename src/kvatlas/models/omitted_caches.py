"""Caches that a reader leaves out of a model, each with a warning in every output.

A cache is left out if its size depends on values that no config contains, or if no spec
describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvatlas.models import dense, hybrids
from kvatlas.models.config import Config


def omission_warnings(config: Config, reader: Callable[..., Any]) -> list[str]:
    """Return a warning for each kind of cache that `reader` leaves out of a model."""
    found = _OMISSIONS.get(reader)
    return found(config) if found else []


def _rings(config: Config) -> list[str]:
    """Return the warning about the raw keys that Qwen4-Exp's indexers keep."""
    if not config.has("indexer_head_dim"):
        return []
    rows, size = config.count("indexer_compress_ratio"), config.count("indexer_head_dim")
    return [
        f"the ring buffers of the indexers are not planned: vLLM keeps {rows} raw keys of {size} "
        "elements per request and indexed layer, in one block per request of each of their groups"
    ]


def _image_rows(config: Config) -> list[str]:
    """Return the warning about the image rows that Mllama's cross-attention layers keep."""
    layers = config.listing("cross_attention_layers") or []
    if not layers:
        return []
    per_row = 2 * config.key_heads() * config.head_dim()
    return [
        f"the image rows of {len(layers)} cross-attention layers are not planned: each row has "
        f"{per_row} elements of K and V per layer, and their number depends on the images"
    ]


_OMISSIONS: dict[Callable[..., Any], Callable[[Config], list[str]]] = {
    hybrids.indexed_delta_net: _rings,
    dense.cross_attending: _image_rows,
}
