"""What every transport can do: register memory, publish, connect, read, write, wait, release.

A transport moves byte ranges between pools of two processes and knows nothing else: no
plan, no request, no lease. Ranges are offsets into pools that both ends have agreed on,
checked against their sizes before anything is posted, so that no transport is ever
given an address that the handshake did not name.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy

STAGING = -1
"""The index under which a process registers its staging buffers, beside its pools."""

_LONGEST_PAUSE = 2e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """One registered region: where it is in its process, how large, on which device."""

    address: int
    nbytes: int
    device: int = 0


class Handle(ABC):
    """An operation that has been posted."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether it is done; raises where it has failed."""

    def wait(self, deadline: float, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait until it is done, or refuse once the monotonic clock passes `deadline`.

        `interrupt` is called between polls; what it raises ends the wait.
        """
        begun = time.monotonic()
        while not self.poll():
            interrupt()
            now = time.monotonic()
            if now > deadline:
                raise AtlasError(
                    Code.DEADLINE,
                    f"The deadline passed after {now - begun:.1f} s",
                    got="an operation that is still under way",
                    hint="Allow more time, or retry on another replica",
                )
            # A twentieth of the time so far: what is quick is noticed quickly.
            self._pause(min((now - begun) / 20, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def release(self) -> None:  # noqa: B027
        """Give back what the transport keeps for it; also ends it where that is possible."""


class Done(Handle):
    """An operation that was over when it was posted."""

    def poll(self) -> bool:
        """Always."""
        return True


class Link(ABC):
    """A connection to one peer's memory."""

    def __init__(self, mine: Mapping[int, Memory], theirs: Mapping[int, Memory]) -> None:
        self.mine, self.theirs = mine, dict(theirs)

    def read(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of the peer into memory of this process: the peer is the source."""
        check_bounds(copies, self.theirs, self.mine)
        return self._checked([copy for copy in copies if len(copy)], write=False)

    def write(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of this process into memory of the peer: the peer is the destination."""
        check_bounds(copies, self.mine, self.theirs)
        return self._checked([copy for copy in copies if len(copy)], write=True)

    def _checked(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        self.check()
        return self._post(copies, write=write) if copies else Done()

    @abstractmethod
    def check(self) -> None:
        """Raise where the link is closed or the peer is gone."""

    @abstractmethod
    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle: ...

    @abstractmethod
    def close(self) -> None:
        """Forget the peer; a second call does nothing."""


class Transport(ABC):
    """One way to move bytes, on one end."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.memory: dict[int, Memory] = {}

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Make regions of this process reachable, by pool index."""
        taken = set(memory) & set(self.memory)
        if taken:
            raise AtlasError(
                Code.TWICE,
                "A region is registered already",
                got=f"regions {sorted(taken)} again",
                hint="Close the transport before its memory changes",
            )
        self._register(memory)
        self.memory.update(memory)

    @property
    def registered(self) -> int:
        """Regions that are registered now."""
        return len(self.memory)

    @abstractmethod
    def _register(self, memory: Mapping[int, Memory]) -> None: ...

    @abstractmethod
    def publish(self) -> bytes:
        """What a peer needs to connect, beside the regions themselves."""

    @abstractmethod
    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer that published `metadata` and has these regions."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this process, zeroed, that peers of this transport can reach."""
        return np.zeros(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self.memory.clear()


def check_bounds(
    copies: Iterable[Copy], src: Mapping[int, Memory], dst: Mapping[int, Memory]
) -> None:
    """Refuse ranges that leave the regions of either end."""
    for copy in copies:
        for pool, starts, regions in (
            (copy.src_pool, copy.src, src),
            (copy.dst_pool, copy.dst, dst),
        ):
            region = regions.get(pool)
            if region is None:
                raise AtlasError(
                    Code.OUT_OF_BOUNDS,
                    "A range lies in a region that is not registered",
                    got=f"pool {pool}, not one of {sorted(regions)}",
                    hint="Register every pool before the handshake",
                )
            if len(starts) and not _inside(starts, copy.length, region.nbytes):
                raise AtlasError(
                    Code.OUT_OF_BOUNDS,
                    "A range leaves its region",
                    got=f"bytes outside 0..{region.nbytes - 1} of pool {pool}",
                    hint="Check that the plan is the one that the memory was made for",
                )


def _inside(starts: Int64s, length: Int64s, nbytes: int) -> bool:
    # Taken away from the size, not added to the start: sums of large numbers wrap around.
    return bool(starts.min() >= 0 and length.min() > 0 and (starts <= nbytes - length).all())


def addresses(copies: Sequence[Copy], regions: Mapping[int, Memory], *, src: bool) -> Int64s:
    """Absolute addresses of one end of some copies, in their order."""
    return np.concatenate(
        [
            (copy.src if src else copy.dst)
            + regions[copy.src_pool if src else copy.dst_pool].address
            for copy in copies
        ]
    )
