"""Pools of TensorRT-LLM, described by a tensor for each pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from kvatlas.engines.engine_memory import (
    EngineMemory,
    Table,
    check_dtype,
    check_known_version,
    describe_tables,
    layers_at,
    model_for,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.geometry.allocations import cut_rows
from kvatlas.models import Layer, Model
from kvatlas.specs import Attention, LatentAttention

KNOWN = ("1.3",)
"""Releases of TensorRT-LLM, by their first two numbers, whose source was recorded."""

HeadOrder = Literal["HND", "NHD"]
_ROLES = {"key": "k", "value": "v"}


class SlotPool(NamedTuple):
    """A pool of `KVCacheManagerV2`: slots of buffers that have the same size."""

    memory: Any
    """A tensor of bytes with the axes slot and byte; its strides may be longer than a slot."""
    buffers: Sequence[tuple[int, str]]
    """The decoder layer and the role (`key` or `value`) of each buffer, in the slot's order."""
    tokens_per_block: int
    window: int | None = None
    """The window of the pool's life cycle in tokens; None if it keeps all tokens."""


def describe_pools(
    model: Any,
    pools: Sequence[Any],
    *,
    tokens_per_block: int,
    dtype: Any,
    layers: Sequence[Sequence[int]] | None = None,
    windows: Sequence[int | None] | None = None,
    order: HeadOrder = "HND",
    tp: int = 1,
    max_len: int | None = None,
    version: str = KNOWN[-1],
) -> EngineMemory:
    """Return the plan of V1's pools: tensors (blocks, layers, K and V, elements of a block).

    `layers` lists the decoder layers of each pool. `windows` lists the window of each pool, or None
    for a pool that keeps all tokens. Both can be omitted if there is one pool. `dtype` is the dtype
    of the cache; it may differ from the tensor's, because the manager stores an fp8 cache as bytes.
    For MLA, the third axis has size 1. `version` is `tensorrt_llm.__version__` of the process that
    has the pools.

    >>> import torch
    >>> kv = torch.zeros(9, 36, 2, 8 * 32 * 128, dtype=torch.bfloat16)
    >>> seen = describe_pools("Qwen3-8B", [kv], tokens_per_block=32, dtype=kv.dtype).plan
    >>> seen.block_size, seen.num_blocks, seen.view("model.layers.0.self_attn.attn", "v").offset
    (32, 9, 65536)
    """
    check_known_version("tensorrt_llm", KNOWN, ".".join(version.split(".")[:2]))
    loaded = _with_cache(model_for("vllm", model), dtype)
    own = layers if layers is not None else [sorted({layer.index for layer in loaded.layers})]
    kept = windows if windows is not None else [None] * len(pools)
    _check_lengths(pools, own, kept)
    tables = []
    for pool, indices, window in zip(pools, own, kept, strict=True):
        table = Table(tokens_per_block, keeps_all=window is None)
        blocks = table.place(pool, "BLSC")
        for place, index in enumerate(indices):
            layer = _layer(loaded, index)
            sides = blocks.select("L", place)
            table.layers[layer.name] = _sides(layer, sides, tokens_per_block, dtype, order, tp)
        tables.append(table)
    return describe_tables(loaded, tables, tp=tp, max_len=max_len)


def describe_slots(
    model: Any,
    pools: Sequence[SlotPool],
    *,
    dtype: Any,
    order: HeadOrder = "HND",
    tp: int = 1,
    max_len: int | None = None,
    version: str = KNOWN[-1],
) -> EngineMemory:
    """Return the plan of V2's pools. Each pool must have all buffers of its layers.

    >>> import torch
    >>> buffers = [(layer, role) for layer in range(36) for role in ("key", "value")]
    >>> memory = torch.zeros(9, 72 * 65536, dtype=torch.uint8)
    >>> pools = [SlotPool(memory, buffers, tokens_per_block=32)]
    >>> seen = describe_slots("Qwen3-8B", pools, dtype="bf16").plan
    >>> seen.view("model.layers.1.self_attn.attn", "k").offset
    131072
    """
    check_known_version("tensorrt_llm", KNOWN, ".".join(version.split(".")[:2]))
    loaded = _with_cache(model_for("vllm", model), dtype)
    tables = []
    for pool in pools:
        table = Table(pool.tokens_per_block, keeps_all=pool.window is None)
        whole = table.place(pool.memory, "BC")
        count = len(pool.buffers)
        if count == 0 or whole.size("C") % count:
            raise AtlasError(
                Code.BAD_TENSOR,
                "The buffers of a slot must have equal sizes",
                got=f"a slot of {whole.size('C')} elements for {count} buffers",
                hint="List the buffers of the pool in the order of the slot",
            )
        parts = whole.split("C", into=("S", "C"), inner=whole.size("C") // count)
        found: dict[int, dict[str, Placement]] = {}
        for place, (index, role) in enumerate(pool.buffers):
            found.setdefault(index, {})[role] = parts.select("S", place)
        for index, given in found.items():
            layer = _layer(loaded, index)
            fields = {}
            for role, one in given.items():
                name = _ROLES.get(role)
                if name is None or not isinstance(layer.spec, Attention):
                    raise AtlasError(
                        Code.ENGINE_REFUSES,
                        "kvatlas cannot describe this buffer of TensorRT-LLM",
                        got=f"role {role!r} of {layer.name}",
                        hint=f"Pass buffers of attention, with the roles {', '.join(_ROLES)}",
                    )
                fields[name] = _rows(layer, name, one, pool.tokens_per_block, dtype, order, tp)
            table.layers[layer.name] = fields
        tables.append(table)
    return describe_tables(loaded, tables, tp=tp, max_len=max_len)


def _with_cache(model: Model, dtype: Any) -> Model:
    name = str(dtype).removeprefix("torch.")
    return model.with_cache("fp8") if name in ("float8_e4m3fn", "fp8", "e4m3") else model


def _check_lengths(*given: Sequence[Any]) -> None:
    if len({len(one) for one in given}) > 1:
        raise AtlasError(
            Code.BAD_TENSOR,
            "The lists `pools`, `layers` and `windows` must have equal lengths",
            got="lengths " + ", ".join(str(len(one)) for one in given),
            hint="List the decoder layers and the window of each pool",
        )


def _layer(model: Model, index: int) -> Layer:
    kinds = (Attention, LatentAttention)
    found = [layer for kind in kinds for layer in layers_at(model, index, kind, "", optional=True)]
    return found[0] if found else layers_at(model, index, Attention, "TensorRT-LLM")[0]


def _sides(
    layer: Layer, sides: Placement, block: int, dtype: Any, order: HeadOrder, tp: int
) -> dict[str, Placement]:
    """Return the placements of the fields of a layer; axis S counts K and V."""
    if isinstance(layer.spec, LatentAttention):
        fields = list(layer.spec.page(block, tp=tp).fields)
        check_dtype(layer, fields[0], dtype)
        rows = sides.select("S", 0)
        return cut_rows(rows.split("C", into=("N", "C"), inner=rows.size("C") // block), fields)
    return {
        name: _rows(layer, name, sides.select("S", place), block, dtype, order, tp)
        for place, name in enumerate("kv")
    }


def _rows(
    layer: Layer, name: str, one: Placement, block: int, dtype: Any, order: HeadOrder, tp: int
) -> Placement:
    """Divide the elements of a block into heads, tokens and elements of a row."""
    page = layer.spec.page(block, tp=tp)
    own = page.field(name)
    check_dtype(layer, own, dtype)
    outer = own.sizes["H"] if order == "HND" else block
    inner = block if order == "HND" else own.sizes["H"]
    axes = ("H", "N") if order == "HND" else ("N", "H")
    rows, total = one.size("C") // (outer * inner), one.size("C")
    if total != outer * inner * max(rows, 1):
        raise AtlasError(
            Code.BAD_TENSOR,
            f"A block of {layer.name} has another number of elements than the model",
            got=f"{total} elements for {own.sizes['H']} heads and {block} tokens",
            hint="Check the model, tp and tokens_per_block",
        )
    whole = one.split("C", into=(axes[0], "C"), inner=inner * rows)
    return whole.split("C", into=(axes[1], "C"), inner=rows)
