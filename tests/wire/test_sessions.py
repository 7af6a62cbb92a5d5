"""Sessions inside one process: every pairing of small plans, every way to move, every byte."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Costs, route
from kvatlas.wire import How, Memory, Node, Session, make_transport, memory_of, pools_for
from kvatlas.wire.client import link_costs, link_measurement
from tests.identities import OURS
from tests.planning.models import SMALL
from tests.profiles import DEEP
from tests.wire.helpers import (
    Buffers,
    End,
    Local,
    assert_arrived,
    assert_by_oracle,
    ends,
    expected,
    fill_by_oracle,
    pull_all,
    small,
    until,
)  # fmt: skip

PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"tp": 2, "layout": "LBNHC"}, {"tp": 1, "layout": "BHLNC", "block_size": 32}),
    ("dense", {"tp": 1, "layout": "BLHNC", "block_size": 32}, {"tp": 2, "layout": "LBHNC"}),
    ("dense", {"pp": 2}, {"tp": 4}),
    ("sliding", {"pp": 2}, {"tp": 2}),
    ("sliding", {"tp": 2, "layout": "BHLNC"}, {"pp": 3}),
    ("unlike pages", {"tp": 2}, {"tp": 1, "layout": "BLHNC"}),
    ("delta hybrid", {"tp": 2, "layout": "LBHNC"}, {"tp": 4, "layout": "BLHNC"}),
    ("mamba hybrid", {"tp": 1}, {"tp": 2}),
    ("parallel", {"tp": 2}, {"tp": 1}),
    ("conv hybrid", {"tp": 2}, {"pp": 2}),
    ("latent", {"tp": 2}, {"tp": 1, "block_size": 32}),
    ("latent hybrid", {"tp": 1}, {"tp": 2}),
    ("sparse", {"tp": 1}, {"tp": 2}),
    ("compressed", {"tp": 1}, {"tp": 2}),
    ("cut hybrid", {"tp": 2}, {"tp": 1}),
    ("recurrent", {"tp": 2}, {"tp": 1}),
]


def two_ends(name: str, src: dict[str, Any], dst: dict[str, Any], **given: Any) -> tuple[End, End]:
    longest = 256 if name == "compressed" else 64
    memory = {"memory": "8MiB" if name in ("compressed", "sparse") else "2MiB"}
    many = longest - 14
    return (
        End(small(name, longest, **memory | src), many, seed=1, **given),
        End(small(name, longest, **memory | dst), many, seed=2, **given),
    )


def test_every_small_model_is_moved() -> None:
    assert {name for name, _, _ in PAIRS} == set(SMALL)


def moved(*ways: str) -> list[tuple[Any, ...]]:
    """Each pair with one of the ways, by turns; in the deep profile, with all ways."""
    return [
        (*pair, how)
        for number, pair in enumerate(PAIRS)
        for how in (ways if DEEP else ways[number % len(ways) :][:1])
    ]


@pytest.mark.parametrize(
    ("name", "src", "dst", "how"), moved("direct", "staged", "coalesced", "auto")
)
def test_a_pull_delivers_every_byte_and_no_other(
    name: str, src: dict[str, Any], dst: dict[str, Any], how: str
) -> None:
    with ends(*two_ends(name, src, dst)) as (source, target):
        move = fill_by_oracle(source, target)
        source.offer("r")
        pull_all(source, target, "r", how=how, checksums=True)
        for node in target.nodes:
            assert_by_oracle(move, target, node.rank)
        assert sorted(source.released) == [(rank, "r", "read") for rank in readers(source, target)]
        source.assert_idle()
        target.assert_idle()


def readers(source: End, target: End) -> list[int]:
    """Ranks that someone reads: only they learn that all was read."""
    way = route(source.plan, target.plan)
    return sorted({rank for node in target.nodes for rank in way.sources(node.rank)})


@pytest.mark.parametrize(("name", "src", "dst", "how"), moved("direct", "staged"))
def test_a_push_delivers_every_byte_and_no_other(
    name: str, src: dict[str, Any], dst: dict[str, Any], how: How
) -> None:
    with ends(*two_ends(name, src, dst, secret=b"between the two of us")) as (source, target):
        move = fill_by_oracle(source, target)
        waiting = [
            node.expect("r", target.blocks, target.tokens, source=source.plan, pushers=["end-1"])
            for node in target.nodes
        ]
        for number, node in enumerate(source.nodes):
            done = [one.ready.is_set() for one in waiting]
            assert done == [one.sources <= set(range(number)) for one in waiting]
            with Session(node, target.endpoints) as session:
                session.push(
                    "r", source_blocks=source.blocks, tokens=source.tokens, how=how, checksums=True
                ).wait(20)
        assert all(one.ready.is_set() for one in waiting)
        for node in target.nodes:
            assert_arrived(source, target, node.rank)
            assert_by_oracle(move, target, node.rank)
        source.assert_idle()
        target.assert_idle()


@pytest.mark.parametrize(("name", "src", "dst"), PAIRS[:8:3])
def test_layers_arrive_one_after_the_other(
    name: str, src: dict[str, Any], dst: dict[str, Any]
) -> None:
    with ends(*two_ends(name, src, dst)) as (source, target):
        source.offer("r")
        seen: list[set[str]] = []
        session: Session
        for node in target.nodes:
            with Session(node, source.endpoints) as session:
                transfer = session.pull(
                    "r", destination_blocks=target.blocks, tokens=target.tokens, streamed=True
                )
                while not transfer.done:
                    seen.append(transfer.layers)
                    time.sleep(1e-4)
                transfer.wait(10)
                assert transfer.layers == set(target.plan.layers)
                assert all(one <= two for one, two in pairwise(seen))
            assert_arrived(source, target, node.rank)
            seen.clear()
        source.assert_idle()


@pytest.mark.parametrize("how", ["direct", "staged"])
def test_some_layers_and_some_tokens_move_alone(how: str) -> None:
    with ends(*two_ends("dense", {"tp": 2}, {"tp": 1, "layout": "BHLNC"})) as (source, target):
        source.offer("r")
        layers = ["layers.1.attn", "layers.3.attn"]
        with Session(target.nodes[0], source.endpoints) as session:
            given = (name for name in layers)
            moved = session.pull(
                "r", destination_blocks=target.blocks, tokens=(7, 29), layers=given
            )
            assert 0 < moved.wait(10).moved == moved.total
        pull_all(source, target, "r", tokens=(7, 29), layers=layers, how=how, checksums=True)
        assert source.released == []
        source.assert_idle()


def test_tokens_that_are_not_offered_are_refused() -> None:
    with ends(*two_ends("delta hybrid", {}, {})) as (source, target):
        source.offer("r")
        for tokens in ((0, 51), (0, 49), (10, 49)):
            with (
                Session(target.nodes[0], source.endpoints) as session,
                pytest.raises(AtlasError) as refusal,
            ):
                session.pull("r", destination_blocks=target.blocks, tokens=tokens).wait(10)
            assert refusal.value.code is Code.BAD_TOKENS
        target.buffers[0].assert_untouched()
        source.assert_idle()


def test_a_way_that_does_not_exist_is_refused() -> None:
    with ends(*two_ends("dense", {}, {})) as (source, target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            for how, hint in (("bogus", "auto, direct, staged"), ("landed", "'coalesced'")):
                about: dict[str, Any] = {
                    "destination_blocks": target.blocks,
                    "tokens": 50,
                    "how": how,
                }
                with pytest.raises(AtlasError) as refusal:
                    session.pull("r", **about)
                assert refusal.value.code is Code.WIRE_FAILED
                assert hint in refusal.value.hint


def test_pools_that_peers_cannot_reach_are_staged() -> None:
    """Plain memory over the shared memory transport, which reaches its staging buffers alone."""
    made = [small("dense", layout=layout) for layout in ("LBNHC", "BHLNC")]
    pools = [{0: np.full(one.pools[0].nbytes, number, np.uint8)} for number, one in enumerate(made)]
    nodes = [
        Node(one, memory=memory_of(mine), transport=make_transport("shm"), identity=OURS)
        for one, mine in zip(made, pools, strict=True)
    ]
    nodes[1].offer("r", [3, 1], 32)
    with nodes[0], nodes[1], Session(nodes[0], [nodes[1].endpoint]) as session:
        transfer = session.pull("r", destination_blocks=[2, 5], tokens=32).wait(20)
        assert "staged" in nodes[0].metrics.seconds
        assert int((pools[0][0] == 1).sum()) == transfer.moved == transfer.total
        nodes[1].expect("back", [7, 8], 32, source=made[0], pushers=[nodes[0].name])
        with Session(nodes[0], [nodes[1].endpoint]) as towards:
            towards.push("back", source_blocks=[0, 1], tokens=32).wait(20)
        assert nodes[1].expected["back"].ready.is_set()


def test_an_empty_range_is_there_at_once() -> None:
    with ends(*two_ends("dense", {"tp": 2}, {})) as (source, target):
        source.offer("r")
        for how in ("direct", "staged", "coalesced", "auto"):
            pull_all(source, target, "r", tokens=(5, 5), how=how, checksums=True)
        target.buffers[0].assert_untouched()


def test_many_requests_at_once_over_many_threads() -> None:
    """Each request has blocks of its own and arrives in its own; twelve threads ask."""
    source = End(small("dense", 64, tp=2, memory="8MiB"), 32, seed=1, buffers=8)
    target = End(small("dense", 64, layout="BHLNC", memory="8MiB"), 32, seed=2, buffers=8)
    many = 48
    with ends(source, target), Session(target.nodes[0], source.endpoints) as session:
        for number in range(many):
            for node in source.nodes:
                node.offer(f"r{number}", [2 * number, 2 * number + 1], 32)

        def one(number: int) -> None:
            how = ("direct", "staged", "coalesced", "auto")[number % 4]
            given: dict[str, Any] = {"how": how, "checksums": number % 3 == 0}
            if how == "auto" and number % 8 == 3:
                given = {"streamed": True}
            blocks = [2 * (many - 1 - number), 2 * (many - 1 - number) + 1]
            for _ in range(20):
                try:
                    session.pull(f"r{number}", destination_blocks=blocks, tokens=32, **given).wait(
                        20
                    )
                    return
                except AtlasError as refused:
                    # All buffers are lent: staged was asked for, so it is refused, not changed.
                    assert (refused.code, how) == (Code.TOO_MANY, "staged")
                    threading.Event().wait(0.02)
            raise AssertionError("buffers never came free")

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(one, range(many)))
        source.blocks = {0: list(range(2 * many))}
        target.blocks = {0: [b for n in range(many) for b in (94 - 2 * n, 95 - 2 * n)]}
        right = target.buffers[0].before
        for number in range(many):
            source.blocks = {0: [2 * number, 2 * number + 1]}
            target.blocks = {0: [94 - 2 * number, 95 - 2 * number]}
            target.buffers[0].before = expected(source, target, 0)
        now, right = target.buffers[0].whole, target.buffers[0].before
        assert all(np.array_equal(now[i], right[i]) for i in now)
        source.assert_idle(8)
        target.assert_idle(8)
        assert not source.nodes[0].offers


def test_either_end_may_know_the_others_blocks() -> None:
    with ends(*two_ends("dense", {}, {"tp": 2})) as (source, target):
        source.offer("r")
        pull_all(source, target, "r", source_blocks=source.blocks)
        source.offer("again")
        wrong = {0: [*source.blocks[0][:-1], 77]}
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = session.pull(
                "again", source_blocks=wrong, destination_blocks=target.blocks, tokens=50
            )
            with pytest.raises(AtlasError) as refusal:
                transfer.wait(10)
            assert refusal.value.code is Code.UNKNOWN_REQUEST


def test_two_plans_that_read_one_offer_are_counted_apart() -> None:
    """Rank 0 of one plan and rank 1 of another are not all ranks of either."""
    source = End(small("dense"), 50, seed=1)
    one = End(small("dense", tp=2), 50, seed=2)
    two = End(small("dense", tp=2, layout="BHLNC"), 50, seed=3)
    with ends(source, one, two):
        source.offer("r")
        for end, rank in ((one, 0), (two, 1)):
            with Session(end.nodes[rank], source.endpoints) as session:
                session.pull("r", destination_blocks=end.blocks, tokens=50).wait(10)
        assert source.released == []
        with Session(one.nodes[1], source.endpoints) as session:
            session.pull("r", destination_blocks=one.blocks, tokens=50).wait(10)
        assert source.released == [(0, "r", "read")]


def test_offers_end_once_and_say_why() -> None:
    with ends(*two_ends("dense", {}, {})) as (source, _):
        source.offer("soon over", timeout=0.05)
        source.offer("withdrawn")
        source.offer("closed")
        source.nodes[0].withdraw("withdrawn")
        source.nodes[0].withdraw("withdrawn")
        until(lambda: len(source.released) == 2)
        source.nodes[0].close()
        source.nodes[0].close()
        assert sorted(source.released) == [
            (0, "closed", "closed"), (0, "soon over", "expired"), (0, "withdrawn", "withdrawn"),
        ]  # fmt: skip


def test_a_release_that_fails_harms_nobody() -> None:
    """Neither the reader whose word released it, nor the node, nor its memory."""
    with ends(*two_ends("dense", {}, {})) as (source, target):
        node = source.nodes[0]

        def fails(request: str, why: str) -> None:
            raise RuntimeError(f"{request} {why}")

        node.offer("r", source.blocks, 50, released=fails)
        node.offer("over", source.blocks, 50, released=fails, timeout=0.01)
        until(lambda: "over" not in node.offers)
        pull_all(source, target, "r")
        node.offer("closed", source.blocks, 50, released=fails)


def test_requests_are_offered_once_and_have_names() -> None:
    with ends(*two_ends("dense", {}, {})) as (source, target):
        source.offer("r")
        with pytest.raises(AtlasError) as refusal:
            source.offer("r")
        assert refusal.value.code is Code.TWICE
        for name in ("", "x" * 257, 7):
            with pytest.raises(AtlasError) as refusal:
                source.nodes[0].offer(name, [0], 1)  # type: ignore[arg-type]
            assert refusal.value.code is Code.UNKNOWN_REQUEST
        with Session(target.nodes[0], source.endpoints) as session:
            for name in ("", "x" * 257, 7):
                asked: list[Callable[..., Any]] = [
                    session.release, pulling(session, target), pushing(session, target)
                ]  # fmt: skip
                for ask in asked:
                    with pytest.raises(AtlasError) as refusal:
                        ask(name)
                    assert refusal.value.code is Code.UNKNOWN_REQUEST
        target.nodes[0].expect("r", target.blocks, 50, source=source.plan, pushers=["end-1"])
        with pytest.raises(AtlasError) as refusal:
            target.nodes[0].expect("r", target.blocks, 50, source=source.plan, pushers=["end-1"])
        assert refusal.value.code is Code.TWICE


def pulling(session: Session, end: End) -> Callable[..., Any]:
    return partial(session.pull, destination_blocks=end.blocks, tokens=50)


def pushing(session: Session, end: End) -> Callable[..., Any]:
    return partial(session.push, source_blocks=end.blocks, tokens=50)


def test_time_is_a_number_of_seconds() -> None:
    """A deadline that is no number never passes, and what is offered until then never ends."""
    with ends(*two_ends("dense", {}, {})) as (source, target):
        asking = target.nodes[0]
        with Session(asking, source.endpoints) as session:
            pull = partial(pulling(session, target), "r")
            asked: list[Callable[[Any], Any]] = [
                lambda seconds: pull(timeout=seconds),
                lambda seconds: pull(wait_for_offer=seconds),
                lambda seconds: pushing(session, target)("r", timeout=seconds),
                lambda seconds: session.release("r", timeout=seconds),
                lambda seconds: Session(asking, source.endpoints, timeout=seconds),
                lambda seconds: source.nodes[0].offer("r", source.blocks, 50, timeout=seconds),
            ]
            for seconds in (math.nan, "30", None, True, math.inf, 10**9):
                # Offers last an hour at most, whatever is asked.
                for ask in asked if seconds not in (math.inf, 10**9) else asked[:-1]:
                    with pytest.raises(AtlasError) as refusal:
                        ask(seconds)
                    assert refusal.value.code is Code.BAD_QUANTITY
        assert not source.nodes[0].offers


def test_one_name_is_not_a_list_of_its_letters() -> None:
    with ends(*two_ends("dense", {}, {})) as (source, target):
        acts: list[Callable[[], Any]] = [
            lambda: source.nodes[0].offer("r", source.blocks, 50, readers="decode-0"),
            lambda: Session(target.nodes[0], source.endpoints[0]),
            lambda: Session(target.nodes[0], [7]),  # type: ignore[list-item]
        ]
        for act in acts:
            with pytest.raises(AtlasError) as refusal:
                act()
            assert refusal.value.code is Code.BAD_CONFIG
        assert not source.nodes[0].offers


def test_names_are_as_long_as_peers_take_them() -> None:
    """Characters are counted, not bytes."""
    source, target = two_ends("dense", {}, {})
    named = node(name="\u20ac" * 256)
    with ends(source, target), named, Session(named, source.endpoints) as session:
        assert session.peers


def test_costs_that_were_given_decide() -> None:
    with ends(*two_ends("dense", {"tp": 2}, {"layout": "BHLNC"})) as (source, target):
        for request, costs in (
            ("direct", Costs(descriptor=0)),
            ("coalesced", Costs(descriptor=1e-6, copy=1e8)),
            ("staged", Costs(descriptor=1)),
        ):
            source.offer(request)
            pull_all(source, target, request, costs=costs)
            assert (request in target.nodes[0].metrics.seconds) is True
            gathered = source.nodes[0].metrics.seconds.get("stage", 0) > 0
            assert gathered is (request == "staged"), "a source is spared where it can be"
        assert "measure" not in target.nodes[0].metrics.seconds


def test_transfers_that_begin_together_all_use_the_measured_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, used = [], []
    measure, weigh = link_measurement.measure, link_costs._weighed

    def slowly(rehearsal: Any, length: int) -> Costs:
        time.sleep(0.05)
        measured.append(measure(rehearsal, length))
        return measured[-1]

    def recorded(lease: Any, stream: Any, costs: Costs) -> Any:
        used.append(costs)
        return weigh(lease, stream, costs)

    monkeypatch.setattr(link_costs, "measure", slowly)
    monkeypatch.setattr(link_costs, "_weighed", recorded)
    monkeypatch.setattr(link_costs, "_SHORTEST_WAIT", 20.0)  # longer than a busy machine takes
    with ends(*two_ends("dense", {}, {"layout": "BHLNC"})) as (source, target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            spans = [(0, 16), (16, 32), (32, 47)]
            parts = [session.pull("r", destination_blocks=target.blocks, tokens=s) for s in spans]
            for part in parts:
                part.wait()
    assert len(measured) == 1
    assert used
    assert all(costs is measured[0] for costs in used)


def test_metrics_count_what_was_moved() -> None:
    with ends(*two_ends("dense", {"tp": 2}, {})) as (source, target):
        source.offer("r")
        pull_all(source, target, "r", how="direct")
        way = route(source.plan, target.plan)
        bound = [
            way.bind(
                source_rank=r, destination_rank=0,
                source_blocks=source.blocks, destination_blocks=target.blocks, tokens=50,
            )
            for r in (0, 1)
        ]  # fmt: skip
        metrics = target.nodes[0].metrics
        assert metrics.values["bytes"] == sum(b.nbytes for b in bound)
        assert metrics.values["descriptors"] == sum(map(len, bound))
        assert metrics.outcomes == {("pull", "ok"): 2}
        assert 'outcome="ok"} 2' in metrics.prometheus()


def test_a_node_without_buffers_moves_directly() -> None:
    with ends(*two_ends("dense", {}, {}, buffers=0)) as (source, target):
        source.offer("r")
        pull_all(source, target, "r")
        source.offer("staged")
        with Session(target.nodes[0], source.endpoints) as session:
            with pytest.raises(AtlasError) as refusal:
                session.pull(
                    "staged", destination_blocks=target.blocks, tokens=50, how="staged"
                ).wait(10)
            assert refusal.value.code is Code.TOO_MANY


def test_a_node_without_buffers_over_shared_memory() -> None:
    made, transport = small("dense"), make_transport("shm")
    pools = pools_for(made, 0, transport)
    with Node(made, memory=memory_of(pools), transport=transport, buffers=0, identity=OURS) as node:
        assert node.transport.registered == len(pools)


def node(**given: Any) -> Node:
    made = small("dense")
    buffers = Buffers(made, 0)
    about: dict[str, Any] = {"memory": buffers.memory, "transport": Local()} | given
    return Node(made, identity=OURS, **about)


@pytest.mark.parametrize(
    ("code", "given"),
    [
        (Code.BAD_CONFIG, {"name": "x" * 257}),
        (Code.BAD_CONFIG, {"name": 7}),
        (Code.NOT_AN_INTEGER, {"piece": "4MiB"}),
        (Code.NOT_AN_INTEGER, {"buffers": 1.5}),
        (Code.NEGATIVE, {"buffers": -1}),
        (Code.BAD_SIZE, {"piece": 100}),
        (Code.BAD_RANK, {"rank": 1}),
        (Code.BAD_RANK, {"rank": -1}),
        (Code.BAD_HANDSHAKE, {"memory": {}}),
        (Code.BAD_HANDSHAKE, {"memory": {0: Memory(64, 4096)}}),
        (Code.WIRE_FAILED, {"listen": "tcp://nowhere.invalid:99999"}),
        (Code.WIRE_FAILED, {"listen": 5555}),
    ],
)
def test_a_node_that_cannot_be_leaves_nothing_registered(code: Code, given: dict[str, Any]) -> None:
    transport = Local()
    with pytest.raises(AtlasError) as refusal:
        node(transport=transport, **given)
    assert refusal.value.code is code
    assert transport.registered == 0


def test_two_nodes_have_two_names() -> None:
    """A name is a place: whoever takes it over takes over what was leased there."""
    with node() as one, node() as two:
        assert one.name != two.name
