"""Cache dtypes: what a checkpoint asks for, and a layer's spec under another one.

The dtype of a cache is not the dtype of the weights: a checkpoint in 4 bits mostly
keeps its cache in bf16. Only the quantisation section's own words about the cache
count.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.models.config import Config
from kvatlas.specs import ATTENTION_CACHES, LATENT_CACHES, AnySpec, Attention, LatentAttention

_ELEMENTS = ("bf16", "fp16", "fp32")
_ALGORITHMS = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}

S = TypeVar("S", bound=AnySpec)


def checkpoint_cache(root: Config, text: Config, warnings: list[str]) -> str:
    """The cache dtype that a checkpoint asks for: `auto` where it says nothing.

    >>> scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    >>> checkpoint_cache(Config({"quantization_config": scheme}), Config({}), [])
    'fp8_e4m3'
    """
    names = ("quantization_config", "compression_config")
    section = root.section(*names) or text.section(*names)
    if section is None:
        return "auto"
    scheme = section.get("kv_cache_scheme")
    # ModelOpt writes a word, at the top or one level down; others write a small object.
    inner = section.get("quantization")
    word = section.get("kv_cache_quant_algo")
    if word is None and isinstance(inner, dict):
        word = inner.get("kv_cache_quant_algo")
    if isinstance(scheme, dict) and scheme.get("type") == "float":
        bits = scheme.get("num_bits")
        if bits in (8, 4):
            return "fp8_e4m3" if bits == 8 else "nvfp4"
    algorithm = word or scheme
    if algorithm is None:
        return "auto"
    dtype = _ALGORITHMS.get(algorithm.lower()) if isinstance(algorithm, str) else None
    if dtype is None:
        warnings.append(f"the checkpoint's cache scheme {algorithm!r} is not known: auto assumed")
    return dtype or "auto"


def check_cache(kv_dtype: object) -> str:
    """`kv_dtype` where some layer could be cached so, with its usual spelling."""
    known = (*ATTENTION_CACHES, *LATENT_CACHES)
    if kv_dtype in known:
        return str(kv_dtype)
    try:
        name = DType.of(kv_dtype).name
    except AtlasError:
        name = ""
    if name not in _ELEMENTS:
        raise AtlasError(
            Code.UNKNOWN_DTYPE,
            "No layer can be kept in this cache dtype",
            got=repr(kv_dtype),
            hint=f"Use one of {', '.join(dict.fromkeys((*known, *_ELEMENTS)))}",
        )
    return name


def cached(spec: S, cache: str, *, sparse: bool = False) -> S:
    """`spec` kept in `cache`; what is not attention, or fixed by its kernel, stays.

    `sparse` is latent attention that an indexer chooses from: its kernels read fp8
    in a format of their own, and DeepSeek-V4's read nothing else.
    """
    if isinstance(spec, Attention):
        # The spec knows which packing its cache dtype wants.
        packing: dict[str, Any] = {"packing": None, "scales": None}
    elif isinstance(spec, LatentAttention):
        packing = {}
        newer = spec.version != "v3"
        if (newer and cache == "auto") or ((newer or sparse) and cache in ("fp8", "fp8_e4m3")):
            cache = "fp8_ds_mla"
    else:
        return spec
    if cache in _ELEMENTS:
        return replace(spec, cache="auto", dtype=cache, **packing)
    return replace(spec, cache=cache, **packing)
