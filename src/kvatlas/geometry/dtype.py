"""Bit-exact element types, independent of torch and numpy.

numpy has no bf16, torch has no int4, and neither supports 3-bit codes packed as a
bit stream. A cache needs three facts about a type: the bits of an element, the bytes
of a row of elements, and the number that a bit pattern represents. `DType` holds these
facts. Quantisers are tested against its `decode` and `encode`, so both are implemented
here and do not rely on another library.

A type is of one of four kinds: `float` (sign, exponent, mantissa), `int` (two's complement),
`uint` (a plain code or raw byte) and `exponent` (ue8m0: a power of two without sign or
mantissa).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from kvatlas.errors import AtlasError, Code

Kind = Literal["float", "int", "uint", "exponent"]
Specials = Literal["ieee", "nan_only", "none"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    >>> bf16 = DType.of("bfloat16")
    >>> bf16.bits, bf16.storage(128)
    (16, 256)
    >>> DType.of("nvfp4").storage(128), DType.of("uint3").storage(128)
    (64, 48)
    >>> DType.of("e4m3").decode(0x7E), DType.of("e4m3").encode(448.0)
    (448.0, 126)
    """

    name: str
    bits: int
    kind: Kind
    exponent_bits: int = 0
    mantissa_bits: int = 0
    specials: Specials = "none"
    block: int = 1
    """Number of elements that share one block scale; 1 without block scales."""
    scale: str | None = None
    """Name of the dtype of the block scale; None without block scales."""

    def __post_init__(self) -> None:
        hint = "Get a supported type with DType.of"
        if not (self.bits in (8, 16, 32) or 0 < self.bits < 8):
            problem, got = (
                "A dtype must have 1 to 8, 16 or 32 bits",
                f"{self.name} of {self.bits} bits",
            )
            raise AtlasError(Code.UNKNOWN_DTYPE, problem, got=got, hint=hint)
        parts = 1 + self.exponent_bits + self.mantissa_bits
        if self.kind == "float" and parts != self.bits:
            problem = "The sign, exponent and mantissa bits of a float must add up to its size"
            got = f"{self.name} with {parts} such bits, and a size of {self.bits} bits"
            raise AtlasError(Code.UNKNOWN_DTYPE, problem, got=got, hint=hint)

    @classmethod
    def of(cls, name: object) -> DType:
        """Return the type called `name`, as kvatlas, torch, numpy or model configs spell it.

        >>> DType.of("torch.float8_e4m3fn") is DType.of("fp8")
        True
        """
        if isinstance(name, DType):
            return name
        key = str(name).removeprefix("torch.").lower()
        dtype = _TYPES.get(_ALIASES.get(key, key))
        if dtype is None:
            hint = f"Use one of {', '.join(_TYPES)}"
            raise AtlasError(Code.UNKNOWN_DTYPE, got=repr(name), hint=hint)
        return dtype

    @property
    def item(self) -> int:
        """Bytes of one storage item: one element, or 1 byte if several elements share a byte."""
        return max(1, self.bits // 8)

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.bits < 8

    def storage(self, elements: int) -> int:
        """Return the bytes of a row of `elements` elements, rounded up to a whole byte."""
        return -(-elements * self.bits // 8)

    def scales(self, elements: int) -> int:
        """Return the number of block scales for a row of `elements` elements.

        The result is 0 if the type has no block scales.
        """
        return 0 if self.scale is None else -(-elements // self.block)

    def decode(self, code: int) -> float:
        """Return the number that the bit pattern `code` represents."""
        if not 0 <= code < 1 << self.bits:
            problem = f"A bit pattern of {self.name} must fit in {self.bits} bits"
            hint = f"Pass an integer from 0 to {(1 << self.bits) - 1}"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=code, hint=hint)
        match self.kind:
            case "uint":
                return float(code)
            case "int":
                return float(code - (1 << self.bits) if code >> (self.bits - 1) else code)
            case "exponent":
                return math.nan if code == 255 else math.ldexp(1.0, code - 127)
            case "float":
                return self._decode_float(code)

    def encode(self, value: float) -> int:
        """Return the code nearest to `value`, ties to even; values out of range saturate.

        >>> DType.of("e2m1").encode(2.5), DType.of("e2m1").decode(4)
        (4, 2.0)
        """
        if math.isnan(value):
            return self._nan()
        if self.kind == "int":
            top = (1 << (self.bits - 1)) - 1
            return int(min(max(round_half_even(value), -top - 1), top)) & ((1 << self.bits) - 1)
        if self.kind == "uint":
            return int(min(max(round_half_even(value), 0), (1 << self.bits) - 1))
        if self.kind == "exponent":
            return _nearest(self, max(value, 0.0), 254)
        magnitude = _nearest(self, abs(value), self._largest())
        negative = math.copysign(1.0, value) < 0
        return magnitude | (1 << (self.bits - 1) if negative else 0)

    def _decode_float(self, code: int) -> float:
        bias = (1 << (self.exponent_bits - 1)) - 1
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if exponent == (1 << self.exponent_bits) - 1:
            if self.specials == "ieee":
                return math.nan if mantissa else sign * math.inf
            if self.specials == "nan_only" and mantissa == (1 << self.mantissa_bits) - 1:
                return math.nan
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - bias - self.mantissa_bits)
        return sign * math.ldexp(
            mantissa + (1 << self.mantissa_bits), exponent - bias - self.mantissa_bits
        )

    def _largest(self) -> int:
        top = (1 << (self.bits - 1)) - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - 1 if self.specials == "nan_only" else top

    def _nan(self) -> int:
        if self.kind == "exponent":
            return 255
        if self.kind == "float" and self.specials != "none":
            return (1 << (self.bits - 1)) - 1
        raise AtlasError(
            Code.NOT_REPRESENTABLE,
            f"{self.name} cannot represent NaN",
            got="nan",
            hint="Remove NaNs before quantising",
        )

    def __str__(self) -> str:
        return self.name


def round_half_even(value: float) -> float:
    """Round like the built-in `round`, but return infinities unchanged."""
    return value if math.isinf(value) else float(round(value))


def _nearest(dtype: DType, value: float, high: int) -> int:
    """Return the code in 0..high whose value is nearest to `value`, ties to even.

    The search bisects, because non-negative values ascend with their codes.
    """
    first = max(bisect_right(range(high + 1), value, key=dtype.decode) - 1, 0)
    if first == high:
        return first
    below, above = dtype.decode(first), dtype.decode(first + 1)
    if value - below == above - value:
        return first + (first & 1)
    return first if value - below < above - value else first + 1


_TYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 32, "float", 8, 23, "ieee"),
        DType("bf16", 16, "float", 8, 7, "ieee"),
        DType("fp16", 16, "float", 5, 10, "ieee"),
        DType("e4m3", 8, "float", 4, 3, "nan_only"),
        DType("e5m2", 8, "float", 5, 2, "ieee"),
        DType("e2m1", 4, "float", 2, 1),
        DType("nvfp4", 4, "float", 2, 1, block=16, scale="e4m3"),
        DType("mxfp4", 4, "float", 2, 1, block=32, scale="ue8m0"),
        DType("ue8m0", 8, "exponent", 8),
        DType("int8", 8, "int"),
        DType("int4", 4, "int"),
        DType("uint8", 8, "uint"),
        DType("uint4", 4, "uint"),
        DType("uint3", 3, "uint"),
    )
}

_SPELLINGS = {
    "fp32": "float32 float f32",
    "bf16": "bfloat16",
    "fp16": "float16 half f16",
    "e4m3": "fp8 fp8_e4m3 float8_e4m3 float8_e4m3fn",
    "e5m2": "fp8_e5m2 float8_e5m2",
    "e2m1": "fp4 float4_e2m1fn",
    "ue8m0": "e8m0 float8_e8m0fnu",
}
_ALIASES = {alias: name for name, aliases in _SPELLINGS.items() for alias in aliases.split()}

ALL_DTYPES: tuple[DType, ...] = tuple(_TYPES.values())
