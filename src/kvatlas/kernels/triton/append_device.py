"""Device code that stores new tokens of sequences, and gathers all that their attention sees."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import TileStates, column_offsets, row_offsets


@triton.jit
def append_side(buffer, side, states, token, start, out_rows, FORMAT: tl.constexpr):
    """Rows of one side for a tile of tokens of one sequence and head: stored ones, then new ones.

    Tokens that are not there any more, or that nobody sees, become zeros.
    """
    DIM: tl.constexpr = FORMAT.dim
    column = tl.arange(0, FORMAT.width)[None, :]
    inside = column < DIM
    offsets = row_offsets(side.at, states, FORMAT.unit)[:, None]
    pages = buffer.to(tl.pointer_type(FORMAT.element)) + offsets
    pages += column_offsets(column, side.at, FORMAT.tile)
    new = token >= start
    old = (states.there & ~new)[:, None] & inside
    rows = tl.load(pages, mask=old, other=0.0)
    if tl.max(token) >= start:
        fresh = new[:, None] & inside
        sequence = tl.program_id(1).to(tl.int64) * side.rows.sequence
        at = sequence + states.head.to(tl.int64) * side.rows.head
        at += (token - start).to(tl.int64) * side.rows.token
        given = tl.load(side.rows.tensor + at[:, None] + column, mask=fresh, other=0.0)
        tl.store(pages, given, mask=fresh & states.there[:, None])
        rows = tl.where(fresh, given, rows)
    out = side.out + out_rows.to(tl.int64)[:, None] * DIM + column
    tl.store(out, rows, mask=(token >= 0)[:, None] & inside)


@triton.jit(do_not_specialize=["first", "start", "stop", "visible", "room"])
def append_rows(
    k, v, tables, first, start, stop, visible, room, buffer, K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """A program takes a tile of tokens from `first` on, of one sequence and head.

    Tokens from `start` to `stop` are new. Rows of a head are `room` tokens apart from the next's.
    """
    after_previous(SHAPE.early)
    before_next(SHAPE.early)
    HEADS: tl.constexpr = SHAPE.heads
    STATES: tl.constexpr = SHAPE.states
    TOKENS: tl.constexpr = SHAPE.tokens
    head = tl.program_id(0) % HEADS
    place = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)
    token = first + place
    ids = tables.tensor + tl.program_id(1).to(tl.int64) * tables.sequence
    page = tl.load(ids + token // STATES, mask=(token >= visible) & (token < stop), other=-1)
    states = TileStates(page.to(tl.int32), 0, token % STATES, head, page >= 0)
    rows = (tl.program_id(1) * HEADS + head).to(tl.int64) * room + place
    # What is past the end is no token: -1 is nobody's number.
    token = tl.where(token < stop, token, -1)
    append_side(buffer, k, states, token, start, rows, K_FORMAT)
    append_side(buffer, v, states, token, start, rows, V_FORMAT)
