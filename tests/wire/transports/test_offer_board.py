"""Offers that are seen without asking: until they are taken down, and while their source lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvatlas.wire.transports.offer_board import (
    BoardPlace,
    OfferBoard,
    PeerBoard,
    PostedOffer,
    open_board,
)
from kvatlas.wire.transports.watched_process import WatchedProcess
from tests.wire.transports.ends import eventually

SOURCE = """
import sys, msgspec
from kvatlas.wire.transports.offer_board import OfferBoard, PostedOffer
board = OfferBoard()
board.post(PostedOffer("r", {0: b"1234"}, 0, 64, 3))
print(msgspec.json.encode(board.place).decode(), flush=True)
sys.stdin.read()
"""


EXEC = """
import os
os.execv(sys.executable, [sys.executable, "-c", "print('another program', flush=True); input()"])
"""


def offer(name: str, entries: int = 4) -> PostedOffer:
    return PostedOffer(name, {0: bytes(4 * entries)}, 0, 64, None)


@pytest.fixture
def board() -> Iterator[OfferBoard]:
    made = OfferBoard()
    yield made
    made.close()


def place_of(board: OfferBoard) -> BoardPlace:
    assert board.place is not None
    return board.place


def test_an_offer_is_seen_until_it_is_taken_down_and_never_mistaken_for_the_next(
    board: OfferBoard,
) -> None:
    peer = open_board(place_of(board))
    assert peer is not None
    assert peer.find("r") is None
    for turn in range(3):
        assert board.post(offer("r", entries=turn))
        assert not board.post(offer("r")), "posted twice under one name"
        seen = peer.find("r")
        assert seen is not None
        assert (seen.offer.blocks, seen.confirmed) == ({0: bytes(4 * turn)}, True)
        board.take_down("r")
        assert board.post(offer("another")), "takes the same slot"
        assert not seen.held
        assert not seen.confirmed
        assert peer.find("r") is None
        board.take_down("another")
    board.post(offer("last"))
    seen = peer.find("last")
    board.close()
    assert seen is not None
    assert not seen.held


def test_what_has_no_room_is_not_posted(board: OfferBoard) -> None:
    assert not board.post(offer("long", entries=1 << 13))
    posted = [board.post(offer(f"r{number}")) for number in range(200)]
    assert posted == [number < 128 for number in range(200)]
    board.take_down("r5")
    assert board.post(offer("r199"))


def test_nothing_that_a_peer_writes_is_taken_for_an_offer_that_it_did_not_post(
    board: OfferBoard,
) -> None:
    """Whatever bytes change: what is found is what was posted, or nothing."""
    rng = np.random.default_rng(5)
    posted = offer("r", entries=40)
    board.post(posted)
    # The slots from behind: what is posted first lies in the last of them.
    whole = np.frombuffer(board.memory, np.uint8)
    busy = np.flatnonzero(whole)
    peer = PeerBoard(board.memory, None)
    for _ in range(2000):
        at = int(rng.choice(busy))
        before, whole[at] = whole[at], rng.integers(0, 256)
        seen = peer.find("r")
        assert seen is None or seen.offer == posted
        whole[at] = before
    assert peer.find("r") is not None


def test_a_process_that_was_killed_confirms_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        place = msgspec.json.decode(process.stdout.readline(), type=BoardPlace)
        peer = open_board(place)
        assert peer is not None
        seen = peer.find("r")
        assert seen is not None
        assert seen.confirmed
        process.send_signal(signal.SIGSTOP)
        assert seen.confirmed, "what is stopped lets go of nothing"
        process.kill()
        assert eventually(lambda: not peer.alive), "it is there until somebody waits for it"
        assert seen.held, "its board says nothing"
        assert not seen.confirmed
        process.wait()
        assert not seen.confirmed
        assert open_board(place) is None
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_has_become_another_program_confirms_nothing() -> None:
    """Its number, its start and its flags are the same; what it offered is not there any more."""
    code = SOURCE.replace("sys.stdin.read()", "sys.stdin.readline()") + EXEC
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        place = msgspec.json.decode(source.stdout.readline(), type=BoardPlace)
        peer = open_board(place)
        assert peer is not None
        seen = peer.find("r")
        assert seen is not None
        assert seen.confirmed
        print(file=source.stdin, flush=True)
        assert source.stdout.readline() == "another program\n"
        assert not seen.confirmed
        assert peer.find("r") is None
        source.kill()


def test_a_process_that_holds_another_file_is_another() -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    try:
        watched = WatchedProcess(os.getpid(), Path(f"/proc/{os.getpid()}/fd/{first}"))
        assert watched.alive
        os.dup2(second, first)
        assert not watched.alive, "its number is the same"
    finally:
        os.close(first)
        os.close(second)
    assert not watched.alive
    watched.close()
    assert not watched.alive
    assert not WatchedProcess(os.getpid(), Path(f"/proc/{os.getpid()}/fd/{2**20}")).alive


def test_a_process_that_leaves_without_closing_takes_its_offers_down_first() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        peer = open_board(msgspec.json.decode(source.stdout.readline(), type=BoardPlace))
        assert peer is not None
        seen = peer.find("r")
        assert seen is not None
        source.stdin.close()
        source.wait(20)
        assert not seen.held


def test_a_forked_process_takes_nothing_down(board: OfferBoard) -> None:
    board.post(offer("r"))
    peer = open_board(place_of(board))
    assert peer is not None
    seen = peer.find("r")
    assert seen is not None
    child = os.fork()
    if not child:
        board.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert seen.confirmed
    board.take_down("r")
    assert not seen.held


def test_places_that_are_no_board_are_not_looked_at(board: OfferBoard) -> None:
    place = place_of(board)
    with open("/dev/null") as other:  # noqa: PTH123
        for lie in (
            {"namespace": place.namespace + 1},
            {"descriptor": other.fileno()},
            {"descriptor": 10_000},
            {"process": 2**31},
            {"started": place.started + 1},
            {"token": bytes(16)},
        ):
            assert open_board(msgspec.structs.replace(place, **lie)) is None, lie
    assert WatchedProcess(os.getpid()).started == place.started
