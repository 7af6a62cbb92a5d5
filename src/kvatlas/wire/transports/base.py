"""The interface of transports: register memory, publish, connect, read, wait, release.

A transport moves byte ranges between pools of two processes. It does not use plans, requests or
leases. A range is given by an offset into a pool. Both ends have agreed on the pools and their
sizes in the handshake. Ranges are checked against these sizes before anything is posted, so a
transport never accesses an address outside these pools.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.cuda_driver import CudaDriver, load_driver
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.memory import HOST, STAGING, Memory
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy, RequestShape
from kvatlas.routing.run_grids import BlockIds
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.security import Security
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Access, Authorise, Guarantees
from kvatlas.wire.transports.handles import Done, Handle
from kvatlas.wire.transports.offer_board import OfferBoard, PeerBoard

Shared = Literal["all", "staging"]
"""The registered memory that peers may access: all of it, or only buffers that are lent to them."""

Separation = Literal["segments", "leases", "none"]
"""How a transport with `shared="staging"` keeps peers apart.

`segments`: each peer gets separate memory (`lend_to_one`). `leases`: the transport authorises each
read. `none`: the transport cannot do either, and `shared="staging"` raises an error.
"""


@dataclass(frozen=True, eq=False)
class OnePeerMemory:
    """Zeroed memory that only the peer which receives `metadata` can read."""

    view: Any
    """The memory: an array on the host, or a tensor on a GPU."""
    region: Memory
    metadata: bytes
    """The metadata that the peer passes to `Transport.connect`, with `{STAGING: region}`."""
    end: Callable[[], None]
    """Wipes and frees the memory. The peer keeps at most a mapping without content."""

    @classmethod
    def of(
        cls, alone: Transport, view: Any, region: Memory, wipe: Callable[[], None]
    ) -> OnePeerMemory:
        """Publish a region with the transport `alone`, which has no other region.

        `view` is the region's memory as an array or tensor. The function `end` of the result calls
        `wipe`, which must free the memory.
        """
        alone.register({STAGING: region})

        def end() -> None:
            alone.close()
            wipe()

        return cls(view, region, alone.publish(), end)


class PreparedRead(ABC):
    """Reads that were prepared for requests that differ only in block ids.

    The peer's block ids are not trusted. Invalid ids never cause a read outside the peer's pools.
    """

    @property
    def stale(self) -> bool:
        """Whether `begin` can never succeed again, so that the read must be prepared again."""
        return False

    @abstractmethod
    def begin(
        self,
        source: Mapping[int, BlockIds],
        destination: Mapping[int, BlockIds],
        after_event: int | None,
    ) -> Handle | None:
        """Read from the peer's blocks `source` into this process's blocks `destination`.

        The read runs after the peer's GPU event `after_event` and the work on the caller's current
        stream. Return None, and read nothing, if the read cannot start at once.
        """


class Link:
    """A connection to one peer's memory."""

    prompt: ClassVar[bool] = False
    """Whether a released operation ends at once, because this process performs it."""
    severs: ClassVar[bool] = True
    """Whether operations in flight settle almost at once after `sever`."""
    adds: ClassVar[bool] = False
    """Whether `read` computes the runs of a copy on the device, so that staging is never faster."""
    exact: ClassVar[bool] = False
    """Whether the peer serves only the exact bytes of a lease, so that gaps cannot be read."""
    board: PeerBoard | None = None
    """The board on which the peer posts its offers; None if readers must ask the peer for them."""

    def __init__(self, owner: Transport, peer_memory: Mapping[int, Memory]) -> None:
        self.owner, self.own_memory, self.peer_memory = owner, owner.memory, dict(peer_memory)
        self.open = True

    def sign_in(self, access: Access, deadline: float) -> None:
        """Connect to the peer and authenticate, if the transport needs that before it reads.

        Raise an error if the peer has not replied by `deadline` (monotonic clock).
        """

    def read(
        self, copies: Sequence[Copy], after: int | None = None, *, lease: bytes = b""
    ) -> Handle:
        """Read bytes of the peer into this process's memory. The peer is the source.

        The read begins once the peer's mark `after` (the number of a GPU event) has completed. Only
        transports with `marks_travel` accept a mark. `lease` is the key of the lease that covers
        the bytes, for transports that check it.
        """
        if after is not None and not self.owner.marks_travel:
            raise NotImplementedError(f"{type(self).__name__} cannot wait for a peer's GPU event")
        self.check()
        copies = [copy for copy in copies if len(copy)]
        check_bounds(copies, self.peer_memory, self.own_memory)
        for copy in copies:
            self.owner.check_takes(self.own_memory[copy.destination_pool])
        if not self.converts(copies):
            casts = {str(copy.cast) for copy in copies if copy.cast is not None}
            problem = "The link does not support a cast, or a pool is not aligned to its elements"
            raise errors.failed(", ".join(sorted(casts)), 'Pass how="staged"', problem)
        return self._read(copies, after, lease) if copies else Done()

    def _read(self, copies: Sequence[Copy], after: int | None, lease: bytes) -> Handle:
        del after, lease
        return self._post([copy.expanded() for copy in copies])

    def converts(self, copies: Sequence[Copy]) -> bool:
        """Whether `read` supports all element casts of these copies."""
        return all(copy.cast is None for copy in copies)

    def prepare(self, shape: RequestShape) -> PreparedRead | None:
        """Prepare reads for requests that differ only in block ids.

        Each read then starts in microseconds. `shape` describes the rest of the request. Return
        None if the link has no fast path.
        """
        del shape
        return None

    def follow(self, mark: int | None) -> None:
        """Make later operations wait for a GPU event of this process; None has no effect.

        The device waits if the transport supports that; otherwise the host waits here.
        """
        if mark is not None and self.owner.marks is not None:
            self.owner.marks.wait(mark)

    def check(self) -> None:
        """Raise an error if the link or its transport is closed, or the peer is lost."""
        self.owner.process.check()
        if not self.open or not self.owner.open:
            raise errors.closed("link")

    def _post(self, copies: Sequence[Copy]) -> Handle:
        """Start to read the runs of `copies`. A subclass overrides this method or `_read`."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect from the peer. A second call has no effect."""
        if self.open:
            self.open = False
            if not self.owner.process.forked:  # else the parent still uses it
                self._close()

    def sever(self) -> None:
        """Break the connection without waiting for the operations in flight.

        These operations fail. `Handle.settle` returns True for an operation as soon as it certainly
        no longer accesses memory. That takes seconds unless the link's `severs` is true.
        """
        self.close()

    def reaches(self, pool: int) -> bool:
        """Whether this link can access the peer's region with this pool index."""
        return pool in self.peer_memory

    def _close(self) -> None:
        """Close the connection in the transport's library, if there is one."""


class Transport(ABC):
    """Moves bytes between the memory of this process and the memory of its peers.

    With `shared="staging"`, peers can access only staging buffers that are lent to them. The pools
    stay private, and all bytes for a peer pass through such a buffer.
    """

    name: ClassVar[str]

    separation: ClassVar[Separation] = "leases"
    """How the transport keeps peers apart with `shared="staging"`."""

    marks_travel: ClassVar[bool] = False
    """Whether peers can wait for marks of this end; otherwise this end waits before it replies."""
    casts: ClassVar[bool] = False
    """Whether peers can cast elements while they read pools; otherwise this end converts."""
    oldest_version: ClassVar[int] = 0
    """The first protocol version whose peers can use the transport."""
    guarantees: Guarantees = Guarantees()
    """The guarantees of the transport to a node with a secret; see the guide to security."""

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
        """The address or device at which other hosts reach this transport; empty if they cannot."""
        self.memory: dict[int, Memory] = {}
        self.marks: DeviceMarks | None = None
        """The marks of the GPU with the registered memory; None if all memory is on the host."""
        self.board: OfferBoard | None = None
        """The board on which peers find offers; None if they must ask the node for them."""
        self.open = True
        self.copy_threads = 1
        """The maximum number of threads that copy for one read, if the CPU copies."""
        self.retired = 0
        """The number of connections that cannot be closed safely and are kept for good."""
        self._links: WeakSet[Link] = WeakSet()

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Register regions of this process by pool index. Peers can access the shared regions."""
        self.check()
        taken = set(memory) & set(self.memory)
        if taken:
            problem = "Each pool index can be registered only once"
            got = f"pools {sorted(taken)}, which are already registered"
            hint = "Close this transport, and register other memory with a new transport"
            raise AtlasError(Code.TWICE, problem, got=got, hint=hint)
        # Empty regions are left out, because not all libraries accept them.
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
        """Whether the transport can access memory on a device without staging."""
        return device == HOST

    def check_takes(self, region: Memory) -> None:
        """Raise `wrong_device` if the transport cannot access the memory of a region."""
        if not self.takes(region.device):
            raise AtlasError(
                Code.WRONG_DEVICE,
                f"The transport {self.name!r} does not support this device",
                got=f"memory on {region.device}",
                hint="Use staged transfers, or a transport that supports the device",
            )

    def shares(self, pool: int) -> bool:
        """Whether peers may access the region with this pool index."""
        region = self.memory.get(pool)
        reached = region is None or self.takes(region.device)
        lends = pool == STAGING and not self.lends_segments
        return reached and (self.shared == "all" or lends)

    @property
    def lends_segments(self) -> bool:
        """Whether each peer gets staging memory that no other peer can access."""
        return self.shared == "staging" and self.separation == "segments"

    def lend_to_one(self, nbytes: int) -> OnePeerMemory:
        """Allocate zeroed memory that only one peer can read."""
        what = f"allocate {nbytes:,} bytes for a single peer"
        raise NotImplementedError(f"{type(self).__name__} cannot {what}")

    @property
    def reachable(self) -> dict[int, Memory]:
        """The regions that peers may access, by pool index. The handshake contains these."""
        return {pool: region for pool, region in self.memory.items() if self.shares(pool)}

    @property
    def registered(self) -> int:
        """The number of registered regions."""
        return len(self.memory)

    def _register(self, memory: Mapping[int, Memory]) -> None:  # noqa: B027
        """Register the regions with the transport's library, if there is one."""

    def protect(self, security: Security, authorise: Authorise) -> None:  # noqa: B027
        """Use the node's `security` for connections, and call `authorise` before each served read.

        The node calls this method before it publishes anything. For a transport that cannot
        protect bytes, the call has no effect.
        """

    @abstractmethod
    def publish(self) -> bytes:
        """Return the metadata that a peer passes to `connect` along with the regions."""

    def connect(
        self,
        metadata: bytes,
        memory: Mapping[int, Memory],
        access: Access | None = None,
        *,
        deadline: float = math.inf,
    ) -> Link:
        """Connect to the peer that published `metadata` and registered these regions.

        Raise an error if the peer has not replied by `deadline` (monotonic clock). A transport may
        have a shorter time limit.
        """
        self.check()
        with errors.coded_limits():
            link = self._connect(metadata, memory)
            self._links.add(link)
            try:
                link.sign_in(access or Access(), deadline)
            except BaseException:
                link.close()
                raise
        return link

    @abstractmethod
    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Check the metadata, and return a link. `Link.sign_in` then connects to the peer."""

    def check(self) -> None:
        """Raise an error if the transport is closed, or belongs to the parent of this process."""
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
            for link in list(self._links):
                link.close()
            self._close()
            self.memory.clear()
            if self.marks is not None:
                self.marks.close()
            if self.board is not None:
                self.board.close()

    def _close(self) -> None:  # noqa: B027
        """Release all resources of the transport's library, if there is one."""
