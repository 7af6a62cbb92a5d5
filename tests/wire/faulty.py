"""Transports that fail at known moments, and what must be true afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Session, Transfer
from tests.wire.helpers import Around, End, as_it_is, pull_all, small, until

Act = Callable[[], Handle]


def pair(src: dict[str, Any] | None = None, dst: dict[str, Any] | None = None) -> tuple[End, End]:
    source = End(small("dense", **src or {}), 50, seed=1)
    return source, End(small("dense", **{"layout": "BLHNC"} | (dst or {})), 50, seed=2)


def failure(transfer: Transfer, seconds: float = 10.0) -> Code:
    """How a transfer ends, which must not be well."""
    with pytest.raises(AtlasError) as refusal:
        transfer.wait(seconds)
    assert transfer.done
    assert not transfer.ready
    return refusal.value.code


def pull(session: Session, target: End, request: str = "r", **about: Any) -> Transfer:
    return session.pull(request, destination_blocks=target.blocks, **{"tokens": 50} | about)


def pull_block(session: Session, block: int, request: str = "r", **about: Any) -> Transfer:
    """Pull the first block of a request into a block, so that many pulls may run at once."""
    return session.pull(request, destination_blocks=[block], tokens=(0, 16), **about)


def works(source: End, target: End, **about: Any) -> None:
    """All is as it was: nothing is lent, and the next transfer arrives."""
    until(lambda: all(len(node.leases) == 0 for node in source.nodes))
    source.assert_idle()
    target.assert_idle()
    target.arounds = source.arounds = as_it_is
    source.offer("next")
    pull_all(source, target, "next", **about)


class Gate:
    """Holds the transport's n-th operation until it is opened."""

    def __init__(self, number: int = 0) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.left = number

    def __call__(self, act: Act, copies: Sequence[Copy]) -> Handle:
        del copies
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(20)
        self.left -= 1
        return act()


def spoiled(end: End, pool: int, *, once: bool = True) -> Around:
    """Change a byte of what has just arrived in a pool of the end's first rank."""
    done = threading.Event()

    def around(act: Act, copies: Sequence[Copy]) -> Handle:
        handle = act()
        if copies and copies[0].destination_pool == pool and not (once and done.is_set()):
            done.set()
            at = int(copies[0].destination[0])
            end.nodes[0].pools[pool][at] ^= 0x10
        return handle

    return around


class Stuck(Handle):
    """An operation that never ends, and knows whether it was given up."""

    released = False

    def _poll(self) -> bool:
        return False

    def _release(self) -> None:
        self.released = True

    def _settle(self) -> bool:
        return self.released


def lost(act: Act, copies: Sequence[Copy]) -> Handle:
    del act, copies
    raise AtlasError(Code.PEER_LOST, "rule", got="gone", hint="hint")


class Late(Handle):
    """A read that goes on after it was given up, until the source has finished it."""

    def __init__(self, act: Act) -> None:
        self.act, self.arrived = act, threading.Event()

    def _poll(self) -> bool:
        return False

    def settle(self) -> bool:
        return self.arrived.is_set()

    def arrive(self) -> None:
        """What a stopped source does when it goes on."""
        self.act()
        self.arrived.set()


class Stalled:
    """Every read stalls, and may arrive late."""

    def __init__(self) -> None:
        self.reads: list[Late] = []
        self.posted = threading.Event()

    def __call__(self, act: Act, copies: Sequence[Copy]) -> Handle:
        del copies
        self.reads.append(Late(act))
        self.posted.set()
        return self.reads[-1]
