"""Device code for sequences with few queries: flash-decoding with equal shares of work.

The cached tokens of all sequences are divided into one list of tiles. Each worker processes an
equal range of this list, which may begin and end inside a sequence. A worker consists of one
program per kv head (or per tile of the head's query rows), so that concurrent programs read
adjacent bytes. A worker that processes a whole sequence writes the sequence's output. For other
sequences, workers store partial results, at most two each, and `merge` combines them.

`decode` launches as many programs as the GPU can run at once. It is not launched early (see
`dependent_launch_device`): while programs of the previous kernel still run, its programs would be
distributed unevenly over the multiprocessors. `merge` is launched early, once all programs of
`decode` have started.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.decode_packed_device import walk_words
from kvatlas.kernels.triton.attention.walk_device import (
    Queries,
    Stretch,
    find,
    first_seen,
    load_queries,
    no_states,
    put_output,
    walk,
)
from kvatlas.kernels.triton.dependent_launch_device import before_next


@triton.jit
def decode(
    q, out, cache, batch, partials, scoring, SHAPE: tl.constexpr, TILING: tl.constexpr,
    WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute decode attention over a worker's range of tiles, sequence by sequence.

    A worker is a group of programs, one per kv head (or per tile of the head's query rows). Each
    worker processes an equal number of the batch's tiles of cached tokens.
    """
    MASK: tl.constexpr = SHAPE.mask
    GROUP: tl.constexpr = SHAPE.out.group
    TILE: tl.constexpr = TILING.tile
    OUT: tl.constexpr = SHAPE.out
    before_next(EARLY)  # `merge` reads the schedule early, so `decode` must not be launched early.
    program = tl.program_id(0) % TILING.programs
    worker = tl.program_id(0) // TILING.programs
    head = program // TILING.row_tiles
    ends = batch.ends + batch.sequences + 1
    share = tl.cdiv(tl.load(ends + batch.sequences), tl.num_programs(0) // TILING.programs)
    tile = worker * share
    stop = tl.minimum(tile + share, tl.load(ends + batch.sequences))
    sequence = find(ends, batch.sequences, tile)
    row = (program % TILING.row_tiles) * TILING.rows + tl.arange(0, TILING.rows)
    while tile < stop:
        first = tl.load(ends + sequence)
        last = tl.load(ends + sequence + 1)
        until = tl.minimum(stop, last)
        if until > tile:
            start = tl.load(batch.ends + sequence)
            count = tl.load(batch.ends + sequence + 1) - start
            length = tl.load(batch.lengths + sequence).to(tl.int32)
            valid = row < count * GROUP
            position = length - count + row // GROUP
            low = first_seen(length - count, scoring.size, MASK)
            sure = length - count + 1
            if MASK == "full":
                position = position * 0 + length - 1
                sure = length
            least = first_seen(position, scoring.size, MASK)
            origin = low // TILING.align * TILING.align
            queries = load_queries(q, start, row, valid, head, position, least, SHAPE)
            softmax = no_states(TILING.rows, OUT.width)
            table = cache.tables + sequence.to(tl.int64) * cache.table_stride
            begin = (tile - first) * TILE
            end = (until - first) * TILE
            if MASK == "sinks":
                # The tiles of sink tokens come first; the window's tiles begin at `origin`.
                sinks = tl.minimum(scoring.sink_tokens, low)
                ahead = tl.cdiv(sinks, TILE) * TILE
                softmax = some_states(
                    softmax,
                    Queries(queries.rows, queries.rope, tl.minimum(position, sinks - 1), least * 0),
                    Stretch(table, head, begin, tl.minimum(end, ahead), 0, sinks),
                    cache, scoring, SHAPE, TILING, WORDS, "causal", True,
                )  # fmt: skip
                begin = tl.maximum(begin - ahead, 0)
                end = tl.maximum(end - ahead, 0)
            begin += origin
            end += origin
            whole = begin
            if WORDS.packed and (MASK == "causal" or MASK == "full"):
                # Tiles that every query sees entirely need no mask.
                whole += tl.maximum(tl.minimum(sure, end) - begin, 0) // TILE * TILE
                softmax = some_states(
                    softmax, queries, Stretch(table, head, begin, whole, low, length), cache,
                    scoring, SHAPE, TILING, WORDS, MASK, False,
                )  # fmt: skip
            softmax = some_states(
                softmax, queries, Stretch(table, head, whole, end, low, length), cache, scoring,
                SHAPE, TILING, WORDS, MASK, True,
            )  # fmt: skip
            if (tile == first) & (until == last):
                put_output(out, softmax, scoring, start, row, valid, head, OUT, WORDS.wrap)
            else:
                # A worker stores at most two partials: for its first and for its last sequence.
                number = 2 * worker + (tile == first).to(tl.int32)
                places = (number * TILING.programs + program) * TILING.rows
                places += tl.arange(0, TILING.rows)
                column = tl.arange(0, OUT.width)
                pointers = partials.room + places.to(tl.int64)[:, None] * OUT.width
                mask = valid[:, None] & (column < OUT.dim)[None, :]
                tl.store(pointers + column[None, :], softmax.acc, mask=mask)
                tops = partials.room + partials.tops + 2 * places
                tl.store(tops, softmax.top, mask=valid)
                tl.store(tops + 1, softmax.total, mask=valid)
        tile = until
        sequence += 1


@triton.jit
def some_states(
    softmax, queries, stretch, cache, scoring, SHAPE: tl.constexpr, TILING: tl.constexpr,
    WORDS: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the softmax with a range of states, read as packed words or as elements.

    A state is a cached token.
    """
    if WORDS.packed:
        softmax = walk_words(
            softmax, queries, stretch, cache, scoring, SHAPE, TILING, WORDS, MASK, MASKED
        )
    else:
        softmax = walk(softmax, queries, stretch, cache, scoring, SHAPE, TILING, MASK, MASKED)
    return softmax
