"""Cache dtypes: read the cache dtype that a checkpoint requests, and apply it to specs.

The dtype of the cache is independent of the dtype of the weights: a checkpoint with
4-bit weights usually has a bf16 cache. This module reads only the cache settings in the
config's quantisation section.
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
    """Return the cache dtype that a checkpoint requests, or `auto` if it requests none.

    If the requested dtype is unknown, the result is `auto`, and `warnings` receives a message.

    >>> scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    >>> checkpoint_cache(Config({"quantization_config": scheme}), Config({}), [])
    'fp8_e4m3'
    """
    names = ("quantization_config", "compression_config")
    section = root.section(*names) or text.section(*names)
    if section is None:
        return "auto"
    scheme = section.get("kv_cache_scheme")
    # ModelOpt writes a string, at the top level or one level down; other tools write an object.
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
        warnings.append(f"unknown cache scheme {algorithm!r} in the checkpoint: using auto")
    return dtype or "auto"


def check_cache(kv_dtype: object) -> str:
    """Return the canonical name of cache dtype `kv_dtype`; raise an error if it is unknown."""
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
            "There is no such cache dtype",
            got=repr(kv_dtype),
            hint=f"Use one of {', '.join(dict.fromkeys((*known, *_ELEMENTS)))}",
        )
    return name


def cached(spec: S, cache: str, *, sparse: bool = False) -> S:
    """Return `spec` with its cache dtype set to `cache`.

    Specs other than attention are returned unchanged. If `sparse` is true, fp8 latent
    attention becomes `fp8_ds_mla`, the fp8 format of sparse attention, where an indexer selects
    the states to read.
    DeepSeek-V4 uses `fp8_ds_mla` for `auto` too, because its kernels do not support the
    model's dtype.
    """
    if isinstance(spec, Attention):
        # None makes the spec choose the packing that the new cache dtype requires.
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
