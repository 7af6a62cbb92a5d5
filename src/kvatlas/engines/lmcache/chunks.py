"""Chunks of LMCache in host memory. Each chunk contains the same number of tokens.

| format | axes | content |
|---|---|---|
| `KV_2LTD` | K and V, layers, tokens, H * D | all layers |
| `KV_T2D` | tokens, K and V, H * D | one layer |
| `KV_2TD` | K and V, tokens, H * D | one layer |
| `KV_MLA_FMT` | 1, layers, tokens, row | all layers, latent rows |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvatlas.engines.engine_memory import EngineMemory, check_known_version, model_for
from kvatlas.engines.paged_buffer import PagedBuffer, attention_layers, describe_buffer
from kvatlas.errors import AtlasError, Code
from kvatlas.models import Layer, Model

KNOWN = ("0.5.6",)
"""Versions of LMCache whose classes were compared with these descriptions."""

FORMATS = {"KV_2LTD": "SLNHC", "KV_T2D": "NSHC", "KV_2TD": "SNHC", "KV_MLA_FMT": "SLNC"}
"""The axes of each fmt, with H * D as two axes."""


def describe_chunks(
    model: Any,
    chunks: Sequence[Any],
    *,
    layer: int | None = None,
    tp: int = 1,
    max_len: int | None = None,
    version: str | None = None,
) -> EngineMemory:
    """Return the plan of LMCache's memory objects, each with one chunk of a prefix.

    Chunk n is block n of the plan. The objects must be evenly spaced in one allocation. This is the
    case for objects of equal size that were allocated one after another. If a chunk contains only
    one layer, `layer` is the index of this decoder layer.
    """
    check_known_version("lmcache", KNOWN, version)
    loaded = model_for("vllm", model)
    formats = {chunk.get_memory_format().name for chunk in chunks}
    axes = _axes(formats.pop() if len(formats) == 1 else formats)
    layers = _layers(loaded, axes, layer)
    buffer = _joined(chunks)
    # LMCache swaps the token axes of KV_T2D and KV_2TD in `get_num_tokens`.
    tokens = buffer.shape[1 + axes.replace("H", "").index("N")]
    if "H" in axes:
        heads = layers[0].spec.page(tokens, tp=tp).field("k").sizes["H"]
        if buffer.shape[-1] % heads:
            raise AtlasError(
                Code.BAD_TENSOR,
                "A row of a chunk does not have the heads of the model",
                got=f"{buffer.shape[-1]} elements for {heads} heads",
                hint="Check the model and tp",
            )
        buffer = buffer.unflatten(-1, (heads, -1))
    if "L" not in axes:
        buffer, axes = buffer.unsqueeze(1), f"L{axes}"
    return describe_buffer(
        loaded,
        layers,
        buffer,
        f"B{axes}",
        page=tokens,
        tp=tp,
        max_len=max_len,
        dtype=chunks[0].get_dtype(),
    )


def chunk_buffer(
    model: Any,
    fmt: str,
    *,
    chunks: int,
    tokens: int = 256,
    layer: int | None = None,
    tp: int = 1,
    max_len: int | None = None,
) -> PagedBuffer:
    """Allocate a buffer for chunks of a format; row n of its bytes is the content of chunk n.

    >>> held = chunk_buffer("Qwen3-8B", "KV_2LTD", chunks=2)
    >>> held.pages.shape, held.memory.plan.block_size
    ((2, 37748736), 256)
    """
    loaded, axes = model_for("vllm", model), _axes(fmt)
    layers = _layers(loaded, axes, layer)
    inner = axes if "L" in axes else f"L{axes}"
    return PagedBuffer.of(loaded, layers, inner, page=tokens, pages=chunks, tp=tp, max_len=max_len)


def _axes(fmt: object) -> str:
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "kvatlas cannot describe chunks of this format of LMCache",
            got=repr(fmt),
            hint=f"Use one of {', '.join(FORMATS)}",
        )
    return FORMATS[fmt]


def _layers(model: Model, axes: str, layer: int | None) -> list[Layer]:
    if "L" in axes:
        return attention_layers(model, sorted({one.index for one in model.layers}))
    if layer is None:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "Chunks of one layer need the index of the layer",
            got="layer=None",
            hint="Pass layer=, the decoder layer of the chunks",
        )
    return attention_layers(model, [layer])


def _joined(chunks: Sequence[Any]) -> Any:
    """Return one tensor over evenly spaced chunks; axis 0 counts the chunks."""
    tensors = [chunk.tensor for chunk in chunks]
    first = tensors[0]
    at = [one.storage_offset() for one in tensors]
    steps = {after - before for before, after in pairwise(at)}
    alike = {(one.untyped_storage().data_ptr(), one.shape, one.stride()) for one in tensors}
    if len(steps) > 1 or len(alike) > 1 or (steps and min(steps) <= 0):
        raise AtlasError(
            Code.BAD_TENSOR,
            "The chunks must be evenly spaced in one allocation",
            got=f"{len(alike)} kinds of tensors, at distances {sorted(steps)[:3]}",
            hint="Describe the chunks one by one, or copy them into chunk_buffer(...)",
        )
    step = steps.pop() if steps else first.numel()
    return first.as_strided((len(chunks), *first.shape), (step, *first.stride()), at[0])
