"""Device code that reads rows of a cache through a block table, dequantising on the way.

A side of the cache is described by where its rows, scales and zero points lie (`at`,
tuples of a first row, the steps of B, N and H in units, and those of C and of tiles of C
in elements) and by its form: (kind, element, unit, unit of the scales, unit of the zeros,
bits, whether it may be converted by machine instructions, elements of a tile).

| kind | what a tile is | what is left to multiply by, for each state |
|---|---|---|
| `plain` | the elements | |
| `scaled` | the elements | the scale |
| `int4` | codes less their zero point | the scale |
| `nvfp4` | numbers | |
| `levels` | levels of a normal variable | the norm over theirs |
| `range` | numbers | |
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels

_LEVELS_OF_8 = tl.constexpr(normal_levels(3))
_LEVELS_OF_16 = tl.constexpr(normal_levels(4))


@triton.jit
def row_offsets(at, page, state, head, UNIT: tl.constexpr):
    """Elements from the pool's start to the first one of each state's row.

    Steps of blocks and states fit 32 bits, so that each product is one instruction.
    """
    first = (at[0] + head.to(tl.int64) * at[3]) * UNIT
    within = state.to(tl.int64) * (at[2] * UNIT) + first
    return page.to(tl.int64) * (at[1] * UNIT) + within


@triton.jit
def column_offsets(column, at, TILED: tl.constexpr):
    """Elements from the first one of a row to its columns."""
    if TILED:
        return (column % TILED) * at[4] + (column // TILED) * at[5]
    return column * at[4]


_FOUR_BYTES = tl.constexpr("""
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
"""Four int8 as halves. 0x6400 is 1024 and its lowest bits count ones, so that a byte put
there with its sign turned is 1024 + 128 + the number."""


@triton.jit
def as_dot(tile, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Elements in the type of a dot."""
    if ASSEMBLY and tile.dtype == tl.int8 and DOT == tl.float16:
        return tl.inline_asm_elementwise(
            _FOUR_BYTES, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4
        )
    return tile.to(DOT)


@triton.jit
def by_shared_memory(tile):
    """The same tile, that the compiler will not load element by element as a dot wants it.

    Eight-bit elements of V would be gathered byte by byte, across states; converted where
    they were loaded and then written to shared memory they are read back in whole matrices.
    """
    pairs = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2])
    even, odd = tl.split(pairs)
    return tl.reshape(tl.join(even, odd), [tile.shape[0], tile.shape[1]])


@triton.jit
def elements(
    buffer, at, page, state, head, there, KIND: tl.constexpr, UNIT: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr,
    TILED: tl.constexpr = 0,
):  # fmt: skip
    """Rows of `COUNT` elements of type `KIND` as a tile of `WIDTH` columns."""
    column = tl.arange(0, WIDTH)
    rows = row_offsets(at, page, state, head, UNIT)
    columns = column_offsets(column, at, TILED)
    pointers = buffer.to(tl.pointer_type(KIND)) + rows[:, None] + columns[None, :]
    if MASKED:
        mask = there[:, None]
        if COUNT != WIDTH:
            mask = mask & (column < COUNT)[None, :]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    if COUNT != WIDTH:
        mask = (column < COUNT)[None, :] & (rows >= 0)[:, None]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def column_of(
    buffer, at, page, state, head, there, KIND: tl.constexpr, UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One element for each state: a scale, a norm or a zero point."""
    pointers = buffer.to(tl.pointer_type(KIND)) + row_offsets(at, page, state, head, UNIT)
    if MASKED:
        return tl.load(pointers, mask=there, other=0)
    return tl.load(pointers)


@triton.jit
def nibbles(
    buffer, at, page, state, head, there, UNIT: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits, the first one of a byte in its low half."""
    HALF: tl.constexpr = DIM // 2
    packed = elements(
        buffer, at, page, state, head, there, tl.uint8, UNIT, HALF, WIDTH // 2, MASKED, EVICT
    )
    both = tl.join(packed & 15, packed >> 4)
    return tl.reshape(both, [packed.shape[0], WIDTH])


@triton.jit
def octals(
    buffer, at, page, state, head, there, UNIT: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Codes of 3 bits: each lies in one byte or across two."""
    LAST: tl.constexpr = (3 * DIM + 7) // 8 - 1
    bit = tl.arange(0, WIDTH) * 3
    byte = tl.minimum(bit // 8, LAST)
    rows = row_offsets(at, page, state, head, UNIT)[:, None]
    mask = (there[:, None] | (not MASKED)) & (bit < 3 * DIM)[None, :]
    low = tl.load(buffer + rows + (byte * at[4])[None, :], mask=mask, other=0)
    after = tl.minimum(byte + 1, LAST)
    high = tl.load(buffer + rows + (after * at[4])[None, :], mask=mask, other=0)
    word = low.to(tl.int32) | (high.to(tl.int32) << 8)
    return (word >> (bit % 8)[None, :]) & 7


@triton.jit
def from_e2m1(codes):
    """The numbers that e2m1 codes stand for, by way of the bits of a half."""
    code = codes.to(tl.int16)
    half = ((code & 8) << 12) | ((code & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def level_of(codes, BITS: tl.constexpr):
    """The levels that codes stand for, out of a table on the chip."""
    place = tl.arange(0, 1 << BITS)
    table = place * 0.0
    for i in tl.static_range(1 << BITS):
        table = tl.where(place == i, _LEVELS_OF_8[i] if BITS == 3 else _LEVELS_OF_16[i], table)
    flat = tl.reshape(codes.to(tl.int32), [codes.shape[0] * codes.shape[1]])
    return tl.reshape(tl.gather(table, flat, 0), [codes.shape[0], codes.shape[1]])


@triton.jit
def read(
    buffer, at, scale_at, zero_at, page, state, head, there,
    FORM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
    MASKED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A tile of rows in the type of the dot, and a factor for each state (or 1)."""
    KIND: tl.constexpr = FORM[0]
    UNIT: tl.constexpr = FORM[2]
    factor = 1.0
    if KIND == "plain" or KIND == "scaled":
        stored = elements(
            buffer, at, page, state, head, there, FORM[1], UNIT, DIM, WIDTH, MASKED, EVICT, FORM[7]
        )
        tile = as_dot(stored, DOT, FORM[6])
        if KIND == "scaled":
            factor = column_of(
                buffer, scale_at, page, state, head, there, tl.float32, FORM[3], MASKED
            )
    elif KIND == "int4":
        codes = nibbles(buffer, at, page, state, head, there, UNIT, DIM, WIDTH, MASKED, EVICT)
        word = column_of(buffer, scale_at, page, state, head, there, tl.int32, FORM[3], MASKED)
        tile = (codes.to(tl.int32) - (word & 15)[:, None]).to(tl.float32).to(DOT)
        factor = (word & -16).to(tl.float32, bitcast=True)
    elif KIND == "nvfp4":
        codes = nibbles(buffer, at, page, state, head, there, UNIT, DIM, WIDTH, MASKED, EVICT)
        steps = elements(
            buffer, scale_at, page, state, head, there, tl.float8e4nv, FORM[3], DIM // 16,
            WIDTH // 16, MASKED, EVICT,
        ).to(tl.float32)  # fmt: skip
        wide = tl.broadcast_to(steps[:, :, None], [codes.shape[0], WIDTH // 16, 16])
        tile = (from_e2m1(codes) * tl.reshape(wide, [codes.shape[0], WIDTH])).to(DOT)
    else:
        if FORM[5] == 4:
            codes = nibbles(buffer, at, page, state, head, there, UNIT, DIM, WIDTH, MASKED, EVICT)
        else:
            codes = octals(buffer, at, page, state, head, there, UNIT, DIM, WIDTH, MASKED)
        step = column_of(
            buffer, scale_at, page, state, head, there, tl.float16, FORM[3], MASKED
        ).to(tl.float32)
        if KIND == "levels":
            exact = level_of(codes, FORM[5])
            if DIM != WIDTH:
                # Code 0 stands for a level, which is no part of a row that has ended.
                exact = tl.where((tl.arange(0, WIDTH) < DIM)[None, :], exact, 0.0)
            tile = exact.to(DOT)
            factor = step / tl.sqrt(tl.sum(exact * exact, 1))
        else:
            zero = column_of(
                buffer, zero_at, page, state, head, there, tl.float16, FORM[4], MASKED
            ).to(tl.float32)
            tile = (codes.to(tl.float32) * step[:, None] + zero[:, None]).to(DOT)
    return tile, factor
