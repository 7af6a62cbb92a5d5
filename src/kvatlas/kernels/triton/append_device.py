"""Device code that stores new tokens and gathers all tokens that attention sees."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import TileStates, column_offsets, row_offsets


@triton.jit
def append_side(buffer, steps, given, states, token, start, out, FORMAT: tl.constexpr):
    """Store and gather one side (K or V) for a tile of tokens of one sequence and head.

    `given` is (pointer to the new rows of this sequence and head, their token stride). `out`
    contains the output address of each row. Rows whose block is evicted or not visible are gathered
    as zeros.
    """
    column = tl.arange(0, FORMAT.width)[None, :]
    inside = column < FORMAT.dim
    pages = buffer.to(tl.pointer_type(FORMAT.element))
    pages += row_offsets(steps, states, FORMAT.unit)[:, None]
    pages += column_offsets(column, steps, FORMAT.tile)
    new = token >= start
    rows = tl.load(pages, mask=(states.there & ~new)[:, None] & inside, other=0.0)
    if tl.max(token) >= start:
        fresh = new[:, None] & inside
        at = given[0] + (token - start).to(tl.int64) * given[1]
        new_rows = tl.load(at[:, None] + column, mask=fresh, other=0.0)
        tl.store(pages, new_rows, mask=fresh & states.there[:, None])
        rows = tl.where(fresh & states.there[:, None], new_rows, rows)
    tl.store(out[:, None] + column, rows, mask=(token >= 0)[:, None] & inside)


@triton.jit(do_not_specialize=["first", "start", "stop", "visible"])
def append_rows(
    new, out, at, tables, first, start, stop, visible, buffer, K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Store the new tokens of a tile and gather all its tokens, for one sequence and head.

    The tokens with indices in `[first, stop)` are written to `out` [sequences, heads, tokens, D].
    The kernel reads rows in `[start, stop)` from `new`, and rows in `[first, start)` from the
    cache.
    """
    after_previous(SHAPE.early)
    before_next(SHAPE.early)
    HEADS: tl.constexpr = SHAPE.heads
    STATES: tl.constexpr = SHAPE.states
    TOKENS: tl.constexpr = SHAPE.tokens
    sequence = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    place = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)
    token = first + place
    seen = (token >= visible) & (token < stop)
    ids = tables[0] + sequence * tables[1]
    page = tl.load(ids + token // STATES, mask=seen, other=-1)
    states = TileStates(page.to(tl.int32), 0, token % STATES, head, page >= 0)
    # -1 marks lanes past the end, which are not tokens.
    token = tl.where(token < stop, token, -1)
    row = (sequence * HEADS + head) * (stop - first) + place
    k = new[0] + sequence * at.k_new.sequence + head * at.k_new.head
    v = new[1] + sequence * at.v_new.sequence + head * at.v_new.head
    k_out = out[0] + row * K_FORMAT.dim
    v_out = out[1] + row * V_FORMAT.dim
    append_side(buffer, at.k, (k, at.k_new.token), states, token, start, k_out, K_FORMAT)
    append_side(buffer, at.v, (v, at.v_new.token), states, token, start, v_out, V_FORMAT)
