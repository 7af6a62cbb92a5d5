"""Specs: immutable descriptions of what one layer caches.

There are three families of specs, one for each shape of page. Attention caches K and V for
each head and state. Latent attention caches one row for each state, without heads.
Recurrent layers cache one state for each block. Specs of one family differ in their
parameters, not in the shape of their pages. The set of specs is closed, so that a plan can
be sent as JSON and validated by the receiver; to support another kind of layer, add a class
to this package.
"""

from kvatlas.specs.attention import (
    Attention,
    ChunkedAttention,
    CrossAttention,
    EncoderOnlyAttention,
    FullAttention,
    Packing,
    SinkAttention,
    SlidingAttention,
)
from kvatlas.specs.base import Spec
from kvatlas.specs.cell_content import ATTENTION_CACHES
from kvatlas.specs.cell_formats import CellFormat, TensorScales, content_formats
from kvatlas.specs.latent import (
    LATENT_CACHES,
    CompressorState,
    Indexer,
    LatentAttention,
    Ring,
    SlidingLatentAttention,
    compressed_latent,
    sparse_latent,
)
from kvatlas.specs.recurrent import (
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba1,
    Mamba2,
    Recurrent,
    Rwkv7,
    ShortConv,
    State,
)
from kvatlas.specs.visibility import Visibility

AnySpec = (
    FullAttention
    | SlidingAttention
    | ChunkedAttention
    | SinkAttention
    | CrossAttention
    | EncoderOnlyAttention
    | LatentAttention
    | SlidingLatentAttention
    | Indexer
    | CompressorState
    | Ring
    | Mamba1
    | Mamba2
    | GatedDeltaNet
    | KimiDelta
    | LightningAttention
    | ShortConv
    | Rwkv7
)
"""Union of all specs, as accepted when a plan is decoded."""

__all__ = [
    "ATTENTION_CACHES",
    "LATENT_CACHES",
    "AnySpec",
    "Attention",
    "CellFormat",
    "ChunkedAttention",
    "CompressorState",
    "CrossAttention",
    "EncoderOnlyAttention",
    "FullAttention",
    "GatedDeltaNet",
    "Indexer",
    "KimiDelta",
    "LatentAttention",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "Packing",
    "Recurrent",
    "Ring",
    "Rwkv7",
    "ShortConv",
    "SinkAttention",
    "SlidingAttention",
    "SlidingLatentAttention",
    "Spec",
    "State",
    "TensorScales",
    "Visibility",
    "compressed_latent",
    "content_formats",
    "sparse_latent",
]
