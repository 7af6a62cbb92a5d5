"""Plans of memory that somebody else laid out, found from tensors with named axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code, Placement
from kvatlas.planning import Plan, foreign, plan
from kvatlas.planning.sized_layers import kind_of
from tests.planning.models import SMALL
from tests.planning.test_soundness import ORDERS

SEEN = ["dense", "sliding", "delta hybrid", "latent", "compressed", "recurrent"]


def tensors(made: Plan) -> dict[str, Placement]:
    """What an engine with that plan would hand out: one strided tensor for each layer."""
    found = {}
    for layer in made.layers:
        placed = made.placement(layer)
        found[layer] = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
    return found


def groups_of(made: Plan) -> list[list[str]]:
    return [
        [layer for layer in made.layers if made.region_of(layer)[0].group == index]
        for index in range(len(made.groups))
    ]


@pytest.mark.parametrize("name", SEEN)
def test_an_engines_tensors_give_back_its_plan(name: str) -> None:
    """The same layers at the same bytes, for every view of every field."""
    for order in ORDERS:
        check_order(name, order)


def check_order(name: str, order: str) -> None:
    try:
        made = plan(SMALL[name], memory="8MiB", tp=2, layout=order, policy="vllm", max_len=64)
    except AtlasError:
        made = plan(SMALL[name], memory="8MiB", tp=2, max_len=64, states="apart")
    blocks = {layer: made.region_of(layer)[0].block for layer in made.layers}
    pools = [group.pool for group in made.groups]
    seen = foreign(
        SMALL[name], tensors(made), tp=2, max_len=64, blocks=blocks, groups=groups_of(made),
        pools=pools,
    )  # fmt: skip
    assert set(seen.layers) == set(made.layers)
    for layer in made.layers:
        assert [f.name for f in seen.page(layer, 1).fields] == [
            f.name for f in made.page(layer, 1).fields
        ]
        for field in made.page(layer).fields:
            if not field.padding:
                assert seen.view(layer, field.name) == made.view(layer, field.name)
    assert [group.kind for group in seen.groups] == [group.kind for group in made.groups]
    assert Plan.from_json(seen.to_json()) == seen


def test_stages_are_one_mapping_each() -> None:
    made = plan(SMALL["dense"], memory="8MiB", pp=2, max_len=64)
    every = tensors(made)
    stages = [
        {layer: every[layer] for layer in made.layers if made.region_of(layer)[0].stage == stage}
        for stage in (0, 1)
    ]
    seen = foreign(SMALL["dense"], stages, max_len=64)
    assert (seen.pp, len(seen.pools)) == (2, 2)
    assert [region.stage for region in seen.regions] == [0, 1]


def test_two_planes_of_all_blocks() -> None:
    """K of all blocks and then V of all blocks, as engines once had it: [2, B, N, H, D]."""
    old = np.zeros((4, 2, 5, 16, 4, 8), np.float16)
    found = {}
    for index, layer in enumerate(SMALL["dense"].layers):
        axes = ("P", "B", "N", "h", "d")
        placed = Placement.from_tensor(old[index], axes=axes)
        found[layer.name] = placed.fold("h", "d", into="C").rename(P="H")
    seen = foreign(SMALL["dense"], found, max_len=64, packing="planes")
    assert seen.layout == "LHBNC"
    v = seen.view("layers.2.attn", "v")
    flat = old.reshape(-1).view(np.uint8)
    old[2, 1, 3, 7, 2, 5] = 1.5
    at = v(B=3, N=7, H=2, C=5)
    assert flat[at : at + 2].view(np.float16)[0] == 1.5


def test_groups_by_kind_where_none_are_given() -> None:
    made = plan(SMALL["sliding"], memory="8MiB", policy="vllm", max_len=64)
    seen = foreign(SMALL["sliding"], tensors(made), max_len=64)
    assert {group.kind for group in seen.groups} == {
        kind_of(layer.spec) for layer in SMALL["sliding"].layers
    }
    assert {group.window for group in seen.groups} == {40, None}


def one(**sizes: Any) -> dict[str, Placement]:
    placed = Placement.packed(list(sizes.items()), item=2)
    return {layer.name: placed.shift(i * placed.nbytes) for i, layer in enumerate(DENSE.layers)}


DENSE = SMALL["dense"]
GOOD = {"B": 5, "N": 16, "H": 4, "C": 16}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"layers": {}}, Code.UNKNOWN_LAYER),
        ({"layers": {"nothing": Placement.packed([("B", 2)])}}, Code.UNKNOWN_LAYER),
        ({"layers": one(**{**GOOD, "H": 3})}, Code.BAD_TENSOR),
        ({"layers": one(**{**GOOD, "C": 8})}, Code.BAD_TENSOR),
        ({"layers": one(N=16, B=5, H=4, C=16), "blocks": 24}, Code.BAD_TENSOR),
        ({"layers": one(**GOOD), "tp": 3}, Code.TP_HEADS),
        ({"layers": one(**GOOD), "tp": 2}, Code.BAD_TENSOR),
        ({"layers": one(**GOOD), "groups": [["layers.0.attn"]]}, Code.BAD_PLAN),
        ({"layers": one(**GOOD), "pools": []}, Code.BAD_PLAN),
        ({"layers": one(**GOOD), "max_len": -1}, Code.BAD_SIZE),
        ({"layers": {n: one(**GOOD)["layers.0.attn"] for n in one(**GOOD)}}, Code.OVERLAP),
    ],
)
def test_what_is_no_page_is_refused(change: dict[str, Any], code: Code) -> None:
    foreign(DENSE, one(**GOOD), max_len=64)
    given = {"max_len": 64, **change}
    with pytest.raises(AtlasError) as refusal:
        foreign(DENSE, given.pop("layers"), **given)
    assert refusal.value.code is code
