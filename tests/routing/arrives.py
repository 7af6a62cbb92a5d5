"""The check that all tests of transfers share: every byte, and no byte more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.routing import Route, route
from tests.routing import oracle
from tests.routing.oracle import Memory, Move


def ask(move: Move) -> dict[str, Any]:
    """What `Route.bind` is told of a move, ranks apart."""
    return {
        "source_blocks": move.source_blocks,
        "destination_blocks": move.destination_blocks,
        "tokens": move.tokens,
        "layers": move.layers,
    }


def assert_arrives(
    move: Move, *, made: Route | None = None, seed: int = 0, spell_out: bool = True
) -> dict[tuple[int, int], int]:
    """Carry a move out and compare every byte; descriptors for each pair of ranks.

    Every byte that is needed is named once, `needs` names the same ones, nothing else
    changes, and no fewer descriptors would do. Bytes that nothing uses may move too, between
    blocks of the request.
    """
    rng = np.random.default_rng(seed)
    made = made or route(move.source, move.destination)
    sources = oracle.fill(move, rng)
    found: dict[tuple[int, int], int] = {}
    for rank in oracle.ranks(move.destination):
        poison = Memory(move.destination, rank, rng)
        after = poison.copy()
        named: dict[int, list[Any]] = {}
        for source in made.sources(rank):
            bound = made.bind(source_rank=source, destination_rank=rank, **ask(move))
            oracle.carry_out(bound.copies, sources[source], after)
            pairs = [(copy.source_pool, copy.destination_pool) for copy in bound.copies]
            assert len(set(pairs)) == len(pairs), "one copy for each pair of pools"
            for copy in bound.copies:
                named.setdefault(copy.destination_pool, []).append((copy.destination, copy.length))
                least = oracle.minimum(copy) if spell_out else joined(copy)
                assert len(copy.destination) == least, "the fewest descriptors"
            found[source, rank] = sum(len(copy.destination) for copy in bound.copies)
        right, fields = oracle.expected(move, rank, poison)
        arrived = dict(fields)
        for pool, also in _unused_named(named, fields, right.unused).items():
            arrived[pool] = fields[pool] | also
            right.pools[pool][also] = after.pools[pool][also]
        _assert_read_from_unused(move, made, rank, arrived, fields)
        right.unused = {}
        after.assert_equal(right, f"destination rank {rank}")
        assert_named_once(named, arrived, f"copies to rank {rank}")
        asked: dict[str, Any] = {
            "destination_rank": rank, "destination_blocks": move.destination_blocks,
            "tokens": move.tokens, "layers": move.layers,
        }  # fmt: skip
        needs = made.needs(**asked)
        must = sum(int(np.count_nonzero(mask)) for mask in arrived.values())
        assert made.needed_bytes(**asked) == must
        listed = {pool: [pair] for pool, pair in needs.items()}
        assert_named_once(listed, arrived, f"needs of rank {rank}")
    return found


def _unused_named(
    named: Mapping[int, list[Any]],
    arrived: Mapping[int, NDArray[np.bool_]],
    unused: Mapping[int, NDArray[np.bool_]],
) -> dict[int, NDArray[np.bool_]]:
    """Which bytes are copied although they are no fields; all are in blocks of the request."""
    found = {}
    for pool, ranges in named.items():
        also = (oracle.times_named(ranges, arrived[pool].size) > 0) & ~arrived[pool]
        wrong = np.flatnonzero(also & ~unused[pool])
        assert not wrong.size, f"bytes {wrong[:6]}... of pool {pool} belong to something else"
        if also.any():
            found[pool] = also
    return found


def _assert_read_from_unused(
    move: Move,
    made: Route,
    rank: int,
    arrived: Mapping[int, NDArray[np.bool_]],
    fields: Mapping[int, NDArray[np.bool_]],
) -> None:
    """Bytes that are no fields at the destination come from such bytes at the source."""
    if all(np.array_equal(arrived[pool], mask) for pool, mask in fields.items()):
        return
    for source in made.sources(rank):
        free = oracle.unused(move, "source", source)
        for copy in made.bind(source_rank=source, destination_rank=rank, **ask(move)).copies:
            ends = (copy.source, copy.destination)
            here, there = (oracle.spelled_out(starts, copy.length) for starts in ends)
            also = ~fields[copy.destination_pool][there]
            assert free[copy.source_pool][here[also]].all(), "reads what something else uses"


def assert_named_once(
    named: Mapping[int, list[Any]], arrived: Mapping[int, NDArray[np.bool_]], what: str
) -> None:
    """Every byte that must arrive is named once, and no other."""
    assert named.keys() <= arrived.keys()
    for pool, needed in arrived.items():
        # Stretches that are apart, and the same as those of the mask.
        listed = [np.zeros((2, 0), np.int64), *map(np.array, named.get(pool, []))]
        starts, lengths = np.concatenate(listed, axis=1)
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], (starts + lengths)[order]
        assert (lengths > 0).all()
        inner = starts[1:] != stops[:-1]
        edges = np.concatenate([starts[:1], np.stack([stops[:-1], starts[1:]], 1)[inner].ravel()])
        edges = np.concatenate([edges, stops[-1:]])
        if np.array_equal(edges, np.flatnonzero(np.diff(needed, prepend=False, append=False))):
            continue
        counts = oracle.times_named(named.get(pool, []), needed.size)
        wrong = np.flatnonzero(counts != needed)
        assert not wrong.size, (
            f"{what}: bytes {wrong[:6]}... of pool {pool} are named {counts[wrong][:6]} times"
        )


def joined(copy: Any) -> int:
    """`oracle.minimum` by stretches instead of bytes, for large transfers."""
    order = np.argsort(copy.destination, kind="stable")
    src, dst, length = copy.source[order], copy.destination[order], copy.length[order]
    together = (dst[1:] == (dst + length)[:-1]) & (src[1:] == (src + length)[:-1])
    return len(dst) - int(np.count_nonzero(together))


_FAR = 40
"""Pools are this many bits of address apart, so that an address tells its pool."""


def assert_prepared_arrives(move: Move, seed: int = 0) -> None:
    """Whole chunks of the prepared form: what is needed arrives, inside the request's blocks."""
    rng = np.random.default_rng(seed)
    made = route(move.source, move.destination)
    sources = oracle.fill(move, rng)
    bases = {pool: pool << _FAR for pool in range(8)}
    for rank in oracle.ranks(move.destination):
        poison = Memory(move.destination, rank, rng)
        after = poison.copy()
        for source in made.sources(rank):
            prepared = made.prepare(
                source_rank=source, source_base=bases, source_device=5,
                destination_rank=rank, destination_base=bases, destination_device=6,
                layers=move.layers,
            )  # fmt: skip
            mine, theirs = prepared.select(
                source_blocks=move.source_blocks,
                destination_blocks=move.destination_blocks,
                tokens=move.tokens,
            )
            rows, into = prepared.source[mine], prepared.destination[theirs]
            assert (rows[:, 1] == into[:, 1]).all()
            assert set(rows[:, 2].tolist()) <= {5}
            assert set(into[:, 2].tolist()) <= {6}
            for (a, n, _), (b, _, _) in zip(rows.tolist(), into.tolist(), strict=True):
                here, there = sources[source].pools[a >> _FAR], after.pools[b >> _FAR]
                a, b = a & (1 << _FAR) - 1, b & (1 << _FAR) - 1
                assert a + n <= here.size
                assert b + n <= there.size
                there[b : b + n] = here[a : a + n]
        right, arrived = oracle.expected(move, rank, poison)
        own = oracle.own_blocks(move, rank)
        for pool, unused in right.unused.items():
            own[pool] |= unused
        for pool, mask in arrived.items():
            assert (after.pools[pool][mask] == right.pools[pool][mask]).all()
            changed = after.pools[pool] != poison.pools[pool]
            assert not (changed & ~own[pool]).any(), "blocks of others were written"
            after.pools[pool][own[pool]] = poison.pools[pool][own[pool]]
        after.assert_equal(poison, "outside the request's blocks")
