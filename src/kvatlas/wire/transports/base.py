"""What every transport can do: register memory, publish, connect, read, write, wait, release.

A transport moves byte ranges between pools of two processes and knows nothing else: no
plan, no request, no lease. Ranges are offsets into pools that both ends have agreed on,
checked against their sizes before anything is posted, so that no transport is ever
given an address that the handshake did not name.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy, RequestShape, RunGrid
from kvatlas.routing.run_grids import BlockIds
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.bounds import check_bounds
from kvatlas.wire.transports.cuda_driver import CudaDriver, load_driver
from kvatlas.wire.transports.device_marks import DeviceMarks
from kvatlas.wire.transports.offer_board import OfferBoard, SeenOffer

STAGING = -1
"""The index under which a process registers its staging buffers, beside its pools."""

Shared = Literal["all", "staging"]
"""What peers may reach of what is registered: everything, or the staging buffers alone."""

HOST = "host"
"""The device of memory that the processor reaches; GPUs are called `cuda:0` and so on."""

_DEVICE = re.compile(r"host|cuda:(0|[1-9][0-9]{0,3})")
_LONGEST_PAUSE = 2e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """One registered region: where it is in its process, how large, on which device.

    Devices have names: `host`, or `cuda:0`, as torch calls them. What it is the memory of is
    kept alive with it, where `owner` names that.

    >>> Memory(0x7F0000000000, 4096, "cuda:1").number
    1
    """

    address: int
    nbytes: int
    device: str = HOST
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise AtlasError(
                Code.WRONG_DEVICE,
                "Memory is on the host, or on a GPU that is named with its number",
                got=repr(self.device),
                hint='Say "host", or "cuda:0"',
            )

    @property
    def number(self) -> int:
        """The number of its GPU; 0 for the host."""
        return 0 if self.device == HOST else int(self.device.removeprefix("cuda:"))


class Handle(ABC):
    """An operation that has been posted."""

    _done = False
    _settled = False
    _failure: AtlasError | None = None
    expected_end = math.inf
    """When it should be done by the monotonic clock, as far as that can be foreseen."""

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

    def peek(self) -> bool:
        """The same at once: what is to be done when it is done, the next `poll` does."""
        return self.poll()

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


class PreparedRead(ABC):
    """Reads of requests that differ in their block ids alone. The peer's were not checked."""

    @property
    def stale(self) -> bool:
        """Whether it will never read again: it has to be prepared anew."""
        return False

    @abstractmethod
    def begin(
        self, src: Mapping[int, BlockIds], dst: Mapping[int, BlockIds], behind: int | None
    ) -> Handle | None:
        """Read between blocks of two tables, behind a mark of the peer and the caller's stream.

        None where that cannot be done at once: then nothing is.
        """


class Link(ABC):
    """A connection to one peer's memory."""

    prompt: ClassVar[bool] = False
    """Whether an operation that is given up is over at once: this process carries it out."""
    adds: ClassVar[bool] = False
    """Whether `read_grids` is there: the transport adds starts and spans for itself, and no
    stream is so scattered that staging it would pay."""
    sees_offers: bool = False
    """Whether `find_offer` may find something."""

    def __init__(self, owner: Transport, theirs: Mapping[int, Memory]) -> None:
        self.owner, self.mine, self.theirs = owner, owner.memory, dict(theirs)
        self.open = True

    def read(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of the peer into memory of this process: the peer is the source."""
        check_bounds(copies, self.theirs, self.mine)
        return self._checked(copies, write=False)

    def read_grids(self, grids: Sequence[RunGrid], behind: int | None = None) -> Handle:
        """The same of runs that nobody has written out, once the peer's mark is done."""
        raise NotImplementedError(f"{type(self).__name__} takes runs: {len(grids)}, {behind}")

    def converts(self, grids: Sequence[RunGrid]) -> bool:
        """Whether `read_grids` takes these, some of whose elements change on the way."""
        return all(grid.cast is None for grid in grids)

    def prepare(self, shape: RequestShape) -> PreparedRead | None:
        """Get ready to read requests of one shape; None where every one is read anew."""
        del shape
        return None

    def find_offer(self, request: str) -> SeenOffer | None:
        """What the peer offers under a name, seen without asking; None where it has to be asked."""
        del request
        return None

    def glimpse_offer(self, request: str) -> SeenOffer | None:
        """The same, where nobody has looked whether the peer is still there."""
        return self.find_offer(request)

    def follow(self, mark: int | None) -> None:
        """What is posted from now on comes behind a mark of this process.

        Where the transport cannot order that on the device, the host waits.
        """
        if mark is not None and self.owner.marks is not None:
            self.owner.marks.wait(mark)

    def write(self, copies: Sequence[Copy]) -> Handle:
        """Bytes of this process into memory of the peer: the peer is the destination."""
        check_bounds(copies, self.mine, self.theirs)
        return self._checked(copies, write=True)

    def _checked(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        self.check()
        copies = [copy for copy in copies if len(copy)]
        for copy in copies:
            self.owner.check_takes(self.mine[copy.src_pool if write else copy.dst_pool])
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

    marks_travel: ClassVar[bool] = False
    """Whether peers look at marks by themselves; else they are waited for before an answer."""
    casts: ClassVar[bool] = False
    """Whether peers read pools and cast their elements; else this end converts in its buffers."""

    def __init__(self, *, shared: Shared = "all") -> None:
        if shared not in ("all", "staging"):
            raise errors.failed(f"shared={shared!r}", hint='Share "all", or "staging" alone')
        self.shared: Shared = shared
        self.beyond_host = ""
        """The address or device beyond this host that it listens at; empty where there is none."""
        self.memory: dict[int, Memory] = {}
        self.marks: DeviceMarks | None = None
        """Marks of the GPU that registered memory is on; None where all is on the host."""
        self.board: OfferBoard | None = None
        """Where peers see offers without asking; None where they ask."""
        self.open = True
        self.copy_threads = 1  # that may copy for one read at any time, where no device does
        self.retired = 0
        """Connections that cannot be ended safely, and are kept for good with what they hold."""

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Make regions of this process known, by pool index; what is shared, peers can reach."""
        self.check()
        taken = set(memory) & set(self.memory)
        if taken:
            problem, got = "A region is registered already", f"regions {sorted(taken)} again"
            hint = "Close the transport before its memory changes"
            raise AtlasError(Code.TWICE, problem, got=got, hint=hint)
        # Libraries disagree on what an empty region is, and nobody can read from one.
        taken_here = {p: at for p, at in memory.items() if at.nbytes and self.takes(at.device)}
        gpus = [region.number for region in memory.values() if region.device != HOST]
        if gpus and self.marks is None:
            self.marks = DeviceMarks(self.driver, gpus[0])
        self._register(taken_here)
        self.memory.update(memory)

    @property
    def driver(self) -> CudaDriver:
        """CUDA's driver, for memory on GPUs."""
        return load_driver()

    def takes(self, device: str) -> bool:
        """Whether it moves bytes of a device itself; others go by way of staging it does take."""
        return device == HOST

    def check_takes(self, region: Memory) -> None:
        """Refuse memory on a device whose bytes it does not move itself."""
        if not self.takes(region.device):
            raise AtlasError(
                Code.WRONG_DEVICE,
                f"The transport {self.name} moves no bytes of this device itself",
                got=f"memory on {region.device}",
                hint="Let the transfer be staged, or choose a transport that does",
            )

    def shares(self, pool: int) -> bool:
        """Whether peers may reach a region of this index."""
        region = self.memory.get(pool)
        reached = region is None or self.takes(region.device)
        return reached and (self.shared == "all" or pool == STAGING)

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
        """Host memory of this process, zeroed, that peers of this transport can reach."""
        return np.zeros(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        if self.open:
            self.open = False
            self._close()
            self.memory.clear()
            if self.marks is not None:
                self.marks.close()
            if self.board is not None:
                self.board.close()

    def _close(self) -> None:  # noqa: B027
        """Tell the library below, where there is one."""
