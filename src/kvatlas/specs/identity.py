"""The parts of a spec that must be equal before one engine can read another's cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from kvatlas.specs.base import Spec
from kvatlas.specs.latent import Ring

_PACKING = ("packing", "scales", "align", "conv_order")
"""Parameters that determine where bytes are in a page; routes translate between them."""

_DTYPES = ("dtype", "cache", "conv_dtype", "ssm_dtype", "shift_dtype")
"""Parameters that determine the encoding of values."""


@lru_cache(maxsize=4096)
def without_packing(spec: Spec) -> Spec:
    """Return the spec with default packing and the canonical name of its cache dtype.

    A ring gets the smallest size, because routes copy between rings of different sizes.

    >>> from kvatlas.specs import FullAttention
    >>> one, two = (FullAttention(heads=8, head_dim=64, cache=c) for c in ("fp8", "fp8_e4m3"))
    >>> without_packing(one) == without_packing(two)
    True
    >>> planes = FullAttention(heads=8, head_dim=64, packing="planes")
    >>> without_packing(planes) == FullAttention(heads=8, head_dim=64)
    True
    """
    bare = _with_defaults(spec, _PACKING)
    if isinstance(bare, Ring):
        bare = msgspec.structs.replace(bare, rows=bare.group, fills_page=False)
    if getattr(bare, "cache", None) == "fp8_e4m3":
        return msgspec.structs.replace(bare, cache="fp8")
    return bare


@lru_cache(maxsize=4096)
def without_dtypes(spec: Spec) -> Spec:
    """Return the spec with default packing and dtypes, so that only the model's sizes remain.

    >>> from kvatlas.specs import FullAttention
    >>> fp8 = FullAttention(heads=8, head_dim=64, cache="fp8")
    >>> without_dtypes(fp8) == FullAttention(heads=8, head_dim=64)
    True
    """
    return _with_defaults(without_packing(spec), _DTYPES)


def _with_defaults(spec: Spec, names: tuple[str, ...]) -> Spec:
    defaults: dict[str, Any] = {
        field.name: field.default
        for field in msgspec.structs.fields(type(spec))
        if field.name in names and field.default is not msgspec.NODEFAULT
    }
    return msgspec.structs.replace(spec, **defaults)
