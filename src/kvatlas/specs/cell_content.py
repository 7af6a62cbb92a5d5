"""The content of an attention cell for each cache dtype: one K row and one V row.

A cache dtype is more than an element type: it also determines which scales are stored and
where. All byte sizes are derived from the parts defined here.

| cache dtype | one row of D elements |
|---|---|
| `auto` | D elements of the model's dtype |
| `fp8`, `fp8_e4m3`, `fp8_e5m2` | D fp8 elements; one scale for the tensor, stored elsewhere |
| `int8_per_token_head`, `fp8_per_token_head` | D bytes, one fp32 scale |
| `int4_per_token_head` | D/2 bytes, an fp32 scale with the zero point in its low bits |
| `nvfp4` | D/2 bytes, one e4m3 scale for each 16 elements |
| `turboquant_*` | K: 8-bit, or codes and a norm; V: codes, a scale and a zero point |
"""

from __future__ import annotations

from typing import NamedTuple

from kvatlas.geometry import DType, ElementRow
from kvatlas.specs.base import bad_spec

_TURBOQUANT = {
    "turboquant_k8v4": ("e4m3", "uint4"),
    "turboquant_4bit_nc": ("uint4", "uint4"),
    "turboquant_k3v4_nc": ("uint3", "uint4"),
    "turboquant_3bit_nc": ("uint3", "uint3"),
}

_PER_TENSOR = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}

_PER_TOKEN_HEAD = {
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "e4m3",
    "int4_per_token_head": "uint4",
}

ATTENTION_CACHES = ("auto", *_PER_TENSOR, *_PER_TOKEN_HEAD, "nvfp4", *_TURBOQUANT)
"""Cache dtypes for attention with separate K and V."""


class Sides(NamedTuple):
    """The parts of one K row and of one V row, such as elements and scales."""

    k: list[ElementRow]
    v: list[ElementRow]


def sides(cache: str, dtype: DType, k_dim: int, v_dim: int) -> Sides:
    """Return the parts of one K row and one V row in the cache dtype `cache`.

    >>> both = sides("int8_per_token_head", DType.of("bf16"), 128, 128)
    >>> [(part.name, str(part.dtype), part.nbytes) for part in (*both.k, *both.v)]
    [('k', 'int8', 128), ('k_scale', 'fp32', 4), ('v', 'int8', 128), ('v_scale', 'fp32', 4)]
    """
    if cache == "auto" or cache in _PER_TENSOR:
        element = DType.of(_PER_TENSOR[cache]) if cache in _PER_TENSOR else dtype
        return Sides([ElementRow("k", element, k_dim)], [ElementRow("v", element, v_dim)])
    if cache in _PER_TOKEN_HEAD:
        element, scale = DType.of(_PER_TOKEN_HEAD[cache]), DType.of("fp32")
        if element.packed and (k_dim % 2 or v_dim % 2):
            raise bad_spec(
                "4-bit rows must have an even number of elements",
                f"head_dim={k_dim}, v_dim={v_dim}",
                "Pass an even head_dim and v_dim, or cache='int8_per_token_head'",
            )
        return Sides(
            [ElementRow("k", element, k_dim), ElementRow("k_scale", scale, 1)],
            [ElementRow("v", element, v_dim), ElementRow("v_scale", scale, 1)],
        )
    if cache == "nvfp4":
        return Sides(_block_scaled("k", k_dim), _block_scaled("v", v_dim))
    if cache in _TURBOQUANT:
        key, value = (DType.of(name) for name in _TURBOQUANT[cache])
        half = DType.of("fp16")
        # Keys in 8 bits need no scale; codes need the norm that was divided out.
        norm = [] if key.bits == 8 else [ElementRow("k_scale", half, 1)]
        range_of_v = [ElementRow("v_scale", half, 1), ElementRow("v_zero", half, 1)]
        both = Sides(
            [ElementRow("k", key, k_dim), *norm], [ElementRow("v", value, v_dim), *range_of_v]
        )
        if sum(part.nbytes for part in (*both.k, *both.v)) % 2:
            both.v.append(ElementRow("pad", DType.of("uint8"), 1))
        return both
    raise bad_spec(
        "There is no such cache dtype for K and V",
        repr(cache),
        f"Use one of {', '.join(ATTENTION_CACHES)}",
    )


def _block_scaled(name: str, dim: int) -> list[ElementRow]:
    element = DType.of("nvfp4")
    if dim % element.block:
        raise bad_spec(
            f"nvfp4 needs a head size that is a multiple of {element.block}",
            f"a head size of {dim}",
            "Use a cache dtype such as cache='fp8'",
        )
    scales = ElementRow(f"{name}_scale", DType.of("e4m3"), element.scales(dim))
    return [ElementRow(name, element, dim), scales]
