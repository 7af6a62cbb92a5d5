"""Rows of one layer, in and out of its pages: K and V, or the latent and rope of MLA.

Both kinds are asked the same by the layers of a transformers cache, in the shapes that
transformers passes: two tensors [batch, heads, tokens, elements]. For MLA those are the
latent and the rotary part, one head each: transformers caches them compressed and expands
them to K and V of every head after it has read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels import read, write
from kvatlas.specs import Attention, ChunkedAttention, LatentAttention, SlidingAttention

_E4M3_MAX = 448.0

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KeyValueRows:
    """K and V for each head, in whatever cache dtype the spec says."""

    layer: LayerCache
    spec: Attention

    @property
    def reach(self) -> int | None:
        """Tokens that a window or a chunk holds at most; None for all."""
        if isinstance(self.spec, SlidingAttention):
            return self.spec.window
        return self.spec.chunk if isinstance(self.spec, ChunkedAttention) else None

    def put(self, first: torch.Tensor, second: torch.Tensor, slots: torch.Tensor) -> None:
        """Write [tokens, heads, elements] to slots, quantised; negative ones are skipped."""
        write(self.layer, first, second, slots)

    def get(self, slots: torch.Tensor) -> Pair:
        """Read slots, as float32 [tokens, heads, elements]."""
        return read(self.layer, slots)


@dataclass(frozen=True)
class LatentRows:
    """The latent and the rotary part that all heads share."""

    layer: LayerCache
    spec: LatentAttention

    @property
    def reach(self) -> int | None:
        """Latent attention sees everything."""
        return None

    def put(self, first: torch.Tensor, second: torch.Tensor, slots: torch.Tensor) -> None:
        """Write them as they are, or in fp8 with a scale of one, which saturates."""
        kept = slots >= 0
        states = self.layer.kernel_blocks.size("N")
        at = (slots[kept] // states, slots[kept] % states)
        for name, values in (("latent", first), ("rope", second)):
            field = self.layer.field(name)
            rows = values[kept].squeeze(1)
            if field.dtype == torch.float8_e4m3fn:
                rows = rows.float().clamp(-_E4M3_MAX, _E4M3_MAX)
            field[at] = rows.to(field.dtype)

    def get(self, slots: torch.Tensor) -> Pair:
        """Read both, as float32 with one head."""
        states = self.layer.kernel_blocks.size("N")
        at = (slots // states, slots % states)
        latent, rope = (self.layer.field(name)[at].float() for name in ("latent", "rope"))
        return latent.unsqueeze(1), rope.unsqueeze(1)


Rows = KeyValueRows | LatentRows
"""What a layer keeps of each token."""
