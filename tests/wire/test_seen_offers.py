"""Offers that are seen on a peer's board: what is asked all the same, and what then counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy, Costs
from kvatlas.wire import Handle, Session, make_transport
from kvatlas.wire.protocol import Message
from kvatlas.wire.transports.offer_board import OfferBoard, PeerBoard, SeenOffer
from tests.wire.forking import HAS_NIXL
from tests.wire.helpers import Buffers, End, assert_arrived, ends, small, until

STAGED = Costs(descriptor=1.0, wire=1e12, copy=1e12)
"""Costs at which runs are gathered at the source: every one that is read costs a second."""


@contextmanager
def seeing(source: Any, target: Any) -> Iterator[tuple[End, End, Session, list[str]]]:
    """Two ends of one process with a board between them, and what is asked from then on."""
    with ends(End(source, 50, seed=1), End(target, 50, seed=2)) as (src, dst):
        board = src.nodes[0].transport.board = OfferBoard()
        asked: list[str] = []
        with Session(dst.nodes[0], src.endpoints) as session:
            link: Any = session.link(0)
            link.board = PeerBoard(board.memory, None)
            channels: Any = dst.nodes[0].channels
            ask = channels.ask

            def noting(endpoint: str, message: Message, *kinds: Any, **given: Any) -> Any:
                asked.append(type(message).__name__)
                return ask(endpoint, message, *kinds, **given)

            channels.ask = noting
            yield src, dst, session, asked
        src.assert_idle()
        dst.assert_idle()


def once_seen(session: Session, src: End, offer_anew: Callable[[], object]) -> None:
    """Have an offer withdrawn right after it was seen, and made anew."""
    link: Any = session.link(0)
    found = link.board.find

    def finding(request: str) -> SeenOffer | None:
        seen: SeenOffer | None = found(request)
        src.nodes[0].withdraw(request)
        offer_anew()
        return seen

    link.board.find = finding


def test_a_request_that_is_seen_is_read_without_a_word_before_it() -> None:
    with seeing(small("dense"), small("dense")) as (src, dst, session, asked):
        src.offer("one by one")
        session.pull("one by one", destination_blocks=dst.blocks, tokens=50, how="direct").wait(20)
        assert_arrived(src, dst, 0)
        until(lambda: (0, "one by one", "read") in src.released)
        assert asked == ["Release"]
        src.offer("first")  # it measures the link, for which the peer lends buffers
        session.pull("first", destination_blocks=dst.blocks, tokens=50).wait(20)
        assert "Open" in asked
        asked.clear()
        src.offer("second")
        session.pull("second", destination_blocks=dst.blocks, tokens=50).wait(20)
        until(lambda: (0, "second", "read") in src.released)
        assert asked == ["Release"]


def test_what_is_seen_and_has_to_be_gathered_is_leased_after_all() -> None:
    source, target = small("dense", layout="LBNHC"), small("dense", layout="LBHNC")
    with seeing(source, target) as (src, dst, session, asked):
        src.offer("r")
        session.pull("r", destination_blocks=dst.blocks, tokens=50, costs=STAGED).wait(20)
        assert_arrived(src, dst, 0)
        assert asked[0] == "Open"
        assert {"Borrow", "Gather", "Close"} <= set(asked)
        until(lambda: (0, "r", "read") in src.released)


def test_what_is_let_go_while_it_is_read_counts_for_nothing() -> None:
    with seeing(small("dense"), small("dense")) as (src, dst, session, _):
        src.offer("r")

        def letting_go(act: Callable[[], Handle], copies: Sequence[Copy]) -> Handle:
            del copies
            src.nodes[0].withdraw("r")
            return act()

        dst.arounds = letting_go
        with pytest.raises(AtlasError) as refusal:
            session.pull("r", destination_blocks=dst.blocks, tokens=50, how="direct").wait(20)
        assert refusal.value.code is Code.LEASE_EXPIRED


def test_an_offer_that_is_another_by_the_time_it_is_leased_is_not_read() -> None:
    """Both ends mean the same blocks, or nothing is read."""
    source, target = small("dense", layout="LBNHC"), small("dense", layout="LBHNC")
    with seeing(source, target) as (src, dst, session, asked):
        src.offer("r")
        turned = {group: ids[::-1] for group, ids in src.blocks.items()}
        once_seen(session, src, lambda: src.nodes[0].offer("r", turned, 50))
        with pytest.raises(AtlasError) as refusal:
            session.pull("r", destination_blocks=dst.blocks, tokens=50, costs=STAGED).wait(20)
        assert refusal.value.code is Code.UNKNOWN_REQUEST
        dst.buffers[0].assert_untouched()
        src.nodes[0].withdraw("r")
    assert asked == ["Open"]  # there is no lease to be ended


@pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL")
def test_processes_of_one_host_see_what_is_offered_over_nixl() -> None:
    made = small("dense")
    ends_of_it = [make_transport("nixl") for _ in range(2)]
    buffers = [Buffers(made, 0) for _ in ends_of_it]
    for transport, own in zip(ends_of_it, buffers, strict=True):
        transport.register(own.memory)
    near, far = ends_of_it
    assert far.board is not None
    link = near.connect(far.publish(), far.memory)
    assert link.board is not None
    assert link.board.find("r") is None
    link.close()
    for transport in ends_of_it:
        transport.close()


def test_an_offer_by_layers_that_is_leased_in_place_of_the_one_seen_is_waited_for() -> None:
    """Its blocks are those that were seen; what is in them is not there yet."""
    source, target = small("dense", layout="LBNHC"), small("dense", layout="LBHNC")
    with seeing(source, target) as (src, dst, session, asked):
        src.offer("r")
        once_seen(session, src, lambda: src.offer("r", layered=True))
        transfer = session.pull("r", destination_blocks=dst.blocks, tokens=50, costs=STAGED)
        until(lambda: "AwaitLayer" in asked or transfer.done)
        assert not transfer.done
        dst.buffers[0].assert_untouched()
        for layer in source.layers:
            src.nodes[0].layer_written("r", layer)
        transfer.wait(20)
        assert_arrived(src, dst, 0)
