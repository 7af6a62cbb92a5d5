"""Device pools of SGLang, described by the tensors that they hold.

| class | tensors | pages |
|---|---|---|
| `MHATokenToKVPool`, layout nhd | K and V of each layer: (slots, H, D) | slots |
| the same, layout hnd | (pages, H, page, D) | pages |
| the same, vectorized_5d | K (pages, H, D/x, page, x), V (pages, H, page/x, D, x) | pages |
| `MLATokenToKVPool` | (slots, 1, row) for each layer | slots |
| `DSATokenToKVPool` | the same, and index keys: (pages, page * 132) bytes | both |
| `MambaPool` | conv (L, slots, R, T) or (L, slots, T, R), and temporal (L, slots, ...) | states |
| `SWAKVPool`, `HybridLinearKVPool` | two of these pools, each with its own slots | both |
| the `Unified...` classes | the same, as strided views of one buffer | both |

SGLang writes the tokens of padded requests to slot 0, or to page 0 of a paged pool. No block table
contains this slot or page. In unified pools, slots are physical: translate virtual slots with
SGLang's tables first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvatlas.engines.engine_memory import (
    EngineMemory,
    Table,
    check_dtype,
    check_known_version,
    describe_tables,
    layers_at,
    model_for,
    unknown_object,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field
from kvatlas.geometry.allocations import cut_planes, cut_rows, in_pages
from kvatlas.models import Model
from kvatlas.specs import Attention, Indexer, LatentAttention, Recurrent

KNOWN = ("0.5.23",)
"""Versions of SGLang whose classes were compared with these descriptions."""

_FP8 = {"torch.float8_e4m3fn": "fp8_e4m3", "torch.float8_e5m2": "fp8_e5m2"}


def describe_pool(
    model: Any,
    pool: Any,
    *,
    tp: int = 1,
    max_len: int | None = None,
    mamba_pool: Any = None,
    version: str | None = None,
) -> EngineMemory:
    """Return the plan of a device pool of SGLang, such as `MHATokenToKVPool` or `SWAKVPool`.

    `model` is the config of the served model, and `tp` its number of tensor-parallel ranks.
    `mamba_pool` is the pool of recurrent states, if `pool` does not refer to it. `version` is the
    version of SGLang that made the pool, by default the installed one.

    Each block of the plan is a page of SGLang; a state of a recurrent layer is one block.
    """
    check_known_version("sglang", KNOWN, version)
    loaded = _with_cache(model_for("sglang", model), pool)
    states = mamba_pool if mamba_pool is not None else getattr(pool, "mamba_pool", None)
    tables = [*_tables(loaded, pool, tp)]
    if states is not None and not extends(pool, "MambaPool"):
        tables.append(_states(loaded, states, states.mamba_layer_ids, tp))
    return describe_tables(loaded, tables, tp=tp, max_len=max_len)


def extends(pool: Any, name: str) -> bool:
    """Return whether the class of `pool` is, or extends, a class with this name."""
    return any(one.__name__ == name for one in type(pool).__mro__)


def _tables(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    """Return the tables of a pool, read by the reader of its class.

    If the class has no reader, the reader of its nearest known base class is used.
    """
    for one in type(pool).__mro__:
        if one.__name__ in _REFUSED:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "kvatlas has no spec for the content of this pool",
                got=f"{one.__name__}: {_REFUSED[one.__name__]}",
                hint="Use another --kv-cache-dtype",
            )
        if one.__name__ in READERS:
            return READERS[one.__name__](model, pool, tp)
    raise unknown_object("SGLang", pool, READERS)


def _with_cache(model: Model, pool: Any) -> Model:
    """Return the model with the cache dtype of a pool that stores fp8."""
    parts = [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    held = next((part for part in parts if part is not None), pool)
    cache = _FP8.get(str(getattr(held, "dtype", "")))
    if cache is None:
        return model
    if extends(held, "MLATokenToKVPool"):
        cache = "fp8_ds_mla" if held.dsa_kv_cache_store_fp8 else "fp8"
    return model.with_cache(cache)


# -- attention ------------------------------------------------------------------------------------


def _heads(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    return [_heads_at(model, pool, pool.model_layer_ids, tp)]


def _heads_at(
    model: Model, pool: Any, layers: Iterable[int], tp: int, *, keeps_all: bool = True
) -> Table:
    """Return the table of a pool with K and V, for these decoder layers."""
    if getattr(pool, "is_quantized_kv_cache", False):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "kvatlas has no spec for the content of this pool",
            got=f"a pool quantised with {type(pool.quant_method).__name__}",
            hint="Use another --kv-cache-dtype",
        )
    layout = pool.kv_cache_layout
    axes = _LAYOUTS.get("nhd" if layout == "page_major" else layout)
    if axes is None:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "kvatlas does not know this layout of SGLang's KV pool",
            got=repr(layout),
            hint=f"Use one of {', '.join(_LAYOUTS)}",
        )
    table = Table(pool.page_size, keeps_all=keeps_all)
    for place, index in enumerate(layers):
        (layer,) = layers_at(model, index, Attention, type(pool).__name__)
        page = layer.spec.page(pool.page_size, tp=tp)
        fields = {}
        for name, tensors in (("k", pool.k_buffer), ("v", pool.v_buffer)):
            check_dtype(layer, page.field(name), pool.dtype)
            placed = table.place(tensors[place], axes[name])
            fields[name] = placed if "B" in placed.axes else in_pages(placed, pool.page_size)
        table.layers[layer.name] = fields
    return table


_LAYOUTS: dict[str, dict[str, str]] = {
    "nhd": {"k": "NHC", "v": "NHC"},
    "hnd": {"k": "BHNC", "v": "BHNC"},
    "vectorized_5d": {"k": "BHCNc", "v": "BHkCN"},
}


def _latent(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    return [_latent_at(model, pool, pool.model_layer_ids, tp)]


def _latent_at(
    model: Model, pool: Any, layers: Iterable[int], tp: int, *, keeps_all: bool = True
) -> Table:
    """Return the table of a pool with latent rows and, if it has them, index keys."""
    table, keys = Table(pool.page_size, keeps_all=keeps_all), None
    if extends(pool, "DSATokenToKVPool"):
        if pool.index_kpool != 1:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "kvatlas has no spec for pooled index keys",
                got=f"index_kpool {pool.index_kpool}",
                hint="Serve the model without pooled index keys",
            )
        keys = pool.index_k_with_scale_buffer
    for place, index in enumerate(layers):
        (layer,) = layers_at(model, index, LatentAttention, type(pool).__name__)
        fields = _content(layer.spec.page(pool.page_size, tp=tp).fields)
        if pool.dtype == pool.store_dtype:
            check_dtype(layer, fields[0], pool.dtype)
        rows = table.place(pool.kv_buffer[place], "NHC").select("H", 0)
        table.layers[layer.name] = cut_rows(in_pages(rows, pool.page_size), fields)
        for indexer in layers_at(model, index, Indexer, "", optional=True):
            if keys is None or not len(keys[place]):
                continue  # a layer may reuse the selection of the layer before it
            fields = _content(indexer.spec.page(pool.page_size, tp=tp).fields)
            pages = table.place(keys[place], "BC")
            table.layers[indexer.name] = cut_planes(pages, fields, pool.page_size)
    return table


def _content(fields: Iterable[Field]) -> list[Field]:
    return [one for one in fields if not one.padding]


# -- recurrent states -----------------------------------------------------------------------------


def _states_alone(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    return [_states(model, pool, pool.mamba_layer_ids, tp)]


def _states(model: Model, pool: Any, layers: Iterable[int], tp: int) -> Table:
    """Return the table of a pool of recurrent states, for these decoder layers."""
    cache = pool.mamba_cache
    if len(cache.conv) != 1:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "kvatlas cannot describe a convolution in several tensors",
            got=f"{len(cache.conv)} tensors of one layer",
            hint="Serve the model without moving its states",
        )
    table = Table(1)
    for place, index in enumerate(layers):
        (layer,) = layers_at(model, index, Recurrent, type(pool).__name__)
        page = layer.spec.page(1, tp=tp)
        conv, ssm = cache.conv[0][place], cache.temporal[place]
        check_dtype(layer, page.field("conv"), conv.dtype)
        check_dtype(layer, page.field("ssm"), ssm.dtype)
        state = "".join(axis.name for axis in page.field("ssm").axes)
        table.layers[layer.name] = {
            "conv": table.place(conv, "BTR" if pool.conv_slice_axis else "BRT"),
            "ssm": table.place(ssm, f"B{state}"),
        }
    return table


# -- pools of pools -------------------------------------------------------------------------------


def _windows(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    """Return two tables: layers that see all tokens, and layers that see a window."""
    for part, is_window in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
        own = {place: index for index, (place, kind) in pool.layers_mapping.items()
               if kind == is_window}  # fmt: skip
        read = _latent_at if extends(part, "MLATokenToKVPool") else _heads_at
        layers = [own[place] for place in sorted(own)]
        yield read(model, part, layers, tp, keeps_all=not is_window)


def _hybrid(model: Model, pool: Any, tp: int) -> Iterable[Table]:
    """Return the table of the attention layers of a hybrid model."""
    part, own = pool.full_kv_pool, pool.full_attention_layer_id_mapping
    read = _latent_at if extends(part, "MLATokenToKVPool") else _heads_at
    return [read(model, part, sorted(own, key=lambda index: own[index]), tp)]


READERS: Mapping[str, Callable[[Model, Any, int], Iterable[Table]]] = {
    "MHATokenToKVPool": _heads,
    "MLATokenToKVPool": _latent,
    "MambaPool": _states_alone,
    "SWAKVPool": _windows,
    "HybridLinearKVPool": _hybrid,
}
"""How to read each class of pool. A subclass is read as the class that it extends."""

_REFUSED = {
    "MHATokenToKVPoolFP4": "4-bit rows with an 8-bit exponent for each 16 elements",
    "MLATokenToKVPoolFP4": "4-bit rows with an 8-bit exponent for each 16 elements",
    "MHATokenToKVPoolMXFP8": "fp8 rows with a power of two for each 32 elements",
    "NoOpMHATokenToKVPool": "it holds no cache",
}
"""Classes whose tensors have known shapes, but whose elements no spec describes."""
