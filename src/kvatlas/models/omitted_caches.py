"""Warnings for the caches that a reader leaves out of a model.

A cache is left out if its size depends on values that no config contains, or if no spec
describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvatlas.models import dense
from kvatlas.models.config import Config


def omission_warnings(config: Config, reader: Callable[..., Any]) -> list[str]:
    """Return a warning for each kind of cache that `reader` leaves out of a model."""
    found = _OMISSIONS.get(reader)
    return found(config) if found else []


def _image_rows(config: Config) -> list[str]:
    """Return a list with one warning if layers attend to image rows; otherwise an empty list."""
    layers = config.listing("cross_attention_layers") or []
    if not layers:
        return []
    per_row = 2 * config.key_heads() * config.head_dim()
    return [
        f"the image rows of {len(layers)} cross-attention layers are not planned: each row has "
        f"{per_row} elements of K and V per layer, and their number depends on the images"
    ]


_OMISSIONS: dict[Callable[..., Any], Callable[[Config], list[str]]] = {
    dense.cross_attending: _image_rows,
}
