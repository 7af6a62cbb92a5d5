"""Readers that stop while they hold staging buffers: others go on, and no byte is wrong."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.profiles import DEEP
from tests.wire.child import Child, Rank
from tests.wire.forking import HAS_NIXL
from tests.wire.helpers import small, until

SOURCE = small("dense", 512, layout="LBNHC", memory="4MiB")
TARGET = small("dense", 512, layout="BHLNC", block_size=32, memory="4MiB")
NODE: dict[str, Any] = {"piece": 8192, "buffers": 8}
LENT = 4
"""The buffers for peers: half of all."""
PROMPT = 12.0
"""Seconds in which a pull must end although two stopped readers hold all buffers."""

WIRES = {
    "shm": ("shm", {}),
    "shm, staging": ("shm", {"shared": "staging"}),
    "tcp": ("tcp", {}),
    "tcp, staging": ("tcp", {"shared": "staging"}),
    **({"nixl": ("nixl", {})} if HAS_NIXL else {}),
    **({"mooncake": ("mooncake", {})} if importlib.util.find_spec("mooncake") else {}),
}


class Readers:
    """A source in this process, and readers in others."""

    def __init__(self, wire: str) -> None:
        name, options = WIRES[wire]
        self.source = Rank(SOURCE, name, 1, options=options, **NODE)
        about = {"slow": 0.05, **NODE}
        self.children = [Child().start(TARGET, name, seed, **about) for seed in (2, 3, 4)]

    @property
    def lent(self) -> int:
        leases = list(self.source.node.leases._open.values())
        return sum(len(lease.buffers) for lease in leases)

    def pull(self, child: Child, request: str, seconds: float) -> None:
        endpoints = [self.source.node.endpoint]
        about = {"request": request, "endpoints": endpoints, "timeout": seconds}
        child.tell("move", way="pull", how="staged", **about)

    def has_request(self, child: Child) -> bool:
        source = SOURCE.to_json().decode()
        return not child.ask("holds", source=source, seed=1)["wrong"]

    def close(self) -> None:
        for child in self.children:
            child.go_on()
            with suppress(AssertionError, EOFError, OSError):
                child.hear_all()
            assert child.close() == 0
        self.source.close()


@pytest.fixture(params=list(WIRES) if DEEP else ["tcp", "shm, staging"])
def readers(request: pytest.FixtureRequest) -> Iterator[Readers]:
    made = Readers(request.param)
    yield made
    made.close()


def test_stopped_readers_keep_no_buffers_from_others(readers: Readers) -> None:
    """They held all buffers until their own deadlines, and a third pull timed out."""
    *stopped, third = readers.children
    for number in range(3):
        readers.source.offer(f"r{number}", timeout=120)
    for number, child in enumerate(stopped):
        assert child.endpoint
        readers.pull(child, f"r{number}", 60.0)
    assert third.endpoint
    until(lambda: readers.lent == LENT, 20)
    time.sleep(0.1)  # some pieces have moved
    for child in stopped:
        child.stop()
    begun = time.monotonic()
    readers.pull(third, "r2", PROMPT)
    assert third.heard(PROMPT + 5)["code"] == "ready"
    assert time.monotonic() - begun < PROMPT
    assert readers.has_request(third)
    for child in stopped:
        child.go_on()
    for child in stopped:
        assert child.heard(70)["code"] == "ready"  # each starts over, with other buffers
        assert readers.has_request(child)
    until(readers.source.idle, 10)
    assert sorted(why for _, why in readers.source.released) == ["read"] * 3


def test_a_piece_that_was_reclaimed_in_mid_read_is_never_taken(readers: Readers) -> None:
    """The stopped reader's buffers have another lease's bytes when it continues."""
    victim, other, _ = readers.children
    turned = {group: ids[::-1] for group, ids in readers.source.blocks.items()}
    readers.source.offer("r0", timeout=120)
    readers.source.offer("r1", timeout=120, blocks=turned)
    readers.pull(victim, "r0", 60.0)
    until(lambda: readers.lent == LENT // 2, 20)
    time.sleep(0.1)
    victim.stop()
    (lease,) = readers.source.node.leases._open.values()
    readers.source.node.lending.reclaim(lease)
    readers.pull(other, "r1", 30.0)
    until(lambda: readers.lent == LENT // 2, 20)
    victim.go_on()
    assert victim.heard(70)["code"] == "ready"
    assert readers.has_request(victim)
    assert other.heard(70)["code"] == "ready"
    assert not readers.has_request(other)  # its request has other bytes
    until(readers.source.idle, 10)
