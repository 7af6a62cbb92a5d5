"""Weight formats: the bits of an element and of its scales.

`Format` is one format. `NAMED_FORMATS` lists the formats that users can select by name, for
checkpoints whose config does not describe their weights.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.models.weights.tensor import Tensor


class Format(NamedTuple):
    """A weight format: bits per element, shape of the blocks that share a scale, bits per scale.

    >>> FP8_BLOCKS.bytes_of(Tensor("mlp", "mlp.up_proj", 256, 256))
    65552
    """

    label: str
    bits: int
    block: tuple[int, int] = (0, 0)
    """Rows and columns of the elements that share a scale; 0 means all rows or columns."""
    scale_bits: int = 0

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor, including its scales."""
        elements = tensor.rows * tensor.columns
        rows, columns = self.block[0] or tensor.rows, self.block[1] or tensor.columns
        scales = -(-tensor.rows // rows) * -(-tensor.columns // columns)
        bits = elements * self.bits + scales * self.scale_bits
        return -(-tensor.copies * bits // 8)


def plain(dtype: str) -> Format:
    """Return the format of an unquantised dtype.

    >>> plain("bf16").bits
    16
    """
    return Format(dtype, DType.of(dtype).bits)


def rows_of(name: str, bits: int) -> Format:
    """Return a format with one 32-bit scale per row."""
    return Format(f"{name}, one scale per row", bits, (1, 0), 32)


def groups_of(size: int, name: str, bits: int, scale_bits: int) -> Format:
    """Return a format in which `size` elements of a row share a scale; 0 means the whole row."""
    return Format(f"{name}, groups of {size or 'a row'}", bits, (1, size), scale_bits)


def blocks_of(rows: int, columns: int, name: str = "fp8", bits: int = 8) -> Format:
    """Return a format in which blocks of `rows` x `columns` elements share a 32-bit scale."""
    return Format(f"{name}, blocks of {rows} x {columns}", bits, (rows, columns), 32)


FP8 = Format("fp8", 8, (0, 0), 64)  # the scales of the weight and of its input
FP8_BLOCKS = blocks_of(128, 128)
NVFP4 = groups_of(16, "nvfp4", 4, 8)
MXFP4 = groups_of(32, "mxfp4", 4, 8)
MXFP8 = groups_of(32, "mxfp8", 8, 8)
NF4 = Format("nf4", 4, (1, 64), 8)
INT8 = rows_of("int8", 8)
INT4 = groups_of(128, "int4", 4, 16)

GGUF_BLOCKS = {
    # Each block of llama.cpp has its scales, and for some types minima, next to its elements.
    name: groups_of(size, name, bits, 8 * nbytes - size * bits)
    for name, bits, size, nbytes in (
        ("q4_0", 4, 32, 18), ("q4_1", 4, 32, 20), ("q5_0", 5, 32, 22), ("q5_1", 5, 32, 24),
        ("q8_0", 8, 32, 34), ("q2_k", 2, 256, 84), ("q3_k", 3, 256, 110), ("q4_k", 4, 256, 144),
        ("q5_k", 5, 256, 176), ("q6_k", 6, 256, 210), ("iq4_xs", 4, 256, 136),
        ("iq4_nl", 4, 32, 18),
    )
}  # fmt: skip
"""The block types of GGUF files: a block of `size` elements takes `nbytes` bytes."""

UNQUANTISED = ("bf16", "fp16", "fp32")

NAMED_FORMATS: dict[str, Format] = {
    **{name: plain(name) for name in UNQUANTISED},
    "fp8": FP8, "fp8_block": FP8_BLOCKS, "nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8,
    "int8": INT8, "int4": INT4, "nf4": NF4, **GGUF_BLOCKS,
}  # fmt: skip
"""The formats that `Weights.load(..., dtype=...)` and `--weights-dtype` accept."""

_SPELLINGS = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float8": "fp8", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "fp8_blocks": "fp8_block",
    "fp4": "nvfp4", "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8",
    "w8a16": "int8", "bnb_4bit": "nf4",
}  # fmt: skip


def named_format(name: str) -> Format:
    """Return a format by its name; mixed GGUF types such as q4_k_m count as their main type.

    >>> named_format("NVFP4").label, named_format("Q4_K_M").label
    ('nvfp4, groups of 16', 'q4_k, groups of 256')
    """
    key = name.strip().lower().replace("-", "_") if isinstance(name, str) else ""
    key = _SPELLINGS.get(key, key)
    format_ = NAMED_FORMATS.get(key) or NAMED_FORMATS.get(re.sub(r"_[sml]$", "", key))
    if format_ is None:
        hint = f"Use one of {', '.join(NAMED_FORMATS)}"
        problem = "The format of the weights is unknown"
        raise AtlasError(Code.UNKNOWN_DTYPE, problem, got=repr(name), hint=hint)
    return format_


_IN_NAMES = (
    r"(?i)(?<![a-z0-9])(fp8|nvfp4|fp4|mxfp4|mxfp8|int8|int4|nf4|awq|gptq|w4a16|w8a8|w8a16|bnb-4bit"
    r"|i?q[2-8]_(?:k|[01]|xs|nl)(?:_[sml])?)(?![a-z0-9])"
)


def format_in_name(name: str) -> str:
    """Return the format that a checkpoint's name contains; empty if it contains none.

    >>> format_in_name("nvidia/Llama-3.1-70B-Instruct-FP8"), format_in_name("Qwen3-8B")
    ('fp8', '')
    """
    found = re.findall(_IN_NAMES, name)
    return found[-1].lower() if found else ""
