"""Attention backends as data: the block sizes, layouts and cache dtypes that each supports.

Planning never calls a backend; it only needs this data. The defaults are the backends that vLLM
selects on a Hopper GPU; `engine_rules` has the defaults of other chips. The option `backend=`
selects another backend for all layers whose default backend has the same `family`.

A backend supports every block size that is a multiple of one of its `sizes`. Its kernels read
blocks of exactly these sizes or, if `multiples` is set, of any multiple of them. Other blocks
are split into kernel blocks.
"""

from __future__ import annotations

from itertools import permutations
from math import lcm
from typing import Any, Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning.engine_rules import NEWEST, EngineRules
from kvatlas.specs import (
    Attention,
    CompressorState,
    Indexer,
    LatentAttention,
    Packing,
    Ring,
    SlidingLatentAttention,
    Spec,
)

Family = Literal["dense", "latent", "sparse", "indexer", "other"]
Record = tuple[str, str]
"""The cache dtype and the version of latent rows, such as `("fp8_ds_mla", "v4.1")`."""

ANY_ORDER = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""Layouts that a backend supports if it declares none, in vLLM's order of preference."""


EVERY_ORDER = (
    *ANY_ORDER,
    *sorted({"".join(axes) + "C" for axes in permutations("LBHN")} - {*ANY_ORDER}),
)
"""All layouts in which the bytes of a cell are contiguous, as every kernel requires. Policy
atlas may use them for a backend that declares no layouts, because its kernels take strides."""


class Backend(msgspec.Struct, frozen=True):
    """The block sizes, layouts and cache dtypes that one backend supports.

    >>> BACKENDS["FLASHMLA"].takes(128), BACKENDS["FLASHMLA"].kernel_block(128)
    (True, 64)
    """

    name: str
    family: Family
    sizes: tuple[int, ...]
    """Kernel block sizes, in tokens."""
    multiples: bool = True
    """Whether any multiple of a size is also a kernel block size."""
    layouts: tuple[str, ...] = ()
    """Supported layouts, the preferred one first; empty if the backend declares none."""
    caches: tuple[str, ...] | None = None
    """Supported cache dtypes; None if the backend supports all that the specs allow."""
    whole_rows: bool = False
    """Whether the block stride must be a multiple of the row size, because kernels index rows."""
    whole_blocks: bool = True
    """Whether the block stride must be a multiple of a kernel block, if `multiples` is false."""
    packing: Packing | None = None
    """The packing of K and V in a page; None for the default of the cache dtype."""
    stride_tokens: int | None = None
    """Block strides must be a multiple of this many tokens, although blocks are not split."""
    stride_bytes: int | None = None
    """Block strides must be a multiple of this many bytes."""
    record: Record | None = None
    """The format in which the kernels store latent rows, if it depends on the chip."""
    align: int | None = None
    """Pages of the layer are padded to a multiple of this many bytes; None for the spec's."""
    window_block: int | None = None
    """Tokens per block of a sliding window; None for the default of its kind."""
    strided: bool = False
    """Whether kernels take any block stride, although the backend declares only layouts in which
    the blocks of a layer are adjacent."""

    def takes(self, block: int) -> bool:
        """Return whether the backend supports blocks of `block` tokens, split or not."""
        return any(block % size == 0 for size in self.sizes)

    def reads(self, block: int) -> bool:
        """Return whether the kernels support blocks of `block` tokens, without splitting them."""
        return self.takes(block) if self.multiples else block in self.sizes

    def kernel_block(self, block: int) -> int | None:
        """Return the largest kernel block size in tokens that divides `block`, or None."""
        if self.reads(block):
            return block
        return max((size for size in self.sizes if block % size == 0), default=None)

    def with_strides(self) -> Backend:
        """Return the backend, with more layouts if its kernels accept any block stride.

        vLLM passes the strides of a plan to its kernels. A `strided` backend therefore also
        supports layouts in which the blocks of a layer are not adjacent.

        >>> BACKENDS["CPU_ATTN"].with_strides().layouts
        ('LBHNC', 'BLHNC')
        """
        if not self.strided:
            return self
        outermost = (f"BL{order[2:]}" for order in self.layouts if order.startswith("LB"))
        layouts = tuple(dict.fromkeys((*self.layouts, *outermost)))
        return msgspec.structs.replace(self, layouts=layouts)


_FP8 = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
_RECORDS = ("fp8_ds_mla",)
_TURBO = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN", "dense", (16,), caches=_FP8),
        Backend("FLASH_ATTN_DIFFKV", "dense", (16,), caches=("auto",)),
        Backend("TRITON_ATTN", "dense", (16,), caches=(*_FP8, *_TOKEN_HEAD)),
        Backend("TRITON_ATTN_DIFFKV", "dense", (16,), caches=_FP8),
        Backend("FLEX_ATTENTION", "dense", (16,), layouts=("LBNHC",), caches=("auto",)),
        Backend("FLASHINFER", "dense", (16, 32, 64), multiples=False, caches=(*_FP8, "nvfp4")),
        Backend(
            "FLASHINFER_SM100", "dense", (16, 32, 64), multiples=False,
            layouts=("LBHNC", "BLHNC"), caches=(*_FP8, "nvfp4"),
        ),
        Backend(
            "TURBOQUANT", "dense", (16, 32, 64, 128), multiples=False,
            layouts=("LBNHC",), caches=_TURBO,
        ),
        Backend(
            "CPU_ATTN", "dense", (32,), layouts=("LBHNC",), caches=_FP8, packing="transposed",
            strided=True,
        ),
        Backend("ROCM_ATTN", "dense", (16,), layouts=("LHBNC", "LBHNC"), caches=_FP8),
        Backend("ROCM_AITER_FA", "dense", (16,), layouts=("LBHNC", "LHBNC"), caches=_FP8),
        Backend("MINIMAX_M3_SPARSE", "other", (128,), multiples=False),
        Backend("MINIMAX_M3_SPARSE_INDEXER", "other", (128,), multiples=False),
        Backend("FLASH_ATTN_MLA", "latent", (16,), caches=("auto",)),
        Backend("TRITON_MLA", "latent", (16,), caches=_FP8),
        Backend("FLASHMLA", "latent", (64,), multiples=False, caches=_FP8),
        Backend("FLASHINFER_MLA", "latent", (32, 64), multiples=False, caches=_FP8),
        Backend("CUTLASS_MLA", "latent", (128,), multiples=False, caches=_FP8),
        Backend("FLASHMLA_SPARSE", "sparse", (64,), whole_rows=True),
        Backend("FLASH_ATTN_MLA_SPARSE", "sparse", (64,), caches=("auto",), whole_rows=True),
        Backend("FLASH_ATTN_MLA_SPARSE_FA4", "sparse", (64,), caches=("auto",), whole_rows=True),
        Backend(
            "FLASHINFER_MLA_SPARSE", "sparse", (32,), caches=_FP8, whole_rows=True,
            stride_tokens=32,
        ),
        Backend("DEEPSEEK_V32_INDEXER", "indexer", (64,), multiples=False),
        Backend("FLASHMLA_SPARSE_DSV4", "other", (256,), multiples=False),
        Backend(
            "DEEPSEEK_V4_INDEXER", "other", (256,), multiples=False, layouts=("BLHNC", "BLNHC")
        ),
        Backend("DEEPSEEK_SPARSE_SWA", "other", (32,)),
        Backend("COMPRESSOR", "other", (1,)),
        Backend("FLASHMLA_SPARSE_DSV41", "other", (64,), multiples=False, caches=_RECORDS),
        Backend("FLASHINFER_MLA_SPARSE_DSV41", "other", (128,), multiples=False, caches=_RECORDS),
        Backend(
            "FLASHMLA_MEGA_ATTN_DSV41", "other", (128,), multiples=False, caches=_RECORDS,
            align=512, record=("nvfp4_ds_mla", "v4.1"),
        ),
        Backend(
            "DEEPSEEK_SPARSE_SWA_DSV41", "other", (32,), caches=_RECORDS, window_block=32
        ),
        Backend(  # kernels read both kinds of records as rows of the whole cache
            "DEEPSEEK_SPARSE_SWA_DSV41_SM100", "other", (32,), caches=_RECORDS, window_block=32,
            align=512, record=("fp8_ds_mla", "v4.1"), stride_bytes=lcm(528, 288),
        ),
        Backend(
            "DEEPSEEK_V41_INDEXER", "other", (64,), multiples=False, layouts=("BLHNC", "BLNHC")
        ),
        Backend(
            "DEEPSEEK_V41_INDEXER_SM100", "other", (128,), multiples=False, align=512,
            layouts=("BLHNC", "BLNHC"),
        ),
        Backend(
            "DEEPSEEK_V41_INDEXER_SM120", "other", (128,), multiples=False,
            layouts=("BLHNC", "BLNHC"),
        ),
        Backend("QWEN4_EXP_QSA_TRITON", "other", (16,), caches=("auto", "fp8", "fp8_e4m3")),
        Backend("QWEN4_EXP_EXP_QSA_STATE", "other", (1,), layouts=("BLNHC", "BLHNC")),
        Backend("KPOOL_TAIL", "other", (1,), layouts=("BLHNC",)),
        Backend(
            "STEP5_DSA", "other", (16,), layouts=("BLNHC",), caches=("auto", "fp8", "fp8_e4m3"),
            stride_tokens=8,
        ),
        Backend("STEP5_CSA_SUMMARY", "other", (1,)),
        Backend("STEP5_CSA_TAIL_RING", "other", (1,), whole_rows=True),
    )
}  # fmt: skip
"""All known backends by name."""


def backends_of(
    model: Model,
    chosen: str | None = None,
    *,
    rules: EngineRules = NEWEST,
    chip: str | None = None,
    tp: int = 1,
) -> dict[str, Backend | None]:
    """Return the backend of each layer, by layer name; None for recurrent layers.

    The backend named `chosen` replaces vLLM's default in all layers whose default has the same
    `family`; the other layers keep their defaults. `rules`, `chip` and `tp` select the defaults;
    the defaults on Hopper apply if `chip` is None.

    >>> model = Model.load("Llama-3.1-8B")
    >>> {used.name for used in backends_of(model, chip="sm100").values() if used}
    {'FLASHINFER_SM100'}
    """
    named = BACKENDS.get(str(chosen).upper())
    if chosen is not None and named is None:
        raise AtlasError(
            Code.UNKNOWN_BACKEND,
            "There is no such backend",
            got=repr(chosen),
            hint=f"Use one of {', '.join(BACKENDS)}",
        )
    sparse, companions = _sparse_layers(model), _companions(model)
    backends: dict[str, Backend | None] = {}
    selected: dict[tuple[object, ...], str] = {}
    for layer in model.layers:
        # Layers of a model share few spec objects; to hash or compare specs would cost more.
        ring = companions.get(layer.index)
        alike = id(layer.spec), layer.index in sparse, id(ring)
        if alike not in selected:
            default = _ring_backend(layer.spec, ring) if ring else ""
            default = default or _default(layer.spec, sparse=layer.index in sparse)
            selected[alike] = rules.backend(default, chip, model, layer.spec, tp)
        backend = BACKENDS.get(selected[alike])
        if named and backend and named.family == backend.family:
            backend = named
        if backend and backend.record and model.cache == "fp8_ds_mla":
            # The caller has chosen the record of all latent rows; a row has 528 bytes then.
            record, stride = (model.cache, backend.record[1]), backend.stride_bytes and 528
            backend = msgspec.structs.replace(backend, record=record, stride_bytes=stride)
        if backend and not rules.whole_kernel_blocks:
            rows = backend.whole_rows and backend.name not in rules.any_stride
            backend = msgspec.structs.replace(
                backend, whole_blocks=False, whole_rows=rows, stride_tokens=None
            )
        if backend and ring and ring.parts > 1 and isinstance(layer.spec, Indexer):
            # The kernels read 32 or 64 compressed keys.
            sizes = (32 * layer.spec.compress, 64 * layer.spec.compress)
            backend = msgspec.structs.replace(backend, sizes=sizes)
        backends[layer.name] = backend
    if named and named.name not in {used.name for used in backends.values() if used}:
        used = ", ".join(sorted({b.name for b in backends.values() if b}))
        raise AtlasError(
            Code.UNKNOWN_BACKEND,
            "No layer of the model can use this backend",
            got=f"{named.name} for {model.architecture}",
            hint=f"Omit backend=; the model's layers use {used or 'no backend'}",
        )
    for layer in model.layers:
        backend, cache = backends[layer.name], getattr(layer.spec, "cache", "auto")
        if backend and backend.caches is not None and cache not in backend.caches:
            raise AtlasError(
                Code.BACKEND_REFUSES,
                f"{backend.name} supports only the cache dtypes {', '.join(backend.caches)}",
                got=f"cache dtype {cache!r} in {layer.name}",
                hint="Pass another kv_dtype= or another backend=",
            )
    return backends


def packed_for(model: Model, backends: dict[str, Backend | None]) -> Model:
    """Return the model with specs that store rows in the form that each layer's backend requires.

    For attention, the form is the `packing`: the arrangement of K and V in a page. A `packing` that
    is already set does not change. For latent attention, the form is the record, the bytes of one
    row with its scales and padding. Latent rows that are not cached as records do not change.

    >>> model = Model.load("Llama-3.1-8B")
    >>> packed_for(model, backends_of(model, "CPU_ATTN")).layers[0].spec.packing
    'transposed'
    """
    layers = []
    for layer in model.layers:
        backend, spec = backends[layer.name], layer.spec
        if backend and backend.packing and isinstance(spec, Attention) and spec.packing is None:
            spec = msgspec.structs.replace(spec, packing=backend.packing)
        if backend and backend.align and _in_records(spec):
            about: dict[str, Any] = {"align": backend.align}
            if backend.record:
                about |= {"cache": backend.record[0], "version": backend.record[1]}
            spec = msgspec.structs.replace(spec, **about)
        layers.append(msgspec.structs.replace(layer, spec=spec))
    return msgspec.structs.replace(model, layers=tuple(layers))


def _in_records(spec: Spec) -> bool:
    """Return whether a cache is an indexer, or stores latent rows as records."""
    return isinstance(spec, Indexer) or getattr(spec, "cache", "") == "fp8_ds_mla"


def _sparse_layers(model: Model) -> set[int]:
    """Return the indices of layers that attend to selected tokens only.

    A latent layer without an indexer attends to the tokens that the indexer of an earlier layer has
    selected, unless the model also has sliding windows.
    """
    indexed = {layer.index for layer in model.layers if isinstance(layer.spec, Indexer)}
    kinds = {type(layer.spec) for layer in model.layers}
    if not indexed or not kinds <= {Indexer, LatentAttention}:
        return indexed
    return {layer.index for layer in model.layers}


def _companions(model: Model) -> dict[int, Ring]:
    """Return the rings of a model's layers, by layer index."""
    return {x.index: x.spec for x in model.layers if isinstance(x.spec, Ring)}


def _ring_backend(spec: Spec, ring: Ring) -> str:
    """Return the backend of a cache whose layer also has a ring.

    The result is empty if the ring does not determine the backend.
    """
    if isinstance(spec, LatentAttention):
        return ""
    kinds = (Ring, Indexer, Attention)
    names = ("QWEN4_EXP_EXP_QSA_STATE", "QWEN4_EXP_EXP_QSA_STATE", "QWEN4_EXP_QSA_TRITON")
    if ring.fills_page:
        names = ("STEP5_CSA_TAIL_RING", "STEP5_CSA_SUMMARY", "STEP5_DSA")
    elif ring.dtype == "fp32":  # of DeepSeek-V4.1
        names = ("COMPRESSOR", "DEEPSEEK_V4_INDEXER", "")
    elif ring.parts > 1:
        names = ("KPOOL_TAIL", "DEEPSEEK_V32_INDEXER", "")
    return next((n for kind, n in zip(kinds, names, strict=True) if isinstance(spec, kind)), "")


def _default(spec: Spec, *, sparse: bool) -> str:
    """Return the name of the backend that vLLM selects on Hopper; empty for a recurrent layer."""
    if isinstance(spec, Attention):
        if sparse:
            return "MINIMAX_M3_SPARSE"
        if spec.v_dim not in (None, spec.head_dim):
            return "FLASH_ATTN_DIFFKV" if spec.cache == "auto" else "TRITON_ATTN_DIFFKV"
        if spec.cache in _TURBO:
            return "TURBOQUANT"
        if spec.cache == "nvfp4":
            return "FLASHINFER"
        return "TRITON_ATTN" if spec.cache in _TOKEN_HEAD else "FLASH_ATTN"
    if isinstance(spec, CompressorState):
        return "COMPRESSOR"
    if isinstance(spec, SlidingLatentAttention):
        return "DEEPSEEK_SPARSE_SWA"
    if isinstance(spec, Indexer):
        if spec.cache == "bf16":
            return "MINIMAX_M3_SPARSE_INDEXER"
        return "DEEPSEEK_V32_INDEXER" if spec.compress == 1 else "DEEPSEEK_V4_INDEXER"
    if isinstance(spec, LatentAttention):
        if spec.version != "v3" or spec.compress > 1:
            return "FLASHMLA_SPARSE_DSV4"
        if sparse and spec.cache == "auto":
            return "FLASH_ATTN_MLA_SPARSE"
        if sparse or spec.cache.endswith("_ds_mla"):
            return "FLASHMLA_SPARSE"
        return "FLASH_ATTN_MLA" if spec.cache == "auto" else "FLASHMLA"
    return ""


def smallest_common_block(backends: list[Backend], wanted: int) -> int:
    """Return `wanted` if all backends support it, else the smallest block size that all support.

    >>> smallest_common_block([BACKENDS["FLASHMLA"]], 16)
    64
    >>> smallest_common_block([BACKENDS["FLASH_ATTN"], BACKENDS["MINIMAX_M3_SPARSE"]], 16)
    128
    """
    if all(backend.takes(wanted) for backend in backends):
        return wanted
    candidates = {1}
    for backend in backends:
        candidates = {lcm(block, size) for block in candidates for size in backend.sizes}
    return min(block for block in candidates if all(b.takes(block) for b in backends))
