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
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors

STAGING = -1
"""The index under which a process registers its staging buffers, beside its pools."""

Shared = Literal["all", "staging"]
"""What peers may reach of what is registered: everything, or the staging buffers alone."""

_LONGEST_PAUSE = 2e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """One registered region: where it is in its process, how large, on which device.

    What it is the memory of is kept alive with it, where `owner` names that.
    """

    address: int
    nbytes: int
    device: int = 0
    owner: object = field(default=None, repr=False, compare=False)


class Handle(ABC):
    """An operation that has been posted."""

    _done = False
    _settled = False
    _failure: AtlasError | None = None

    def poll(self) -> bool:
        """Whether it is done; raises where it has failed, and does so whenever asked again."""
        if self._failure is not None:
            raise self._failure
        if not self._done:
            try:
                self._done = self._poll()
            except AtlasError as failure:
                self._failure = failure
                raise
            except Exception as problem:
                self._failure = errors.failed(f"{type(problem).__name__}: {problem}")
                raise self._failure from problem
        return self._done

    @abstractmethod
    def _poll(self) -> bool:
        """Whether it is done; not called again once it is, or has failed."""

    def wait(self, deadline: float, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait until it is done, or refuse once the monotonic clock passes `deadline`.

        `interrupt` is called between polls; what it raises ends the wait.
        """
        begun = time.monotonic()
        while not self.poll():
            interrupt()
            now = time.monotonic()
            if now > deadline:
                got = f"an operation that is still under way after {now - begun:.1f} s"
                hint = "Allow more time, or retry on another replica"
                raise AtlasError(Code.DEADLINE, got=got, hint=hint)
            # A twentieth of the time so far: what is quick is noticed quickly.
            self._pause(min((now - begun) / 20, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def release(self) -> None:
        """Give back what the transport keeps for it; also ends it where that is possible."""
        if not self._done and self._failure is None:
            self._failure = errors.cancelled()
        self._release()

    def _release(self) -> None:  # noqa: B027
        """Tell the library below, where there is one; must not block."""

    def settle(self) -> bool:
        """Whether the transport was seen to be done with this process's memory, for good.

        Until then the operation may still write to it, or send what is in it: an operation
        that was released or has failed is not over for that. Once True, always True. Never
        raises, and may be asked at any time and from any thread.
        """
        if not self._settled:
            try:
                self._settled = self._done or self._settle()
            except Exception:
                return False
        return self._settled

    def _settle(self) -> bool:
        """Whether it is proved that nothing comes any more; not asked of what is done."""
        return False


class Done(Handle):
    """An operation that was over when it was posted."""

    _done = True

    def _poll(self) -> bool:
        return True


class Link(ABC):
    """A connection to one peer's memory."""

    prompt: ClassVar[bool] = False
    """Whether an operation that is given up is over at once: this process carries it out."""

    def __init__(self, owner: Transport, theirs: Mapping[int, Memory]) -> None:
        self.owner, self.mine, self.theirs = owner, owner.memory, dict(theirs)
        self.open = True

    def read(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of the peer into memory of this process: the peer is the source."""
        check_bounds(copies, self.theirs, self.mine)
        return self._checked(copies, write=False)

    def write(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of this process into memory of the peer: the peer is the destination."""
        check_bounds(copies, self.mine, self.theirs)
        return self._checked(copies, write=True)

    def _checked(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        self.check()
        copies = [copy for copy in copies if len(copy)]
        return self._post(copies, write=write) if copies else Done()

    def _addresses(self, copies: Sequence[Copy], *, write: bool) -> tuple[Int64s, Int64s, Int64s]:
        """Absolute addresses of runs at this end and at the peer's, and their lengths."""
        src, dst = (self.mine, self.theirs) if write else (self.theirs, self.mine)
        source = np.concatenate([copy.src + src[copy.src_pool].address for copy in copies])
        target = np.concatenate([copy.dst + dst[copy.dst_pool].address for copy in copies])
        length = np.concatenate([copy.length for copy in copies])
        return (source, target, length) if write else (target, source, length)

    def check(self) -> None:
        """Raise where the link or its transport is closed, or the peer is gone."""
        if not self.open or not self.owner.open:
            raise errors.closed("link")

    @abstractmethod
    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle: ...

    def close(self) -> None:
        """Forget the peer; a second call does nothing."""
        if self.open:
            self.open = False
            self._close()

    def sever(self) -> None:
        """Tear the connection down, so that what is under way ends, and is seen to have ended.

        `Handle.settle` then becomes True as soon as that is proved.
        """
        self.close()

    def reaches(self, pool: int) -> bool:
        """Whether a region of the peer can be reached over this link."""
        return pool in self.theirs

    def _close(self) -> None:  # noqa: B027
        """Tell the library below, where there is one."""


class Transport(ABC):
    """One way to move bytes, on one end.

    With `shared="staging"`, peers reach the staging buffers and nothing else: the pools are
    this process's own, and every byte of a peer goes through a buffer that it was lent.
    """

    name: ClassVar[str]

    def __init__(self, *, shared: Shared = "all") -> None:
        if shared not in ("all", "staging"):
            raise errors.failed(f"shared={shared!r}", hint='Share "all", or "staging" alone')
        self.shared: Shared = shared
        self.memory: dict[int, Memory] = {}
        self.open = True
        self.retired = 0
        """Connections that cannot be ended safely, and are kept for good with what they hold."""

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Make regions of this process known, by pool index; what is shared, peers can reach."""
        self.check()
        taken = set(memory) & set(self.memory)
        if taken:
            raise AtlasError(
                Code.TWICE,
                "A region is registered already",
                got=f"regions {sorted(taken)} again",
                hint="Close the transport before its memory changes",
            )
        # Libraries disagree on what an empty region is, and nobody can read from one.
        self._register({pool: region for pool, region in memory.items() if region.nbytes})
        self.memory.update(memory)

    def shares(self, pool: int) -> bool:
        """Whether peers may reach a region of this index."""
        return self.shared == "all" or pool == STAGING

    @property
    def reachable(self) -> dict[int, Memory]:
        """The regions that peers may reach: those that a handshake names."""
        return {pool: region for pool, region in self.memory.items() if self.shares(pool)}

    @property
    def registered(self) -> int:
        """Regions that are registered now."""
        return len(self.memory)

    def _register(self, memory: Mapping[int, Memory]) -> None:  # noqa: B027
        """Tell the library below, where there is one."""

    @abstractmethod
    def publish(self) -> bytes:
        """What a peer needs to connect, beside the regions themselves."""

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer that published `metadata` and has these regions."""
        self.check()
        return self._connect(metadata, memory)

    @abstractmethod
    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link: ...

    def check(self) -> None:
        """Raise where it has been closed."""
        if not self.open:
            raise errors.closed("transport")

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this process, zeroed, that peers of this transport can reach."""
        return np.zeros(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        if self.open:
            self.open = False
            self._close()
            self.memory.clear()

    def _close(self) -> None:  # noqa: B027
        """Tell the library below, where there is one."""


def check_bounds(
    copies: Iterable[Copy], src: Mapping[int, Memory], dst: Mapping[int, Memory]
) -> None:
    """Refuse ranges that leave the regions of either end."""
    for copy in copies:
        ends = (copy.src_pool, copy.src, src), (copy.dst_pool, copy.dst, dst)
        for pool, starts, regions in ends:
            if pool not in regions:
                raise AtlasError(
                    Code.OUT_OF_BOUNDS,
                    "A range lies in a region that is not registered",
                    got=f"pool {pool}, not one of {sorted(regions)}",
                    hint="Register every pool before the handshake",
                )
            nbytes = regions[pool].nbytes
            if len(starts) and not _inside(starts, copy.length, nbytes):
                raise AtlasError(
                    Code.OUT_OF_BOUNDS,
                    got=f"bytes outside 0..{nbytes - 1} of pool {pool}",
                    hint="Check that the plan is the one that the memory was made for",
                )


def _inside(starts: Int64s, length: Int64s, nbytes: int) -> bool:
    # Taken away from the size, not added to the start: sums of large numbers wrap around.
    return bool(starts.min() >= 0 and length.min() > 0 and (starts <= nbytes - length).all())
