"""What one layer caches, as a small closed set of frozen kinds.

Three families, because there are three shapes of page: attention keeps K and V
for each head and state; latent attention keeps one row for each state, without
heads; a recurrent layer keeps one state for each block. Within a family the kinds
differ in numbers, not in shape. The set is closed so that a plan can travel as
JSON and be checked when it arrives; a new kind is a new class here.
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
from kvatlas.specs.cell_content import ATTENTION_CACHES, sides
from kvatlas.specs.cell_formats import (
    PLAIN_FORMATS,
    CellFormat,
    CellRow,
    ElementCast,
    TensorScales,
    content_formats,
    format_name,
    needs_scales,
)
from kvatlas.specs.identity import without_dtypes, without_packing
from kvatlas.specs.latent import (
    LATENT_CACHES,
    CompressorState,
    Indexer,
    LatentAttention,
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
    | Mamba1
    | Mamba2
    | GatedDeltaNet
    | KimiDelta
    | LightningAttention
    | ShortConv
    | Rwkv7
)
"""Every kind there is: what a decoder of plans accepts."""

__all__ = [
    "ATTENTION_CACHES",
    "LATENT_CACHES",
    "PLAIN_FORMATS",
    "AnySpec",
    "Attention",
    "CellFormat",
    "CellRow",
    "ChunkedAttention",
    "CompressorState",
    "CrossAttention",
    "ElementCast",
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
    "format_name",
    "needs_scales",
    "sides",
    "sparse_latent",
    "without_dtypes",
    "without_packing",
]
