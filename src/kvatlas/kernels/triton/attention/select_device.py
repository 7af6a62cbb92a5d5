"""Device code that finds the slots of the tokens that sparse attention selects for each query."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next

AT_ONCE = tl.constexpr(1024)
"""Indices that a program loads together."""


class TableRows(NamedTuple):
    """A tensor with one row per query or sequence, and the stride of its rows."""

    tensor: Any
    stride: Any


class SelectedSlots(NamedTuple):
    """The slots of the tokens that each query selects, and a schedule of queries as sequences."""

    slots: Any
    """[queries, most]: slots of the selected tokens."""
    counts: Any
    """The number of selected tokens of each query."""
    ends: Any
    """[2, queries + 1]: cumulative counts of queries and of decode tiles."""


@triton.jit
def sequence_of(token, counts, sequences, STARTS: tl.constexpr, SPAN: tl.constexpr):
    """Return (index of the query's sequence, end of the sequence's rows) for query `token`.

    The index is `sequences` if the query is in no sequence. `counts` contains query counts; if
    `STARTS` is set, it is the argument `starts` of `attend`.
    """
    before = 0
    sequence = 0
    end = 0x7FFFFFFF
    for begin in range(0, sequences, SPAN):
        at = begin + tl.arange(0, SPAN)
        there = at < sequences
        if STARTS:
            ends = tl.load(counts + at + 1, mask=there, other=0).to(tl.int32)
        else:
            count = tl.load(counts + at, mask=there, other=0).to(tl.int32)
            ends = before + tl.cumsum(count, 0)
            before += tl.sum(count, 0)
        sequence += tl.sum((there & (ends <= token)).to(tl.int32), 0)
        end = tl.minimum(end, tl.min(tl.where(there & (ends > token), ends, 0x7FFFFFFF), 0))
    return sequence, end


@triton.jit
def select(
    indices, tables, lengths, counts, sequences, into, most, STATES: tl.constexpr,
    TILE: tl.constexpr, STARTS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the slots of the tokens that one query selects, and how many there are.

    A query selects at most `most` tokens. Those that it does not see are left out. Kernels then
    treat every query as a separate sequence, whose block table is the query's row of slots. Rows
    of `q` outside all sequences get no tiles.
    """
    after_previous(EARLY)
    before_next(EARLY)
    token = tl.program_id(0)
    tokens = tl.num_programs(0)
    first = 0
    last = tokens
    if STARTS:
        first += tl.load(counts).to(tl.int32)
        last = tl.load(counts + sequences).to(tl.int32)
    sequence, end = sequence_of(token, counts, sequences, STARTS, SPAN)
    limit = 0
    if (token >= first) & (sequence < sequences):
        limit += tl.load(lengths + sequence).to(tl.int32) - (end - token) + 1
    table = tables.tensor + tl.minimum(sequence, sequences - 1).to(tl.int64) * tables.stride
    asked = indices.tensor + token.to(tl.int64) * indices.stride
    own = into.slots + token.to(tl.int64) * most
    found = 0
    for begin in range(0, most, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        index = tl.load(asked + at, mask=at < most, other=-1).to(tl.int32)
        there = (index >= 0) & (index < limit)
        block = tl.load(table + index // STATES, mask=there, other=0).to(tl.int32)
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        tl.store(own + place, block * STATES + index % STATES, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
    if found == 0:
        tl.store(own, 0)  # Kernels read this row, but give it no weight.
    tl.store(into.counts + token, found)
    width = tokens + 1
    if token == 0:
        tl.store(into.ends, first)
        tl.store(into.ends + width, 0)
    after = tl.maximum(tl.minimum(token + 1, last), first)
    tl.store(into.ends + token + 1, after)
    tl.store(into.ends + width + token + 1, (after - first) * tl.cdiv(most, TILE))
