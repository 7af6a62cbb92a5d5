"""The interface of transports: register memory, publish, connect, read, write, wait, release.

A transport moves byte ranges between pools of two processes. It is independent of plans, requests
and leases. Ranges are offsets into pools that both ends have agreed on. They are checked against
the pool sizes before anything is posted, so no transport ever gets an address that the handshake
did not name.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.cuda_driver import CudaDriver, load_driver
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.memory import HOST, STAGING, Memory
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy, RequestShape
from kvatlas.routing.run_grids import BlockIds
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.security import Security
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Access, Authorise, Guarantees
from kvatlas.wire.transports.offer_board import OfferBoard, SeenOffer

Shared = Literal["all", "staging"]
"""The registered memory that peers may access: all of it, or only buffers that are lent to them."""

Separation = Literal["segments", "leases", "none"]
"""How a transport with `shared="staging"` keeps peers apart.

`segments`: each peer gets its own memory (`lend_to_one`). `leases`: the transport authorises reads.
`none`: it cannot, and refuses the option.
"""

_LONGEST_PAUSE = 2e-3


@dataclass(frozen=True, eq=False)
class OnePeerMemory:
    """Zeroed memory that only the peer which receives `metadata` can read."""

    view: Any
    """Its bytes: an array on the host, or a tensor on a GPU."""
    region: Memory
    metadata: bytes
    """What the peer passes to `Transport.connect`, with `{STAGING: region}`."""
    end: Callable[[], None]
    """Wipes and frees the memory. The peer keeps at most a mapping without content."""


class Handle(ABC):
    """An operation that was posted."""

    _done = False
    _settled = False
    _failure: AtlasError | None = None
    expected_end = math.inf
    """The expected end of the operation by the monotonic clock, if it can be estimated."""

    def poll(self) -> bool:
        """Whether it is done. Raises the error of a failed operation, also on later calls."""
        if self._failure is not None:
            raise self._failure
        if not self._done:
            try:
                self._done = self._poll()
            except AtlasError as failure:
                self._failure = failure
                raise
            except Exception as problem:
                got = f"{type(problem).__name__}: {problem}"
                self._failure = errors.own_limit(problem) or errors.failed(got)
                raise self._failure from problem
        return self._done

    def peek(self) -> bool:
        """Like `poll`, but without side effects: the next `poll` completes the operation."""
        return self.poll()

    @abstractmethod
    def _poll(self) -> bool:
        """Whether it is done; not called again once it is, or has failed."""

    def wait(self, deadline: float, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait until the operation is done. Raise `deadline` after `deadline` (monotonic clock).

        `interrupt` is called between polls; an error that it raises ends the wait.
        """
        begun = time.monotonic()
        while not self.poll():
            interrupt()
            now = time.monotonic()
            if now > deadline:
                got = f"an operation that is still in flight after {now - begun:.1f} s"
                hint = "Allow more time, or retry on another replica"
                raise AtlasError(Code.DEADLINE, got=got, hint=hint)
            # A twentieth of the time so far: what is quick is noticed quickly.
            self._pause(min((now - begun) / 20, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def release(self) -> None:
        """Return the transport's resources for the operation, and end the operation if possible."""
        if not self._done and self._failure is None:
            self._failure = errors.cancelled()
        self._release()

    def _release(self) -> None:  # noqa: B027
        """Tell the library below, where there is one; must not block."""

    def settle(self) -> bool:
        """Whether the transport is known to have finished with this process's memory for good.

        Until then the operation may still write to the memory or send its content, even if it was
        released or has failed. Once True, the result stays True. Never raises, and may be called at
        any time from any thread.
        """
        if not self._settled:
            try:
                self._settled = self._done or self._settle()
            except Exception:
                return False
        return self._settled

    def _settle(self) -> bool:
        """Whether the operation is proved to be over. Not called for a completed one."""
        return False


class Done(Handle):
    """An operation that was complete when it was posted."""

    _done = True

    def _poll(self) -> bool:
        return True


class PreparedRead(ABC):
    """Prepared reads of requests that differ only in block ids. The peer's ids are unchecked."""

    @property
    def stale(self) -> bool:
        """Whether it can never read again and must be prepared anew."""
        return False

    @abstractmethod
    def begin(
        self, src: Mapping[int, BlockIds], dst: Mapping[int, BlockIds], behind: int | None
    ) -> Handle | None:
        """Read between blocks of two tables, after a mark of the peer and the caller's stream.

        Returns None, and does nothing, if the read cannot start at once.
        """


class Link(ABC):
    """A connection to one peer's memory."""

    prompt: ClassVar[bool] = False
    """Whether an abandoned operation is over at once, because this process performs it."""
    severs: ClassVar[bool] = True
    """Whether `sever` ends operations in flight within a moment."""
    adds: ClassVar[bool] = False
    """Whether `read` computes the runs of a copy on the device, so that staging never pays."""
    exact: ClassVar[bool] = False
    """Whether the peer serves only the bytes of a lease, and none between them."""
    sees_offers: bool = False
    """Whether `find_offer` may find an offer."""

    def __init__(self, owner: Transport, theirs: Mapping[int, Memory]) -> None:
        self.owner, self.mine, self.theirs = owner, owner.memory, dict(theirs)
        self.open = True

    def sign_in(self, access: Access) -> None:  # noqa: B027
        """Authenticate at the peer, if the transport needs that before it reads."""

    def read(
        self, copies: Sequence[Copy], after: int | None = None, *, lease: bytes = b""
    ) -> Handle:
        """Read bytes of the peer into this process's memory. The peer is the source.

        The read begins after the peer's mark `after` completes, which needs `marks_travel`. `lease`
        is the key of the lease that covers the bytes, for transports that check it.
        """
        if after is not None:
            raise NotImplementedError(f"{type(self).__name__} cannot wait for a peer's mark")
        check_bounds(copies, self.theirs, self.mine)
        copies = self._checked(copies, write=False)
        return self._read(copies, lease) if copies else Done()

    def _read(self, copies: Sequence[Copy], lease: bytes) -> Handle:
        del lease
        return self._post(copies, write=False)

    def converts(self, copies: Sequence[Copy]) -> bool:
        """Whether `read` supports these copies, some of which cast elements."""
        return all(copy.cast is None for copy in copies)

    def prepare(self, shape: RequestShape) -> PreparedRead | None:
        """Prepare to read requests of one shape. Return None if the link prepares nothing."""
        del shape
        return None

    def find_offer(self, request: str) -> SeenOffer | None:
        """Return the peer's offer of this name from its board; None if the peer must be asked."""
        del request
        return None

    def glimpse_offer(self, request: str) -> SeenOffer | None:
        """Like `find_offer`, without checking that the peer is alive."""
        return self.find_offer(request)

    def follow(self, mark: int | None) -> None:
        """Order later operations after a mark of this process.

        If the transport cannot order them on the device, the host waits.
        """
        if mark is not None and self.owner.marks is not None:
            self.owner.marks.wait(mark)

    def write(self, copies: Sequence[Copy]) -> Handle:
        """Write bytes of this process into the peer's memory. The peer is the destination."""
        check_bounds(copies, self.mine, self.theirs)
        copies = self._checked(copies, write=True)
        return self._post(copies, write=True) if copies else Done()

    def _checked(self, copies: Sequence[Copy], *, write: bool) -> list[Copy]:
        """Copies that are not empty, between memory that the transport can access."""
        self.check()
        copies = [copy.expanded() for copy in copies if len(copy)]
        for copy in copies:
            self.owner.check_takes(self.mine[copy.src_pool if write else copy.dst_pool])
        return copies

    def _addresses(self, copies: Sequence[Copy], *, write: bool) -> tuple[Int64s, Int64s, Int64s]:
        """Absolute addresses of runs at this end and at the peer's, and their lengths."""
        src, dst = (self.mine, self.theirs) if write else (self.theirs, self.mine)
        source = np.concatenate([copy.src + src[copy.src_pool].address for copy in copies])
        target = np.concatenate([copy.dst + dst[copy.dst_pool].address for copy in copies])
        length = np.concatenate([copy.length for copy in copies])
        return (source, target, length) if write else (target, source, length)

    def check(self) -> None:
        """Raise an error if the link or its transport is closed, or the peer is lost."""
        self.owner.process.check()
        if not self.open or not self.owner.open:
            raise errors.closed("link")

    @abstractmethod
    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle: ...

    def close(self) -> None:
        """Disconnect from the peer. A second call has no effect."""
        if self.open:
            self.open = False
            if not self.owner.process.forked:  # else the parent still uses it
                self._close()

    def sever(self) -> None:
        """Tear down the connection, so that operations in flight end and are known to have ended.

        `Handle.settle` becomes True as soon as that is certain, which takes seconds if the link
        does not have `severs`.
        """
        self.close()

    def reaches(self, pool: int) -> bool:
        """Whether a region of the peer can be accessed over this link."""
        return pool in self.theirs

    def _close(self) -> None:  # noqa: B027
        """Tell the library below, where there is one."""


class Transport(ABC):
    """One end of a way to move bytes between processes.

    With `shared="staging"`, peers can access only staging buffers that are lent to them. The pools
    stay private, and all bytes for a peer pass through such a buffer.
    """

    name: ClassVar[str]

    separation: ClassVar[Separation] = "leases"
    """How it keeps peers apart with `shared="staging"`."""

    marks_travel: ClassVar[bool] = False
    """Whether peers can wait for marks themselves; otherwise this end waits before it answers."""
    casts: ClassVar[bool] = False
    """Whether peers can read pools and cast elements; otherwise this end converts."""
    oldest_version: ClassVar[int] = 0
    """The first protocol version whose peers can use the transport."""
    guarantees: Guarantees = Guarantees()
    """What it guarantees to a node with a secret. See the table in the guide to security."""

    def __init__(self, *, shared: Shared = "all") -> None:
        if shared not in ("all", "staging"):
            hint = 'Use shared="all" or shared="staging"'
            raise errors.failed(f"shared={shared!r}", hint, "The option shared is invalid")
        if shared == "staging" and self.separation == "none":
            hint = 'Use "tcp", "shm" or "cuda", or shared="all" between peers that trust each other'
            problem = f"The transport {self.name!r} cannot keep peers apart"
            raise errors.failed('shared="staging"', hint, problem)
        self.shared: Shared = shared
        self.process = OwningProcess("transport")
        self.beyond_host = ""
        """The address or device on which other hosts can reach it; empty if they cannot."""
        self.memory: dict[int, Memory] = {}
        self.marks: DeviceMarks | None = None
        """The marks of the GPU with the registered memory; None if all memory is on the host."""
        self.board: OfferBoard | None = None
        """The board on which peers find offers without asking; None if they must ask."""
        self.open = True
        self.copy_threads = 1  # that may copy for one read at any time, where no device does
        self.retired = 0
        """Connections that cannot be closed safely and are kept for good with their resources."""

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Register regions of this process by pool index. Peers can access shared ones."""
        self.check()
        taken = set(memory) & set(self.memory)
        if taken:
            problem, got = "A region is already registered", f"regions {sorted(taken)} again"
            hint = "Close the transport before you register other memory"
            raise AtlasError(Code.TWICE, problem, got=got, hint=hint)
        # Libraries disagree on what an empty region is, and nobody can read from one.
        taken_here = {p: at for p, at in memory.items() if at.nbytes and self.takes(at.device)}
        gpus = [region.number for region in memory.values() if region.device != HOST]
        if gpus and self.marks is None:
            self.marks = DeviceMarks(self.driver, gpus[0])
        with errors.coded_limits():
            self._register(taken_here)
        self.memory.update(memory)

    @property
    def driver(self) -> CudaDriver:
        """The CUDA driver, for memory on GPUs."""
        return load_driver()

    def takes(self, device: str) -> bool:
        """Whether it can move bytes of this device. Other devices need staging."""
        return device == HOST

    def check_takes(self, region: Memory) -> None:
        """Raise an error for memory on a device that it cannot move bytes of."""
        if not self.takes(region.device):
            raise AtlasError(
                Code.WRONG_DEVICE,
                f"The transport {self.name!r} does not support this device",
                got=f"memory on {region.device}",
                hint="Use staged transfers, or a transport that supports the device",
            )

    def shares(self, pool: int) -> bool:
        """Whether peers may access a region of this index."""
        region = self.memory.get(pool)
        reached = region is None or self.takes(region.device)
        lends = pool == STAGING and not self.lends_segments
        return reached and (self.shared == "all" or lends)

    @property
    def lends_segments(self) -> bool:
        """Whether each peer gets staging memory that no other peer can access."""
        return self.shared == "staging" and self.separation == "segments"

    def lend_to_one(self, nbytes: int) -> OnePeerMemory:
        """Allocate zeroed memory that one peer can read, and no other."""
        raise NotImplementedError(f"{type(self).__name__} has no memory for one peer: {nbytes}")

    @property
    def reachable(self) -> dict[int, Memory]:
        """The regions that peers may access, which are those in a handshake."""
        return {pool: region for pool, region in self.memory.items() if self.shares(pool)}

    @property
    def registered(self) -> int:
        """The regions that are registered now."""
        return len(self.memory)

    def _register(self, memory: Mapping[int, Memory]) -> None:  # noqa: B027
        """Tell the library below, where there is one."""

    def protect(self, security: Security, authorise: Authorise) -> None:  # noqa: B027
        """Use the security of a node for connections, and ask the node before a read is served.

        The node calls this before it publishes anything. A transport that cannot protect bytes
        ignores it.
        """

    @abstractmethod
    def publish(self) -> bytes:
        """Return the metadata that a peer needs to connect, in addition to the regions."""

    def connect(
        self, metadata: bytes, memory: Mapping[int, Memory], access: Access | None = None
    ) -> Link:
        """Connect to a peer that published `metadata` and has these regions."""
        self.check()
        with errors.coded_limits():
            link = self._connect(metadata, memory)
            try:
                link.sign_in(access or Access())
            except BaseException:
                link.close()
                raise
            return link

    @abstractmethod
    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link: ...

    def check(self) -> None:
        """Raise an error if it was closed, or belongs to the parent of this process."""
        self.process.check()
        if not self.open:
            raise errors.closed("transport")

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed host memory that peers of this transport can access."""
        return np.zeros(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Release everything. A second call, and a call in a forked child, has no effect."""
        if self.open and not self.process.forked:
            self.open = False
            self._close()
            self.memory.clear()
            if self.marks is not None:
                self.marks.close()
            if self.board is not None:
                self.board.close()

    def _close(self) -> None:  # noqa: B027
        """Tell the library below, where there is one."""
