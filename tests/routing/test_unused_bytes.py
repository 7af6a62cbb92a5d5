"""Bytes of blocks that nothing uses are copied where skipping them would split runs.

The counts are stated by a rule. A block that a request fills is one run together with its filled
neighbours where blocks are outermost, and one run for each page where layers are. Pages of a block
that is copied in part are apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import join_ranges
from kvatlas.models import Model, catalogue
from kvatlas.planning import Plan, plan
from kvatlas.routing import route
from kvatlas.specs import FullAttention, LatentAttention, Mamba2, SlidingAttention
from tests.planning.models import SMALL
from tests.profiles import DEEP
from tests.routing import oracle
from tests.routing.arrives import ask, assert_arrives, assert_prepared_arrives
from tests.routing.cases import moving, small_plan, stacked
from tests.routing.oracle import Move

BLOCKS_OUTERMOST = ("BLNHC", "BLHNC", "BHLNC")
LAYERS_OUTERMOST = ("LBNHC", "LBHNC", "LHBNC")


def neighbours(made: Plan, tokens: int | tuple[int, int]) -> Move:
    """A request whose blocks follow each other, at both ends of a copy between equal plans."""
    span = tokens if isinstance(tokens, tuple) else (0, tokens)
    tables: dict[int, list[int]] = {}
    free = {pool.index: 1 for pool in made.pools}
    for index, group in enumerate(made.groups):
        seen = group.source or span[1]
        length = 1 if group.kind == "recurrent" else -(-seen // group.block)
        tables[index] = list(range(free[group.pool], free[group.pool] + length))
        free[group.pool] += length
    return Move(made, made, tables, tables, span)


def filled(move: Move, layer: str, part: int) -> tuple[set[int], dict[int, range]]:
    """Entries of a layer's table that move whole; the states that move of each other one."""
    made = move.source
    region, index = made.region_of(layer, part)
    states = oracle.states(move, layer)
    if made.groups[region.group].kind == "recurrent":
        return {0}, {}
    size = region.block // (region.layers[index].spec.tokens_per_state or 1)
    whole, cut = set(), {}
    for entry in range(states.start // size, -(-states.stop // size)):
        block = range(entry * size, (entry + 1) * size)
        mine = range(max(block.start, states.start), min(block.stop, states.stop))
        if mine == block:
            whole.add(entry)
        elif len(mine):
            cut[entry] = range(mine.start - block.start, mine.stop - block.start)
    return whole, cut


def stretches(entries: set[int]) -> int:
    return len([entry for entry in entries if entry - 1 not in entries])


def pieces(made: Plan, layer: str, part: int, states: range) -> int:
    """Runs of some states in one page, with the padding of their rows."""
    found = []
    for field in made.page(layer, 0, part).fields:
        view = made.view(layer, field.name, part).select("B", 0)
        if "N" in view.axes:
            found.append(view.narrow("N", states.start, len(states)).runs())
    starts, lengths = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return len(join_ranges(starts, lengths)[0])


def most_runs(move: Move) -> int:
    """The rule: the most runs that a request may take between two equal plans."""
    made, outermost = move.source, move.source.layout.index("B") == 0
    count = 0
    by_group: dict[int, list[tuple[set[int], int]]] = {}
    for layer, part in oracle.homes(made):
        whole, cut = filled(move, layer, part)
        region, _ = made.region_of(layer, part)
        count += sum(pieces(made, layer, part, states) for states in cut.values())
        rows = 1
        if made.layout == "LHBNC":  # each head of a page is apart from the others
            rows = made.page(layer, 0, part).heads
        by_group.setdefault(region.group, []).append((whole, rows))
    for pages in by_group.values():
        if outermost:
            # Layers of a group with windows of their own may fill fewer of its blocks.
            count += sum(stretches(set(own)) for own in {frozenset(own) for own, _ in pages})
        else:
            count += sum(stretches(whole) * rows for whole, rows in pages)
    return count


def plans(order: str) -> Iterator[tuple[str, Plan]]:
    for name in sorted(catalogue()):
        try:
            yield name, plan(name, memory="1TiB", layout=order, max_len=16_384)
        except AtlasError:  # the backends or pages of the model do not support this order
            continue


COMPARED = BLOCKS_OUTERMOST + LAYERS_OUTERMOST if DEEP else ("BLNHC", "LBNHC")
"""The whole catalogue is planned for each order, which takes five seconds."""


@pytest.mark.slow
@pytest.mark.parametrize("order", COMPARED)
def test_equal_plans_move_in_one_run_per_stretch_of_blocks(order: str) -> None:
    counted = 0
    for name, made in plans(order):
        blocks = [group.block for group in made.groups if group.kind != "recurrent"]
        full = lcm(*blocks)  # no block of attention to all tokens is copied in part
        for tokens in (full * max(1, 2048 // full), 4096):
            move = neighbours(made, tokens)
            bound = route(made, made).bind(source_rank=0, destination_rank=0, **ask(move))
            assert len(bound) <= most_runs(move), f"{name}, {order}, {tokens} tokens"
            counted += 1
    assert counted > 100 or order == "LHBNC"


@pytest.mark.parametrize(
    ("name", "order", "count"),
    [
        ("Qwen3-8B", "BLNHC", 1), ("Qwen3-8B", "LBNHC", 36), ("DeepSeek-V3.2", "BLNHC", 1),
        ("DeepSeek-V3.2", "LBNHC", 122), ("Llama-3.1-70B", "LBHNC", 80),
    ],
)  # fmt: skip
def test_the_rule_counts_pages_and_stretches(name: str, order: str, count: int) -> None:
    """Where each layer fills its blocks, the rule is the number of layers, or 1."""
    made = plan(name, memory="1TiB", layout=order, max_len=8192)
    assert most_runs(neighbours(made, 4096)) == count


UNEQUAL = stacked(
    "unequal", *[SlidingAttention(heads=2, head_dim=8, window=20)] * 2,
    *[FullAttention(heads=2, head_dim=8)] * 3,
)  # fmt: skip
STATES = stacked(
    "states", *[Mamba2(heads=4, head_dim=4, groups=2, state_size=8)] * 3,
    *[FullAttention(heads=2, head_dim=8)] * 2,
)  # fmt: skip
V4 = stacked("v4", *[LatentAttention(latent=64, rope=16, cache="fp8_ds_mla", version="v4")] * 3)
GAPS = {"unequal": UNEQUAL, "states": STATES, "v4": V4, "compressed": SMALL["compressed"]}


def full_blocks(made: Plan) -> int:
    """Tokens that fill a few blocks of attention."""
    blocks = lcm(*(group.block for group in made.groups if group.kind != "recurrent"))
    return blocks * max(1, min(made.max_len, 4 * blocks) // blocks)


def gaps(move: Move) -> int:
    return sum(int(mask.sum()) for mask in oracle.unused(move, "destination", 0).values())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["BLNHC", "BHLNC", "LBNHC", "LBHNC"])
@pytest.mark.parametrize("model", GAPS.values(), ids=GAPS)
def test_every_byte_that_is_written_belongs_to_the_request(model: Model, order: str) -> None:
    """Guard bytes, blocks of other requests and fields of other groups keep their bytes."""
    try:
        src = small_plan(model, layout=order, max_len=512)
    except AtlasError:
        pytest.skip("the model does not support this order")
    dst = small_plan(model, layout=order, max_len=512, least=2 * src.memory)
    whole = full_blocks(src)
    for tokens in (whole, whole - 5, (7, whole)):
        for style in ("neighbours", "shuffled", "reversed"):
            assert_arrives(moving(src, dst, tokens, style=style))
    assert_prepared_arrives(moving(src, dst, whole))


@pytest.mark.parametrize("name", ["unequal", "v4", "compressed"])
def test_gaps_are_copied_only_between_blocks_that_are_alike(name: str) -> None:
    made = small_plan(GAPS[name], layout="BLNHC", max_len=512)
    tokens = full_blocks(made)
    move = moving(made, made, tokens, style="neighbours")
    assert gaps(move), "the plan has unused bytes"

    def copied(src: Plan, dst: Plan, **options: Any) -> int:
        way = route(src, dst, **options)
        asked = ask(Move(src, dst, move.source_blocks, move.destination_blocks, (0, tokens)))
        asked["layers"] = None
        bound = way.bind(source_rank=0, destination_rank=0, **asked)
        del asked["source_blocks"]
        assert bound.nbytes == way.needed_bytes(destination_rank=0, **asked)
        return len(bound)

    alike = copied(made, made)
    assert alike < copied(made, made, padding=False)
    # An engine's memory: its owner may use the bytes between pages.
    engine = msgspec.structs.replace(made, policy="foreign")
    assert copied(made, engine) == copied(engine, made) == copied(engine, engine) > alike
    # A route of some layers does not know of the others.
    some = made.layers[:-1]
    apart = route(made, made, layers=some).bind(source_rank=0, destination_rank=0, **ask(move))
    fields = route(made, made, layers=some, padding=True).needed_bytes(
        destination_rank=0, destination_blocks=move.destination_blocks, tokens=tokens
    )
    assert apart.nbytes == fields


@pytest.mark.parametrize("model", GAPS.values(), ids=GAPS)
def test_layers_bring_the_bytes_of_the_request_together(model: Model) -> None:
    """Gaps move with the page before them, so layers one by one bring the bytes of all."""
    made = small_plan(model, layout="BLNHC", max_len=512)
    move = moving(made, made, full_blocks(made) - 3)
    way = route(made, made)

    def stream(*layers: str) -> Any:
        asked = {**ask(move), "layers": layers or None}
        return way.stream(source_rank=0, destination_rank=0, **asked)

    whole = stream()
    assert whole.nbytes == sum(stream(layer).nbytes for layer in made.layers)
    named = {pool.index: np.zeros(pool.nbytes, np.int64) for pool in made.pools}
    for layer in made.layers:
        for copy in stream(layer).walk():
            np.add.at(named[copy.destination_pool],
                      oracle.spelled_out(copy.destination, copy.length), 1)  # fmt: skip
    for copy in whole.walk():
        np.add.at(named[copy.destination_pool],
                  oracle.spelled_out(copy.destination, copy.length), -1)  # fmt: skip
    assert not any(counts.any() for counts in named.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", GAPS.values(), ids=GAPS)
def test_grids_and_pieces_copy_the_same_gaps(model: Model) -> None:
    made = small_plan(model, layout="BLNHC", max_len=512)
    move = moving(made, made, full_blocks(made) - 3)
    way = route(made, made)
    bound = way.bind(source_rank=0, destination_rank=0, **ask(move))
    stream = way.stream(source_rank=0, destination_rank=0, **ask(move))
    assert bound.nbytes == stream.nbytes == stream.shape().nbytes

    def pairs(copies: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for copy in copies:
            source, destination, length = copy.runs()
            found += zip(
                oracle.spelled_out(source, length).tolist(),
                oracle.spelled_out(destination, length).tolist(),
                strict=True,
            )
        return sorted(found)

    right = pairs(bound.copies)
    assert pairs(stream.grids()) == right
    assert pairs(copy for piece in stream.pieces(1000) for copy in piece) == right
