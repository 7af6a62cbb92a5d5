"""Device code that reads rows of a cache through a block table and dequantises them.

A side of the cache (K or V) is described by a `SideRows`, the strides of its rows, scales and zero
points, and by its `StorageFormat`. The format's kind determines the result of `read`:

| kind | content of a tile | remaining factor for each state |
|---|---|---|
| `plain` | the elements | |
| `scaled` | the elements | the scale |
| `int4` | codes minus their zero point | the scale |
| `nvfp4` | numbers times 2**-14 | |
| `levels` | levels of a normal variable | the row's norm divided by the norm of its levels |
| `range` | numbers | |
| `records` | the elements times the scale of their block | |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels

_LEVELS_OF_8 = tl.constexpr(normal_levels(3))
_LEVELS_OF_16 = tl.constexpr(normal_levels(4))


E2M1_UNIT = tl.constexpr(16384.0)
"""Factor by which e2m1 numbers are too small if their bits are interpreted as float16."""


RECORD_BLOCK = tl.constexpr(128)
"""Elements of a DeepSeek-V3.2 record that share a scale."""


class TileStates(NamedTuple):
    """The states (cached tokens) of a tile: where each is stored, and whether it exists.

    A state is stored at an index in a block. All states of a tile are read for the same head.
    """

    page: Any
    start: Any
    """Offset added to every index in `state`."""
    state: Any
    head: Any
    there: Any


@triton.jit
def row_offsets(steps, states, UNIT: tl.constexpr):
    """For each state (cached token), return the offset of its row in the pool, in elements.

    Strides of blocks and states fit in 32 bits, so each product is one instruction. Terms that are
    constant across tiles are added separately.
    """
    first = (steps.first + states.head.to(tl.int64) * steps.head) * UNIT
    within = states.state.to(tl.int64) * (steps.state * UNIT) + first
    start = tl.cast(states.start, tl.int64) * (steps.state * UNIT)
    return (states.page.to(tl.int64) * (steps.block * UNIT) + start) + within


@triton.jit
def column_offsets(column, steps, TILED: tl.constexpr):
    """Return the offsets of columns from the first element of their row, in elements."""
    if TILED:
        return (column % TILED) * steps.element + (column // TILED) * steps.tile
    return column * steps.element


FOUR_BYTES = tl.constexpr("""
    {
        .reg .b32 biased, excess;
        mov.b32 excess, 0x64806480;
        xor.b32 biased, $2, 0x80808080;
        prmt.b32 $0, biased, 0x64646464, 0x4140;
        prmt.b32 $1, biased, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, excess;
        sub.f16x2 $1, $1, excess;
    }
""")
"""Four int8 as float16. 0x6400 is 1024, and its lowest mantissa bit is worth 1. Inserting a byte
there with its sign bit flipped yields 1024 + 128 + the number."""


FOUR_BYTES_BF16 = tl.constexpr("""
    {
        .reg .b32 a, b, low, high, minus;
        mov.b32 minus, 0xBF80BF80;
        prmt.b32 a, $2, 0x43434343, 0x4140;
        prmt.b32 b, $2, 0x43434343, 0x4342;
        and.b32 low, a, 0x437F437F;
        and.b32 high, a, 0x43804380;
        fma.rn.bf16x2 $0, high, minus, low;
        and.b32 low, b, 0x437F437F;
        and.b32 high, b, 0x43804380;
        fma.rn.bf16x2 $1, high, minus, low;
    }
""")
"""Four int8 as bfloat16. The lower seven bits are added to 128 (0x4300). The sign bit selects the
number to subtract: 256 if it is set, else 128. Ampere has no bfloat16 subtraction, so a fused
multiply-add with -1 (0xBF80) subtracts."""


def _codes_of_bytes(one: int, minus: int, kind: str) -> str:
    """Return PTX that converts the codes of four bytes, low nibbles first.

    Operands $5 and $6 are subtracted from the codes. `kind` is the PTX type of the results: "f16x2"
    or "bf16x2". `one` is the upper byte of a 16-bit float whose lowest mantissa bit is worth 1.
    `minus` contains the bits of -1.
    """
    ones = f"0x{one * 0x01010101:08X}"
    return f"""
    {{
        .reg .b32 low, high, a, b, c, d, minus;
        mov.b32 minus, 0x{minus * 0x00010001:08X};
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        prmt.b32 a, low, {ones}, 0x4140;
        prmt.b32 b, low, {ones}, 0x4342;
        prmt.b32 c, high, {ones}, 0x4140;
        prmt.b32 d, high, {ones}, 0x4342;
        fma.rn.{kind} a, $5, minus, a;
        fma.rn.{kind} b, $6, minus, b;
        fma.rn.{kind} c, $5, minus, c;
        fma.rn.{kind} d, $6, minus, d;
        mov.b32 $0, a;
        mov.b32 $1, b;
        mov.b32 $2, c;
        mov.b32 $3, d;
    }}
    """


_CODES_F16 = tl.constexpr(_codes_of_bytes(0x64, 0xBC00, "f16x2"))
"""The PTX for float16. A code is read as 1024 + code, so the operands must include 1024."""
_CODES_BF16 = tl.constexpr(_codes_of_bytes(0x43, 0xBF80, "bf16x2"))
"""The PTX for bfloat16. A code is read as 128 + code, so the operands must include 128."""
_NVFP4_BYTES = tl.constexpr("""
    {
        .reg .b32 low, high, part, a, b, c, d;
        shl.b32 part, $4, 1;
        and.b32 part, part, 0x0E0E0E0E;
        shl.b32 low, $4, 4;
        lop3.b32 low, low, 0x80808080, part, 0xEA;
        shr.u32 part, $4, 3;
        and.b32 part, part, 0x0E0E0E0E;
        lop3.b32 high, $4, 0x80808080, part, 0xEA;
        prmt.b32 a, low, 0, 0x1404;
        prmt.b32 b, low, 0, 0x3424;
        prmt.b32 c, high, 0, 0x1404;
        prmt.b32 d, high, 0, 0x3424;
        mul.f16x2 a, a, $5;
        mul.f16x2 b, b, $6;
        mul.f16x2 c, c, $5;
        mul.f16x2 d, d, $6;
        mov.b32 $0, a;
        mov.b32 $1, b;
        mov.b32 $2, c;
        mov.b32 $3, d;
    }
""")
"""Converts the e2m1 codes of four bytes, low nibbles first, times operands $5 and $6. The sign and
the other three bits of a code form the upper byte of a float16 that is 2**14 times too small."""


@triton.jit
def paired(packed, with_each, CODE: tl.constexpr):
    """Convert both codes of each byte by the PTX `CODE`, whose second operand is `with_each`.

    The two results are in adjacent columns.
    """
    low, high = tl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,r,r,r", [packed, with_each], dtype=(with_each.dtype, with_each.dtype),
        is_pure=True, pack=4,
    )  # fmt: skip
    return tl.reshape(tl.join(low, high), [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def as_dot(tile, DOT: tl.constexpr, PTX: tl.constexpr):
    """Convert elements to the dtype of a dot product."""
    if PTX and tile.dtype == tl.int8 and DOT == tl.bfloat16:
        return tl.inline_asm_elementwise(
            FOUR_BYTES_BF16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    if PTX and tile.dtype == tl.int8 and DOT == tl.float16:
        return tl.inline_asm_elementwise(
            FOUR_BYTES, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4
        )
    return tile.to(DOT)


@triton.jit
def by_shared_memory(tile):
    """Return the same tile, but force the compiler to pass it through shared memory.

    Otherwise 8-bit elements of V would be gathered byte by byte across states. This way they are
    converted in the layout of the load, written to shared memory, and read back as matrices.
    """
    pairs = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2])
    even, odd = tl.split(pairs)
    return tl.reshape(tl.join(even, odd), [tile.shape[0], tile.shape[1]])


@triton.jit
def elements(
    buffer, steps, states, ELEMENT: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr, TILED: tl.constexpr = 0,
):  # fmt: skip
    """Load rows of `COUNT` elements as a tile of `WIDTH` columns."""
    column = tl.arange(0, WIDTH)
    rows = row_offsets(steps, states, UNIT)
    columns = column_offsets(column, steps, TILED)
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + rows[:, None] + columns[None, :]
    if MASKED:
        mask = states.there[:, None]
        if COUNT != WIDTH:
            mask = mask & (column < COUNT)[None, :]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    if COUNT != WIDTH:
        mask = (column < COUNT)[None, :] & (rows >= 0)[:, None]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def column_of(
    buffer, steps, states, ELEMENT: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr
):
    """Load one element per state (cached token): a scale, a norm or a zero point."""
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + row_offsets(steps, states, UNIT)
    if MASKED:
        return tl.load(pointers, mask=states.there, other=0)
    return tl.load(pointers)


@triton.jit
def code_bytes(
    buffer, steps, states, FORMAT: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr
):
    """Load rows of 4-bit codes, two per byte."""
    HALF: tl.constexpr = FORMAT.width // 2
    return elements(
        buffer, steps, states, tl.uint8, FORMAT.unit, FORMAT.dim // 2, HALF, MASKED, EVICT
    )


@triton.jit
def nibbles(packed):
    """Unpack 4-bit codes; the first code of a byte is in its low nibble."""
    both = tl.join(packed & 15, packed >> 4)
    return tl.reshape(both, [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def octals(buffer, steps, states, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of 3-bit codes. A code is stored in one byte or across two."""
    LAST: tl.constexpr = (3 * FORMAT.dim + 7) // 8 - 1
    bit = tl.arange(0, FORMAT.width) * 3
    byte = tl.minimum(bit // 8, LAST)
    rows = row_offsets(steps, states, FORMAT.unit)[:, None]
    mask = (states.there[:, None] | (not MASKED)) & (bit < 3 * FORMAT.dim)[None, :]
    low = tl.load(buffer + rows + (byte * steps.element)[None, :], mask=mask, other=0)
    after = tl.minimum(byte + 1, LAST)
    high = tl.load(buffer + rows + (after * steps.element)[None, :], mask=mask, other=0)
    word = low.to(tl.int32) | (high.to(tl.int32) << 8)
    return (word >> (bit % 8)[None, :]) & 7


@triton.jit
def from_e2m1(codes):
    """Convert e2m1 codes to numbers, through the bits of float16."""
    code = codes.to(tl.int16)
    half = ((code & 8) << 12) | ((code & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * E2M1_UNIT


@triton.jit
def level_of(codes, BITS: tl.constexpr):
    """Convert turboquant codes to levels, the numbers they represent, with a table in registers."""
    place = tl.arange(0, 1 << BITS)
    table = place * 0.0
    for i in tl.static_range(1 << BITS):
        table = tl.where(place == i, _LEVELS_OF_8[i] if BITS == 3 else _LEVELS_OF_16[i], table)
    flat = tl.reshape(codes.to(tl.int32), [codes.shape[0] * codes.shape[1]])
    return tl.reshape(tl.gather(table, flat, 0), [codes.shape[0], codes.shape[1]])


@triton.jit
def read(
    buffer, side, states, FORMAT: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Load a tile of rows; return (rows converted to `DOT`, one factor per row).

    The caller must multiply by the factor, which is 1 for formats without one (see the table of the
    module).
    """
    KIND: tl.constexpr = FORMAT.kind
    DIM: tl.constexpr = FORMAT.dim
    WIDTH: tl.constexpr = FORMAT.width
    factor = 1.0
    if KIND == "plain" or KIND == "scaled":
        stored = elements(
            buffer, side.rows, states, FORMAT.element, FORMAT.unit, DIM, WIDTH, MASKED, EVICT,
            FORMAT.tile,
        )  # fmt: skip
        tile = as_dot(stored, DOT, FORMAT.ptx)
        if KIND == "scaled":
            factor = column_of(buffer, side.scales, states, tl.float32, FORMAT.scale_unit, MASKED)
    elif KIND == "records":
        stored = elements(
            buffer, side.rows, states, FORMAT.element, FORMAT.unit, DIM, WIDTH, MASKED, EVICT
        )
        steps = elements(
            buffer, side.scales, states, tl.float32, FORMAT.scale_unit, DIM // RECORD_BLOCK,
            WIDTH // RECORD_BLOCK, MASKED, EVICT,
        )  # fmt: skip
        wide = tl.broadcast_to(
            steps[:, :, None], [steps.shape[0], WIDTH // RECORD_BLOCK, RECORD_BLOCK]
        )
        tile = (stored.to(tl.float32) * tl.reshape(wide, [steps.shape[0], WIDTH])).to(DOT)
    elif KIND == "int4":
        packed = code_bytes(buffer, side.rows, states, FORMAT, MASKED, EVICT)
        word = column_of(buffer, side.scales, states, tl.int32, FORMAT.scale_unit, MASKED)
        zero = (word & 15)[:, None]
        factor = (word & -16).to(tl.float32, bitcast=True)
        if FORMAT.ptx and DOT == tl.float16:
            tile = paired(packed, (zero + 1024).to(DOT), _CODES_F16)
        elif FORMAT.ptx and DOT == tl.bfloat16:
            tile = paired(packed, (zero + 128).to(DOT), _CODES_BF16)
        else:
            tile = (nibbles(packed).to(tl.int32) - zero).to(tl.float32).to(DOT)
    elif KIND == "nvfp4":
        packed = code_bytes(buffer, side.rows, states, FORMAT, MASKED, EVICT)
        steps = elements(
            buffer, side.scales, states, tl.float8e4nv, FORMAT.scale_unit, DIM // 16, WIDTH // 16,
            MASKED, EVICT,
        )  # fmt: skip
        if FORMAT.ptx and DOT == tl.float16:
            wide = tl.broadcast_to(steps.to(DOT)[:, :, None], [steps.shape[0], WIDTH // 16, 8])
            tile = paired(packed, tl.reshape(wide, packed.shape), _NVFP4_BYTES)
        else:
            wide = tl.broadcast_to(
                steps.to(tl.float32)[:, :, None], [steps.shape[0], WIDTH // 16, 16]
            )
            small = from_e2m1(nibbles(packed)) / E2M1_UNIT
            tile = (small * tl.reshape(wide, [steps.shape[0], WIDTH])).to(DOT)
    else:
        if FORMAT.bits == 4:
            codes = nibbles(code_bytes(buffer, side.rows, states, FORMAT, MASKED, EVICT))
        else:
            codes = octals(buffer, side.rows, states, FORMAT, MASKED)
        step = column_of(buffer, side.scales, states, tl.float16, FORMAT.scale_unit, MASKED)
        step = step.to(tl.float32)
        if KIND == "levels":
            exact = level_of(codes, FORMAT.bits)
            if DIM != WIDTH:
                # Code 0 is a valid level, so columns past the end of the row need a mask.
                exact = tl.where((tl.arange(0, WIDTH) < DIM)[None, :], exact, 0.0)
            tile = exact.to(DOT)
            factor = step / tl.sqrt(tl.sum(exact * exact, 1))
        else:
            zero = column_of(buffer, side.zeros, states, tl.float16, FORMAT.zero_unit, MASKED)
            tile = (codes.to(tl.float32) * step[:, None] + zero.to(tl.float32)[:, None]).to(DOT)
    return tile, factor
