"""A plan as a value: it travels, compares, and is checked again when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError, Code, Placement
from kvatlas.models import catalogue
from kvatlas.planning import Plan, Region, padding, plan
from kvatlas.planning.plan_checks import _refuse_mixed_blocks
from kvatlas.routing import fingerprint
from tests.planning.models import SMALL


def small(name: str = "sliding", **more: Any) -> Plan:
    return plan(SMALL[name], memory="32MiB", max_len=64, in_flight=32, **more)


@pytest.mark.parametrize("name", list(SMALL))
def test_plans_go_to_json_and_back(name: str) -> None:
    for made in (small(name, policy="vllm"), small(name, policy="atlas")):
        again = Plan.from_json(made.to_json())
        assert again == made
        assert hash(again) == hash(made)
        assert again.to_json() == made.to_json()
        assert again.summary() == made.summary()
        for layer in made.layers:
            assert again.placement(layer) == made.placement(layer)


def tampered(path: str, value: Any) -> bytes:
    """A plan with one value changed, found by a path such as `regions.0.offset`."""
    text = json.loads(small().to_json())
    *way, last = path.split(".")
    place = text
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    return json.dumps(text).encode()


TAMPERED: list[tuple[str, Any]] = [
    ("regions.0.offset", -1),
    ("regions.0.offset", 2**70),
    ("regions.0.offset", 10**15),
    ("regions.0.page_stride", 0),
    ("regions.0.page_stride", 8),
    ("regions.0.block_stride", 1),
    ("regions.0.block_stride", 1.5),
    ("regions.0.layout", "LBNHX"),
    ("regions.0.group", 99),
    ("regions.0.group", -1),
    ("regions.0.stage", 5),
    ("regions.0.layers", []),
    ("regions.0.page_bytes", 1),
    ("regions.0.kernel_block", 7),
    ("regions.0.kernel_block", 0),
    ("regions.1.layers.0.name", "layers.0.attn"),
    ("regions.0.layers.0.spec.heads", 3),
    ("regions.0.layers.0.spec.heads", -4),
    ("regions.0.layers.0.spec.kind", "unknown"),
    ("pools.0.blocks", 0),
    ("pools.0.blocks", 10**9),
    ("pools.0.block_bytes", 1),
    ("pools.0.stage", 3),
    ("pools", []),
    ("groups", []),
    ("groups.0.kind", "mystery"),
    ("groups.0.pool", 1),
    ("tp", 0),
    ("tp", 10**9),
    ("pp", -1),
    ("extra", 1),
    ("memory", 1),
    ("memory", -1),
    ("groups.0.block", 0),
    ("groups.0.block", -5),
    ("groups.0.block", 32),
    ("groups.0.window", -100),
    ("groups.0.window", 41),
    ("groups.0.window", None),
    ("groups.0.held", -1),
    ("groups.0.source", -4),
    ("groups.0.kind", "recurrent"),
    ("groups.1.kind", "cross_attention"),
    ("in_flight", -(10**9)),
    ("dcp", 3),
    ("layout", "nonsense"),
    ("pack", -3),
    ("max_len", 10**30),
    ("regions", []),
    ("regions.0.splits", 0),
    ("regions.0.splits", 10**6),
    ("regions.0.parts", [0]),
]


def test_a_plan_from_outside_is_never_trusted() -> None:
    for path, value in TAMPERED:
        with pytest.raises(AtlasError) as refusal:
            Plan.from_json(tampered(path, value))
        assert refusal.value.code is Code.BAD_PLAN, (path, value)


def test_plans_of_other_versions_are_read_or_named_as_such() -> None:
    """Version 1, which says no version, byte for byte; a later one, whatever it looks like."""
    lines = (Path(__file__).parent / "plans_of_version_1.txt").read_text().splitlines()
    assert len(lines) == len(SMALL)
    for line in lines:
        known, _, text = line.partition(" ")
        made = Plan.from_json(text)
        assert fingerprint(made) == known
        assert made.to_json() == text.encode()
        fields = json.loads(text)
        assert Plan.from_json(json.dumps({"version": 1, **fields})) == made
        for version in (3, 2**64):
            with pytest.raises(AtlasError) as refusal:
                Plan.from_json(json.dumps({**fields, "version": version, "more": 1, "regions": 1}))
            assert refusal.value.code is Code.UNLIKE_VERSIONS
            assert str(refusal.value.got).startswith(f"version {version};")
        for none in (0, -1, 1.5, "1", None):
            with pytest.raises(AtlasError) as refusal:
                Plan.from_json(json.dumps({**fields, "version": none}))
            assert refusal.value.code is Code.BAD_PLAN


NO_PLANS: list[Any] = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 1}', b"1" * 99]
NO_PLANS += [None, 7, '"\ud800"']


def test_what_is_no_plan_is_refused() -> None:
    for text in NO_PLANS:
        with pytest.raises(AtlasError) as refusal:
            Plan.from_json(text)
        assert refusal.value.code is Code.BAD_PLAN, text


def test_groups_may_not_mix_blocks() -> None:
    """Two groups that step by unlike strides would write into each other's blocks."""
    text = json.loads(small().to_json())
    text["regions"][1]["block_stride"] *= 2
    text["regions"][1]["page_stride"] *= 2
    text["pools"][0]["blocks"] //= 4
    with pytest.raises(AtlasError) as refusal:
        Plan.from_json(json.dumps(text))
    assert refusal.value.code is Code.BAD_PLAN


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_model_of_the_catalogue_has_a_plan(name: str) -> None:
    made = plan(name, memory="4TiB")
    assert made.layers
    assert made.requests(16) >= made.requests()
    told = made.explain()
    assert f"blocks of {made.block_size} tokens" in told
    assert "padding" in told
    waste = padding(made)
    assert 0 <= waste.share < 0.5, waste
    summary = made.summary()
    for key in (
        "model", "policy", "layout", "tp", "block_size", "num_blocks", "bytes_per_block", "tokens",
    ):  # fmt: skip
        assert summary[key] is not None
    assert json.loads(json.dumps(summary)) == summary


def test_what_a_request_takes_adds_up() -> None:
    made = plan("gpt-oss-20b", memory="40GiB", max_len=32768, policy="vllm")
    window, full = made.groups
    assert full.blocks(32768) == 2048
    # 127 tokens behind, 16,384 in flight, and one block because a window starts anywhere.
    assert window.blocks(32768, in_flight=16384) == -(-(127 + 16384) // 16) + 1
    assert made.blocks_per_request() == {0: 2048 + 1033}
    assert made.requests() == made.num_blocks / (2048 + 1033)


def test_rooms_of_a_layer() -> None:
    made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm")
    layer = "language_model.model.layers.3.self_attn.attn"
    assert layer in made.layers
    k = made.view(layer, "k")
    assert k.sizes == (made.num_blocks, 1, 2096, 256)
    state = made.view("language_model.model.layers.0.linear_attn", "ssm")
    assert state.axes == ("B", "H", "V", "K")
    assert state.item == 4
    with pytest.raises(AtlasError) as refusal:
        made.placement("layer 3")
    assert refusal.value.code is Code.UNKNOWN_LAYER


class TestBlocksOfUnlikeGroups:
    """A block of one group may not touch another block of another."""

    @staticmethod
    def region(group: int, **numbers: int) -> Region:
        return msgspec.structs.replace(small().regions[group], group=group, **numbers)

    def check(self, *placed: tuple[Region, Placement]) -> None:
        _refuse_mixed_blocks(list(placed), blocks=4)

    def test_equal_strides_and_cells_pass(self) -> None:
        one = Placement(("B",), (4,), (64,), item=64)
        two = Placement(("L", "B"), (2, 4), (16, 64), item=16)
        slabs = Placement(("L", "B"), (2, 4), (256, 64), item=40)
        for other in (two, slabs):
            self.check(
                (self.region(0, block_stride=64), one), (self.region(1, block_stride=64), other)
            )

    @pytest.mark.parametrize(
        ("placement", "stride"),
        [
            (Placement(("B",), (4,), (32,), item=32), 32),  # steps by another stride
            (Placement(("B",), (4,), (64,), offset=32, item=64), 64),  # reaches into the next cell
            (Placement(("L", "B"), (2, 2), (128, 64), item=64), 64),  # a slot in another's block
        ],
    )
    def test_other_cells_are_refused(self, placement: Placement, stride: int) -> None:
        one = Placement(("B",), (4,), (64,), item=64)
        with pytest.raises(AtlasError) as refusal:
            self.check(
                (self.region(0, block_stride=64), one),
                (self.region(1, block_stride=stride), placement),
            )
        assert refusal.value.code is Code.BAD_PLAN

    def test_one_group_alone_may_lie_as_it_likes(self) -> None:
        odd = Placement(("B",), (4,), (96,), offset=32, item=64)
        self.check((self.region(0, block_stride=96), odd))


def test_ranks_and_their_pools() -> None:
    made = plan("Nemotron-H-8B", memory="60GiB", tp=2, pp=2, states="apart")
    assert made.ranks == 4
    assert [made.split_rank(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in range(4):
        stage = made.split_rank(rank)[0]
        assert set(made.rank_pools(rank).values()) == {p for p in made.pools if p.stage == stage}
        for group, value in enumerate(made.groups):
            assert made.pool(rank, group) is made.rank_pools(rank)[value.pool]
    wrong: tuple[Any, ...] = (-1, 4, 1.0, True, None)
    for rank in wrong:
        with pytest.raises(AtlasError) as refusal:
            made.split_rank(rank)
        assert refusal.value.code is Code.BAD_RANK


def test_a_rank_without_a_groups_pool() -> None:
    made = plan("Granite-4.0-h-small", memory="60GiB", pp=8, states="apart")
    lacking = [r for r in range(made.ranks) if len(made.rank_pools(r)) < 2]
    for rank in lacking:
        for group, value in enumerate(made.groups):
            if value.pool not in made.rank_pools(rank):
                with pytest.raises(AtlasError) as refusal:
                    made.pool(rank, group)
                assert refusal.value.code is Code.OUT_OF_RANGE
    assert lacking


def test_two_pools_with_one_index_are_refused() -> None:
    text = json.loads(small().to_json())
    text["pools"].append(dict(text["pools"][0], blocks=1))
    text["memory"] *= 2
    with pytest.raises(AtlasError, match="same index"):
        Plan.from_json(json.dumps(text))


def test_decode_context_parallelism_divides_tokens() -> None:
    alone = plan("DeepSeek-V3", memory="60GiB", tp=8, policy="vllm")
    shared = plan("DeepSeek-V3", memory="60GiB", tp=8, dcp=8, policy="vllm")
    assert shared.num_blocks == alone.num_blocks
    assert shared.requests() == pytest.approx(8 * alone.requests())
    # 4,100 tokens over 8 ranks are 513 on the fullest: 33 blocks of 16.
    assert shared.blocks_per_request(4100) == {0: 33}
