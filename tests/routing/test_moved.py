"""What moves, and in how few descriptors: windows, chunks, states, transfers in pieces."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvatlas.routing import Route, route
from kvatlas.specs import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
)
from tests.planning.models import SMALL
from tests.routing import oracle
from tests.routing.arrives import ask, assert_arrives
from tests.routing.cases import moving, small_plan, stacked
from tests.routing.oracle import Memory, Move

DENSE = stacked("dense", *[FullAttention(heads=4, head_dim=8)] * 3)
FULL = FullAttention(heads=2, head_dim=4)
ROOM = 1 << 18
"""Memory in which every entry of a block table can have a block of its own."""
WINDOW = SlidingAttention(heads=2, head_dim=4, window=20)


def bound(made: Route, blocks: list[int], to: list[int], tokens: Any, **ranks: Any) -> list[Any]:
    given: dict[str, Any] = {"source_rank": 0, "destination_rank": 0, **ranks}
    (copy,) = made.bind(source_blocks=blocks, destination_blocks=to, tokens=tokens, **given).copies
    return list(
        zip(copy.source.tolist(), copy.destination.tolist(), copy.length.tolist(), strict=True)
    )


# -- the fewest descriptors ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
def test_whole_blocks_at_equal_topology_are_one_descriptor_for_each_run_of_neighbours(
    order: str,
) -> None:
    """All layers of a block are one stretch, and so are blocks that follow each other."""
    made = small_plan(DENSE, tp=2, layout=order)
    size = made.bytes_per_block
    for rank in (0, 1):
        got = bound(
            route(made, made),
            [4, 5, 6, 1, 9, 8],
            [2, 3, 4, 5, 7, 0],
            96,
            source_rank=rank,
            destination_rank=rank,
        )
        assert got == [
            (8 * size, 0, size), (4 * size, 2 * size, 3 * size), (size, 5 * size, size),
            (9 * size, 7 * size, size),
        ]  # fmt: skip


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_whole_blocks_in_layer_outermost_orders_are_one_for_each_layer(order: str) -> None:
    made = small_plan(DENSE, layout=order)
    got = bound(route(made, made), [4, 5, 6], [1, 2, 3], 48)
    assert len(got) == len(made.layers)
    assert {length for _, _, length in got} == {3 * made.page(made.layers[0]).nbytes}


def test_neighbours_on_one_side_alone_do_not_join() -> None:
    made = small_plan(DENSE, layout="BLHNC")
    assert len(bound(route(made, made), [1, 2, 3], [1, 3, 5], 48)) == 3
    assert len(bound(route(made, made), [1, 2, 3], [3, 2, 1], 48)) == 3
    assert len(bound(route(made, made), [1, 2, 3], [7, 8, 9], 48)) == 1


def test_half_the_heads_of_all_layers_are_one_stretch_in_head_major_blocks() -> None:
    """tp 2 to tp 4 in BHLNC: every block of a source rank holds what a reader wants as one run."""
    src, dst = (small_plan(DENSE, tp=tp, layout="BHLNC") for tp in (2, 4))
    got = bound(route(src, dst), [3, 7], [0, 1], 32, destination_rank=1)
    assert [length for _, _, length in got] == [dst.bytes_per_block] * 2


def test_addresses_and_devices_are_added_on_request() -> None:
    made = small_plan(DENSE, layout="BLHNC")
    whole = route(made, made).bind(
        source_rank=0,
        destination_rank=0,
        source_blocks=[2, 5],
        destination_blocks=[1, 3],
        tokens=32,
    )
    (copy,) = whole.copies
    base = (1 << 47) + 4096
    src, dst = copy.descriptors(
        source_base=base, destination_base=64, source_device=3, destination_device=1
    )
    assert src.dtype == dst.dtype == np.dtype(np.uint64)
    assert src.tolist() == [
        [base + a, n, 3] for a, n in zip(copy.source.tolist(), copy.length.tolist(), strict=True)
    ]
    assert dst.tolist() == [
        [64 + b, n, 1] for b, n in zip(copy.destination.tolist(), copy.length.tolist(), strict=True)
    ]
    plain, _ = copy.descriptors()
    assert plain[:, 0].tolist() == copy.source.tolist()


# -- only what is needed --------------------------------------------------------------------------


def bytes_moved(move: Move) -> Counter[str]:
    """Bytes that move to rank 0, for each layer."""
    made, found = route(move.source, move.destination), Counter[str]()
    for name in move.destination.layers:
        for source in made.sources(0):
            part = made.bind(source_rank=source, destination_rank=0, **ask(move.only(name)))
            found[name] += sum(int(copy.length.sum()) for copy in part.copies)
    return found


@pytest.mark.parametrize("stop", [1, 16, 19, 20, 21, 64, 75, 96])
@pytest.mark.parametrize("start", [0, 1, 60])
def test_a_window_moves_what_the_next_token_sees(start: int, stop: int) -> None:
    model = stacked("windows", WINDOW, FULL)
    src, dst = small_plan(model), small_plan(model, layout="BLHNC", block_size=32)
    start = min(start, stop)
    move = moving(src, dst, (start, stop))
    assert_arrives(move)
    row = 2 * 4 * 2 * 2  # heads, head_dim, K and V, bytes
    moved = bytes_moved(move)
    assert moved["layers.0.cache"] == row * min(stop - start, 19)
    assert moved["layers.1.cache"] == row * (stop - start)


def test_a_window_of_one_side_counts_for_both() -> None:
    """A side that keeps windows at full length neither sends nor asks for more than they reach."""
    model = stacked("windows", WINDOW, FULL)
    kept, full = small_plan(model, policy="vllm"), small_plan(model, policy="uniform")
    assert [group.kind for group in full.groups] == ["full_attention"]
    for src, dst in ((kept, full), (full, kept), (full, full)):
        move = moving(src, dst, 75)
        assert_arrives(move)
        reach = 75 if src is dst else 19
        assert bytes_moved(move)["layers.0.cache"] == 2 * 4 * 2 * 2 * reach


@pytest.mark.parametrize("stop", [31, 32, 33, 64, 65])
def test_a_chunk_moves_from_its_beginning(stop: int) -> None:
    model = stacked("chunks", ChunkedAttention(heads=2, head_dim=4, chunk=32), FULL)
    src, dst = small_plan(model), small_plan(model, tp=2, layout="LBHNC")
    move = moving(src, dst, stop)
    assert_arrives(move)
    assert bytes_moved(move)["layers.0.cache"] == 1 * 4 * 2 * 2 * (stop % 32)


def test_sinks_move_with_everything_else() -> None:
    model = stacked("sinks", SinkAttention(heads=2, head_dim=4, sink_tokens=4, window=8))
    move = moving(small_plan(model), small_plan(model, tp=2), 50)
    assert_arrives(move)
    assert bytes_moved(move)["layers.0.cache"] == 1 * 4 * 2 * 2 * 50


@pytest.mark.parametrize("tokens", [(0, 5), (40, 96)])
def test_an_encoders_states_move_whatever_the_tokens(tokens: tuple[int, int]) -> None:
    model = stacked("cross", CrossAttention(heads=2, head_dim=4, source=37), FULL)
    move = moving(small_plan(model), small_plan(model, tp=2, layout="BLHNC"), tokens)
    assert_arrives(move)
    assert bytes_moved(move)["layers.0.cache"] == 1 * 4 * 2 * 2 * 37


@pytest.mark.parametrize(("tokens", "states"), [((0, 3), 0), ((0, 4), 1), ((3, 9), 2), ((4, 8), 1)])
def test_compressed_states_move_once_they_are_complete(
    tokens: tuple[int, int], states: int
) -> None:
    model = stacked("compressed", LatentAttention(latent=16, rope=8, compress=4))
    src, dst = (small_plan(model, max_len=512, layout=order) for order in ("LBNHC", "BLHNC"))
    move = moving(src, dst, tokens)
    assert_arrives(move)
    assert bytes_moved(move)["layers.0.cache"] == states * 24 * 2


@pytest.mark.parametrize("tokens", [0, (0, 0), (37, 37), (96, 96)])
def test_of_no_tokens_nothing_moves_but_an_encoders_states(tokens: Any) -> None:
    spec = CrossAttention(heads=2, head_dim=4, source=37)
    for model in (DENSE, SMALL["delta hybrid"], SMALL["sliding"], stacked("cross", spec, FULL)):
        src, dst = small_plan(model, tp=2), small_plan(model, layout="BLHNC")
        move = moving(src, dst, tokens)
        assert_arrives(move)
        cross = model.name == "cross"
        assert sum(bytes_moved(move).values()) == (2 * 4 * 2 * 2 * 37 if cross else 0)


def test_parts_of_a_cut_state_lie_in_blocks_of_their_own_tables() -> None:
    """Policy atlas deals the parts of a state over several groups, each with its table."""
    src = small_plan(SMALL["cut hybrid"], max_len=512)
    layer = next(name for name in src.layers if src.parts(name) > 1)
    tables = [src.region_of(layer, part)[0].group for part in range(src.parts(layer))]
    assert len(set(tables)) == len(tables) > 1
    move = moving(src, small_plan(SMALL["cut hybrid"], policy="vllm"), 16)
    assert_arrives(move)
    one = move.only(layer)
    read = {
        int(start) // src.bytes_per_block
        for copy in route(src, move.destination)
        .bind(source_rank=0, destination_rank=0, **ask(one))
        .copies
        for start in copy.source
    }
    assert read == {move.source_blocks[table][0] for table in tables}


def test_prepared_blocks_that_a_chunk_has_left_behind_are_not_asked_for() -> None:
    made = small_plan(stacked("m", ChunkedAttention(heads=2, head_dim=4, chunk=8)))
    prepared = route(made, made).prepare(source_rank=0, destination_rank=0)
    for tokens, count in ((40, 0), (41, 1)):
        src, dst = prepared.select(
            source_blocks=[-1, -1, 5], destination_blocks=[-1, -1, 6], tokens=tokens
        )
        assert len(src) == len(dst) == count


# -- in pieces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sliding", "delta hybrid", "sparse", "cut hybrid"])
def test_layer_by_layer_adds_up_to_the_whole(name: str) -> None:
    src = small_plan(SMALL[name], tp=2, layout="BLHNC")
    dst = small_plan(SMALL[name], tp=1, policy="vllm")
    move = moving(src, dst, (5, 60))
    made, rng = route(src, dst), np.random.default_rng(0)
    sources, poison = oracle.fill(move, rng), Memory(dst, 0, rng)
    after, total = poison.copy(), 0
    for layer in dst.layers:
        one = move.only(layer)
        assert_arrives(one, made=made)
        for source in made.sources(0):
            copies = made.bind(source_rank=source, destination_rank=0, **ask(one)).copies
            total += oracle.carry_out(copies, sources[source], after)
    right, arrived = oracle.expected(move, 0, poison)
    after.assert_equal(right, "all layers")
    assert total == sum(int(mask.sum()) for mask in arrived.values())


@pytest.mark.parametrize("step", [5, 16, 40])
def test_chunk_by_chunk_adds_up_to_the_whole(step: int) -> None:
    """A prefill sends what it has computed, and the state after every chunk."""
    model = SMALL["mamba hybrid"]
    src = small_plan(model, tp=2, least=ROOM)
    dst = small_plan(model, tp=4, policy="vllm", least=ROOM)
    whole = moving(src, dst, 96, complete=True)
    made = route(src, dst)
    for start in range(0, 96, 5 * step):
        assert_arrives(whole.between(start, min(start + step, 96)), made=made)
    rng = np.random.default_rng(0)
    sources, poison = oracle.fill(whole, rng), Memory(dst, 1, rng)
    after = poison.copy()
    attention = [name for name in dst.layers if name.endswith("attn")]
    for start in range(0, 96, step):
        piece = whole.between(start, min(start + step, 96)).only(*attention)
        for source in made.sources(1):
            copies = made.bind(source_rank=source, destination_rank=1, **ask(piece)).copies
            oracle.carry_out(copies, sources[source], after)
    after.assert_equal(oracle.expected(whole.only(*attention), 1, poison)[0], "all chunks")


def test_the_state_is_the_one_after_the_last_token() -> None:
    """Exactly at a block's end it is that block's; one token later it is the next one's."""
    model = SMALL["delta hybrid"]
    src, dst = (small_plan(model, policy="vllm", tp=tp, least=ROOM) for tp in (1, 2))
    group = next(i for i, g in enumerate(src.groups) if g.kind == "recurrent")
    size, made = src.groups[group].block, route(src, dst)
    whole = moving(src, dst, 96, complete=True)
    layer = next(name for name in src.layers if src.region_of(name)[0].group == group)
    for stop, entry in ((1, 0), (size - 1, 0), (size, 0), (size + 1, 1), (2 * size, 1)):
        piece = whole.between(0, stop).only(layer)
        assert_arrives(piece, made=made)
        (copy,) = made.bind(source_rank=0, destination_rank=0, **ask(piece)).copies
        page = src.placement(layer).select("B", whole.source_blocks[group][entry])
        assert copy.source.min() >= page.offset
        assert (copy.source + copy.length).max() <= page.stop
