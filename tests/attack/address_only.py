"""Pools of which only addresses exist, and a transport that carries nothing and checks it all.

What is written must go together with what is read: of every layer some elements are drawn, and
where each lies at either end is found by the brute force of `tests/routing/oracle.py`, which
knows no routes. The descriptors must carry each of them from the one place to the other, once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from kvatlas.routing import Copy
from kvatlas.wire import Handle, Link, Memory, Transport
from kvatlas.wire.transports.handles import Done
from tests.routing.oracle import Ints, Move, Side, held, states

_STATES, _ELEMENTS = 4, 24
"""States that are drawn of each layer, and elements of each field of it."""


class Aliased:
    """Virtual memory of any size over one stretch of real memory."""

    STRETCH = 64 << 20

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // self.STRETCH) * self.STRETCH
        system = ctypes.CDLL(None, use_errno=True)
        system.mmap.restype = ctypes.c_void_p
        system.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        )
        file = os.memfd_create("aliased")
        os.ftruncate(file, self.STRETCH)
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self.address = system.mmap(None, self.nbytes, 0, reserve, -1, 0)
        shared = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        for at in range(0, self.nbytes, self.STRETCH):
            there = system.mmap(self.address + at, self.STRETCH, 3, shared, file, 0)
            assert there == self.address + at, "the system maps no more"
        os.close(file)
        self._unmap = system.munmap

    def close(self) -> None:
        self._unmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))


class Drawn(NamedTuple):
    """Bytes of some elements that lie in one pool of the destination: where each belongs."""

    destination: Ints
    source: Ints
    source_pool: Ints

    def wrong(self, copy: Copy) -> tuple[Ints, int]:
        """Which of them a copy carries, and how many of those from another place than theirs."""
        if not len(copy):
            return np.zeros(0, np.int64), 0
        edges = [int(copy.destination[0]), int(copy.destination[-1] + copy.length[-1])]
        near = np.arange(*np.searchsorted(self.destination, edges))
        run = np.searchsorted(copy.destination, self.destination[near], side="right") - 1
        into = self.destination[near] - copy.destination[run]
        carried = into < copy.length[run]
        near, run, into = near[carried], run[carried], into[carried]
        right = (copy.source[run] + into == self.source[near]) & (
            copy.source_pool == self.source_pool[near]
        )
        return near, int((~right).sum())


def drawn(move: Move, rng: np.random.Generator, most: int) -> dict[int, Drawn]:
    """Some elements of every field of so many layers at most, by pool of the destination."""
    layers = sorted(move.destination.layers)
    found: list[tuple[Ints, ...]] = []
    for place in rng.permutation(len(layers))[:most]:
        moving = states(move, layers[place])
        if moving:
            ends = (moving[0], moving[-1])
            chosen = np.unique([*ends, *rng.choice(len(moving), _STATES - 2) + moving[0]])
            found += _pairs(move, {layers[place]: chosen}, rng)
    pools, dst, source_pools, src = (np.concatenate(column) for column in zip(*found, strict=True))
    made = {}
    for pool in np.unique(pools).tolist():
        order = np.argsort(dst)
        mine = order[pools[order] == pool]
        made[pool] = Drawn(dst[mine], src[mine], source_pools[mine])
    return made


def _pairs(
    move: Move, chosen: Mapping[str, Ints], rng: np.random.Generator
) -> list[tuple[Ints, ...]]:
    """Pool and place at the destination, and at the source, of some bytes of every field."""
    near, far = (_elements(move, side, chosen) for side in ("destination", "source"))
    found: list[tuple[Ints, ...]] = []
    for field, (pool, address, number, item) in near.items():
        some = np.unique(rng.choice(len(number), min(len(number), _ELEMENTS)))
        # A rank's own page may hold an element several times, as copies of shared channels are.
        numbers, first = np.unique(far[field][2], return_index=True)
        assert len(numbers) == len(far[field][2]), "an element lies in two places at the source"
        theirs = first[np.minimum(np.searchsorted(numbers, number[some]), len(numbers) - 1)]
        assert np.array_equal(far[field][2][theirs], number[some]), "the source lacks an element"
        byte: Ints = rng.integers(0, item[some])
        found.append(
            (pool[some], address[some] + byte, far[field][0][theirs], far[field][1][theirs] + byte)
        )
    return found


def _elements(
    move: Move, side: Side, chosen: Mapping[str, Ints]
) -> dict[str, tuple[Ints, Ints, Ints, Ints]]:
    """Pool, place, number and size of every element of some states, by field."""
    found: dict[str, list[tuple[Ints, Ints, Ints, Ints]]] = {}
    for one in held(move, side, 0, chosen):
        pool, item = (np.full(len(one.number), value) for value in (one.pool, one.item))
        found.setdefault(one.field, []).append((pool, one.address, one.number, item))
    return {
        field: (np.concatenate(a), np.concatenate(b), np.concatenate(c), np.concatenate(d))
        for field, (a, b, c, d) in (
            (name, zip(*parts, strict=True)) for name, parts in found.items()
        )
    }


class Checking(Transport):
    """Carries nothing: counts what it is told to carry, and holds it to what was drawn."""

    name: ClassVar[str] = "checking"

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.runs = self.most = self.misled = 0
        self.drawn: dict[int, Drawn] = {}
        self.times: dict[int, Ints] = {}
        self.lock = threading.Lock()

    def expect(self, some: dict[int, Drawn]) -> None:
        """Look whether these elements are carried, each once and from where it lies."""
        self.drawn = some
        self.times = {pool: np.zeros(len(one.destination), np.int64) for pool, one in some.items()}

    @property
    def wrong(self) -> str:
        """What was wrong with descriptors; nothing where nothing was."""
        if self.misled:
            return f"{self.misled} elements were carried to where others belong"
        missed = sum(int((times != 1).sum()) for times in self.times.values())
        return f"{missed} elements were carried twice or never" if missed else ""

    def publish(self) -> bytes:
        return b""

    def look_at(self, copies: Sequence[Copy]) -> None:
        """Count copies, and hold them to what was drawn."""
        with self.lock:
            self.nbytes += sum(copy.nbytes for copy in copies)
            self.runs += sum(map(len, copies))
            self.most = max(self.most, sum(map(len, copies)))
            for copy in copies:
                # In the order of the destination and apart: no byte is written twice.
                assert bool((np.diff(copy.destination) >= copy.length[:-1]).all())
                if copy.destination_pool in self.drawn:
                    carried, misled = self.drawn[copy.destination_pool].wrong(copy)
                    self.times[copy.destination_pool][carried] += 1
                    self.misled += misled

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        del metadata
        return _CheckingLink(self, memory)


class _CheckingLink(Link):
    owner: Checking

    def _post(self, copies: Sequence[Copy]) -> Handle:
        self.owner.look_at(copies)
        return Done()
