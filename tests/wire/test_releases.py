"""Offers that are read in part, late, or not at all: who is told, and what may be read."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session
from tests.wire.helpers import End, assert_arrived, ends, pull_all, small, until


def test_a_final_pull_of_some_tokens_releases_the_offer() -> None:
    with ends(End(small("dense", tp=2), 50, seed=1), End(small("dense"), 50, seed=2)) as (src, dst):
        src.offer("r")
        pull_all(src, dst, "r", tokens=(16, 49))
        assert src.released == []
        pull_all(src, dst, "r", tokens=(16, 49), final=True)
        assert sorted(src.released) == [(0, "r", "read"), (1, "r", "read")]
        src.assert_idle()


def test_a_request_is_let_go_without_being_read() -> None:
    with ends(End(small("dense"), 50, seed=1), End(small("dense", tp=2), 50, seed=2)) as (src, dst):
        src.offer("r")
        for node in dst.nodes:
            assert src.released == []  # the other rank may still read it
            with Session(node, src.endpoints) as session:
                assert session.release("r").wait(5).ready
                assert session.release("never offered").wait(5).ready
        assert src.released == [(0, "r", "let_go")]
        with Session(dst.nodes[0], src.endpoints) as session:
            assert session.release("r").wait(5).ready
            with pytest.raises(AtlasError) as refusal:
                session.pull("r", destination_blocks=dst.blocks, tokens=50).wait(5)
        assert refusal.value.code is Code.UNKNOWN_REQUEST


@pytest.mark.parametrize("reads_first", [False, True])
def test_what_one_rank_has_read_and_another_let_go_was_let_go(reads_first: bool) -> None:
    """Whoever is the last to say so; who has read it and then lets it go has read it."""
    with ends(End(small("dense"), 50, seed=1), End(small("dense", tp=2), 50, seed=2)) as (src, dst):
        for request, also in (("r", False), ("s", True)):
            src.offer(request)
            for rank in (0, 1) if reads_first else (1, 0):
                with Session(dst.nodes[rank], src.endpoints) as session:
                    if also or rank == 0:
                        session.pull(request, destination_blocks=dst.blocks, tokens=50).wait(5)
                    if also or rank == 1:
                        assert session.release(request).wait(5).ready
        assert src.released == [(0, "r", "let_go"), (0, "s", "read")]


def test_only_who_may_read_lets_go() -> None:
    with ends(End(small("dense"), 50, seed=1), End(small("dense"), 50, seed=2)) as (src, dst):
        src.offer("r", readers=["somebody else"])
        with Session(dst.nodes[0], src.endpoints) as session:
            assert session.release("r").wait(5).ready
        assert src.released == []


def test_ranks_that_nobody_reads_learn_that_a_request_was_read() -> None:
    """Two kv heads over four ranks: two of them hold what the others hold too."""
    source, target = small("dense", tp=8), small("dense")
    with ends(End(source, 50, seed=1), End(target, 50, seed=2)) as (src, dst):
        src.offer("r")
        with Session(dst.nodes[0], src.endpoints) as session:
            read = session.node.route_from(session.peers[0]).sources(0)
            assert 0 < len(read) < 8
            session.pull("r", destination_blocks=dst.blocks, tokens=50, final=True).wait(20)
            until(lambda: len(src.released) == 8)
        assert {rank for rank, _, why in src.released if why == "read"} == set(read)
        assert {why for rank, _, why in src.released if rank not in read} == {"let_go"}


def test_a_pull_waits_for_its_offer() -> None:
    with ends(End(small("dense"), 50, seed=1), End(small("dense"), 50, seed=2)) as (src, dst):
        later = threading.Timer(0.3, src.offer, ["r"])
        later.start()
        with Session(dst.nodes[0], src.endpoints) as session:
            about: dict[str, Any] = {"destination_blocks": dst.blocks, "tokens": 50}
            session.pull("r", **about, wait_for_offer=20).wait(20)
            assert_arrived(src, dst, 0)
            begun = time.monotonic()
            with pytest.raises(AtlasError) as refusal:
                session.pull("never", **about, wait_for_offer=0.2).wait(20)
            assert refusal.value.code is Code.UNKNOWN_REQUEST
            assert 0.2 <= time.monotonic() - begun < 15
            waiting = session.pull("never", **about, wait_for_offer=20)
            waiting.cancel()
            assert waiting.wait_released(5)
        later.join()


def test_windows_reach_one_token_further_where_the_last_is_computed_again() -> None:
    """The token before the window's edge is in a block that the last token itself does not see."""
    made = small("sliding", block_size=16)
    window = next(group.window for group in made.groups if group.window)
    tokens = next(n for n in range(window + 1, 64) if (n - window + 1) % 16 == 0)
    with ends(End(made, tokens, seed=1), End(small("sliding", tp=2), tokens, seed=2)) as (src, dst):
        whole = {
            index: [100 + 10 * index + entry for entry in range(4)]
            for index in range(len(made.groups))
        }
        src.blocks = whole
        dst.blocks = {index: [entry + 5 * index for entry in range(4)] for index in dst.blocks}
        for node in src.nodes:
            node.offer("short", whole, tokens)
            node.offer("long", whole, tokens, recompute=1)
        with Session(dst.nodes[0], src.endpoints) as session:
            about: dict[str, Any] = {
                "destination_blocks": dst.blocks,
                "tokens": tokens,
                "final": True,
            }
            with pytest.raises(AtlasError) as refusal:
                session.pull("short", **about, recompute=1).wait(10)
            assert refusal.value.code is Code.OUT_OF_RANGE
            dst.buffers[0].assert_untouched()
            session.pull("long", **about, recompute=1).wait(10)
        assert_arrived(src, dst, 0, tokens=tokens - 1)


def test_an_offer_is_not_released_by_a_reader_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is offered anew while the node answers the close of an older lease."""
    with ends(End(small("dense"), 50, seed=1), End(small("dense"), 50, seed=2)) as (src, dst):
        node = src.nodes[0]
        drop = node.leases.drop

        def drop_and_offer(lease: Any) -> None:
            drop(lease)
            monkeypatch.undo()
            node.withdraw("r")
            src.offer("r")

        src.offer("r")
        monkeypatch.setattr(node.leases, "drop", drop_and_offer)
        pull_all(src, dst, "r")
        assert src.released == [(0, "r", "withdrawn")]
        pull_all(src, dst, "r")
        assert src.released == [(0, "r", "withdrawn"), (0, "r", "read")]
