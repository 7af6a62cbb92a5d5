"""Requests that other nodes push: announced by each source rank, then read by this node.

A push is a pull that the source asks for. The source offers the request under a name that only the
destination learns, and announces the name. The destination checks the announcer, connects back, and
reads the rank's part in the same way as any other pull. Only that pull makes the request ready.

An announcement passes through three states:

- announced: this node connects to the announced endpoint and checks that the announcing node
  answers there;
- current: this announcement has replaced the rank's previous announcement. The previous pull was
  ended and can no longer write to the blocks. This node now reads the rank's part;
- over: the part has arrived, or the pull has failed with an error code. A part that has arrived is
  not read again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.wire import protocol
from kvatlas.wire.arguments import check_new_request
from kvatlas.wire.block_ledger import BlockClaim
from kvatlas.wire.client.announced_endpoint import announced_endpoint
from kvatlas.wire.client.connections import Connections
from kvatlas.wire.client.rank_pull import ANSWER_SECONDS, RankReader
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.encoding import BusyError
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.leases import lease_expired
from kvatlas.wire.rpc import Caller, log
from kvatlas.wire.server.offering import OfferingNode
from kvatlas.wire.transports.errors import failed

_AT_ONCE = 64
"""The maximum number of announcements that are read at once; others wait for one to end."""
_MAX_CONNECTING = 4
"""The maximum number of announcements of one rank that this node connects to at once."""
_MAX_IDLE = 64
"""The maximum number of idle connections to sources that are kept."""
_KEPT = 1024
"""The maximum number of announcements whose outcome is kept, for sources that ask again."""
_LONGEST_WAIT, _MAX_WAITING = 0.2, 16
"""How many seconds an answer waits for the end of a pull, and how many answers do so at once."""
_SETTLE_SECONDS = 30.0
"""Seconds that `forget` waits until no read can write to the blocks."""


@dataclass(eq=False)
class Announcement:
    """A source rank's announcement of its part of a request, and the pull of that part."""

    peer: Peer
    question: protocol.Announce
    came_from: tuple[str, bool]
    """The address of the announcing peer, and whether it is an address of this host."""
    transfer: Transfer
    arrived: bool = False
    """Whether this node has read and verified the part, and recorded it in `Expected.arrived`."""

    @property
    def key(self) -> tuple[str, bytes, str]:
        """The node's name, its process, and the offer's name: unique to one announcement."""
        return self.peer.name, self.peer.incarnation, self.question.offer

    @property
    def endpoint(self) -> str:
        """The announced endpoint. It must be at the host from which it was announced."""
        host, here = self.came_from
        return announced_endpoint(self.question.endpoint, host, on_this_host=here)

    def end(self) -> None:
        """End the pull, because the request was forgotten or this announcement was replaced."""
        self.transfer.failed(self.peer.rank, lease_expired())


@dataclass(eq=False)
class Expected:
    """A request that other nodes push, and the blocks that it will fill."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    source: bytes
    """The hash of the source's plan."""
    sources: frozenset[int]
    """The ranks of the source that this node reads from."""
    pushers: frozenset[str]
    """Names of the nodes that may push."""
    claim: BlockClaim
    identity: CacheIdentity | None = None
    """The cache identity that the request must have; None for the node's identity."""
    mark: int | None = None
    """The GPU event after which the blocks may be written; None if they are on the host."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set once this node has read every source rank's part."""
    arrived: dict[int, int] = field(default_factory=dict)
    """For each source rank whose part was read, the number of bytes of the part."""
    connecting: list[Announcement] = field(default_factory=list)
    current: defaultdict[int, list[Announcement]] = field(default_factory=lambda: defaultdict(list))
    """By rank, announcements whose pulls may write to the blocks. The last in a list is current."""
    forgotten: bool = False

    def may_be_pushed_by(self, peer: Peer) -> bool:
        """Whether a peer may push its part of the request, and the part has not arrived yet."""
        named = peer.plan_hash == self.source and peer.name in self.pushers
        return named and peer.rank in self.sources and peer.rank not in self.arrived


class ExpectedRequests:
    """The requests that a node expects. Any thread may use them.

    A thread that holds this object's lock may take the lock of a transfer or of the block ledger,
    but no other lock, and never waits for I/O.
    """

    def __init__(self, node: OfferingNode) -> None:
        self._node = node
        self.requests: dict[str, Expected] = {}
        self._known: OrderedDict[tuple[str, bytes, str], Announcement] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting = threading.Semaphore(_MAX_WAITING)
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvatlas-expected")
        self._background = ThreadPoolExecutor(2 * _AT_ONCE, thread_name_prefix="kvatlas-background")
        self._connections = Connections(node, self._background, _MAX_IDLE)
        self._reader = RankReader(node, self._connections)

    # -- the node ---------------------------------------------------------------------------

    def add(self, request: str, **about: Any) -> Expected:
        """Expect a request, and claim its blocks. Raise `blocks_in_use` if other claims conflict.

        `about` contains the other fields of the new `Expected`.
        """
        ledger = self._node.ledger
        with self._lock:
            check_new_request(request, self.requests)
            claim = ledger.claim("expected", request, ledger.by_pool(about["blocks"]))
            expected = self.requests[request] = Expected(request, claim=claim, **about)
        return expected

    def forget(self, request: str) -> None:
        """Stop expecting a request, and wait until no read can write to its blocks.

        Raise `deadline` if that takes too long.
        """
        with self._lock:
            expected = self.requests.pop(request, None)
            if expected is None:
                return
            expected.forgotten = True
            reading = [one for each in expected.current.values() for one in each]
            announced = [*expected.connecting, *reading]
        for one in announced:
            if not one.arrived:
                one.end()
        if not _all_released(reading, time.monotonic() + _SETTLE_SECONDS):
            expected.claim.quarantine()
            self._node.quarantine.hold([one.transfer for one in reading], expected.claim.release)
            problem = "The request is forgotten, but a read may still write to its blocks"
            hint = "Use other blocks; those of this request stay quarantined until the read is over"
            raise AtlasError(Code.DEADLINE, problem, got=f"request {request!r}", hint=hint)
        expected.claim.release()

    def sweep(self) -> None:
        """Disconnect from sources that have exited."""
        self._connections.drop_lost()

    def close(self) -> None:
        """Forget all requests, and disconnect from their sources."""
        for request in list(self.requests):
            with suppress(AtlasError):
                self.forget(request)
        self._workers.shutdown(wait=True)
        self._background.shutdown(wait=True)
        self._connections.close()

    # -- what peers announce ------------------------------------------------------------------

    def announced(
        self, question: protocol.Announce, peer: Peer, caller: Caller
    ) -> protocol.Announced:
        """Start the announced pull unless it was started before, and return its progress.

        Wait briefly for the end of the pull. If the pull has failed, raise its error.
        """
        one = self._find_or_add(question, peer, caller)
        if self._waiting.acquire(blocking=False):
            try:
                with suppress(AtlasError):
                    one.transfer.wait(min(question.seconds, _LONGEST_WAIT))
            finally:
                self._waiting.release()
        if not one.arrived and one.transfer.done and one.transfer.error is not None:
            raise one.transfer.error
        return protocol.Announced(arrived=one.arrived, moved=one.transfer.moved)

    def _find_or_add(self, question: protocol.Announce, peer: Peer, caller: Caller) -> Announcement:
        transfer = Transfer(question.request, [peer.rank], None, question.seconds)
        came_from = caller.host, caller.on_this_host
        one = Announcement(peer, question, came_from, transfer)
        with self._lock:
            if one.key in self._known:
                return self._known[one.key]
            expected = self.requests.get(question.request)
            if expected is None or not expected.may_be_pushed_by(peer):
                raise _not_expected(question)
            _check_tokens(expected, question)
            if sum(other.peer.rank == peer.rank for other in expected.connecting) >= (
                _MAX_CONNECTING
            ):
                raise BusyError(
                    f"{_MAX_CONNECTING} pushes of rank {peer.rank} that are still connecting",
                    0.25,
                )
            expected.connecting.append(one)
            self._known[one.key] = one
            self._drop_known()
        log.info("push request=%r name=%r rank=%d", question.request, peer.name, peer.rank)
        self._workers.submit(self._read, expected, one)
        return one

    def _drop_known(self) -> None:
        """If more than `_KEPT` announcements are stored, drop the oldest whose pull has ended."""
        if len(self._known) > _KEPT:
            over = (key for key, one in self._known.items() if one.transfer.done)
            if (oldest := next(over, None)) is not None:
                del self._known[oldest]

    # -- one announcement ---------------------------------------------------------------------

    def _read(self, expected: Expected, one: Announcement) -> None:
        """Read an announced part, and record the outcome."""
        rank, transfer = one.peer.rank, one.transfer

        def read() -> None:
            endpoint = one.endpoint
            with self._connected(one.peer, endpoint, transfer.deadline):
                needed = self._needed(expected, one.peer)
                self._replace_older(expected, one)
                wanted = self._wanted(expected, one)
                self._reader.read(transfer, wanted, rank, [endpoint])
            self._count(expected, one, needed)

        try:
            transfer.run_rank(rank, read, partial(self._node.metrics.ended, "pull"))
        finally:
            with self._lock:
                if one in expected.connecting:
                    expected.connecting.remove(one)
        log.info("push ended %r", transfer)

    @contextmanager
    def _connected(self, peer: Peer, endpoint: str, deadline: float) -> Iterator[None]:
        """Connect to an endpoint. Raise an error unless `peer` is the process that answers there.

        The connection stays open for the next push from that process.
        """
        before = self._connections.find(endpoint)
        if before is not None and before.peer.incarnation != peer.incarnation:
            self._connections.drop(before)  # most likely that process has ended
        until = min(deadline, time.monotonic() + ANSWER_SECONDS)
        with self._connections.use(endpoint, until) as connection:
            _check_same_process(peer, connection.peer, endpoint)
            yield

    def _wanted(self, expected: Expected, one: Announcement) -> TransferRequest:
        asked = one.question
        return TransferRequest(
            asked.offer, expected.blocks, None, (expected.start, expected.stop), None,
            asked.seconds, asked.how, None, checksums=asked.checksums, streamed=False,
            identity=expected.identity, mark=expected.mark, replaceable=True,
        )  # fmt: skip

    def _needed(self, expected: Expected, peer: Peer) -> int:
        """Return how many bytes all source ranks together must deliver for the request."""
        node, tokens = self._node, (expected.start, expected.stop)
        return node.route_from(peer).needed_bytes(
            destination_rank=node.rank,
            tokens=tokens,
            layers=None,
            destination_blocks=expected.blocks,
        )

    def _replace_older(self, expected: Expected, one: Announcement) -> None:
        """Make an announcement current, then end older pulls of its rank and wait for their end."""
        rank = one.peer.rank
        with self._lock:
            expected.connecting.remove(one)
            one.transfer.check_cancelled()
            if expected.forgotten or rank in expected.arrived:
                raise lease_expired()
            older = [other for other in expected.current[rank] if not other.transfer.released]
            expected.current[rank] = [*older, one]
        for other in older:
            log.warning("replaced an older push request=%r rank=%d", expected.request, rank)
            other.end()
        if not _all_released(older, one.transfer.deadline):
            problem = "An older push did not end in time, and may still write to the blocks"
            hint = "Retry the push, or call forget() and then expect() with other blocks"
            raise AtlasError(Code.DEADLINE, problem, got=f"a push of rank {rank}", hint=hint)

    def _count(self, expected: Expected, one: Announcement, needed: int) -> None:
        """Record that a rank's part was read.

        After the last part, the request becomes ready if all parts together have `needed` bytes.
        Otherwise an error is raised.
        """
        rank = one.peer.rank
        with self._lock:
            one.transfer.check_cancelled()
            if expected.forgotten or expected.current[rank][-1] is not one:
                raise lease_expired()
            parts = {**expected.arrived, rank: one.transfer.moved}
            complete = expected.sources <= set(parts)
            if complete and sum(parts.values()) != needed:
                got, hint = (
                    f"{sum(parts.values()):,} bytes, expected {needed:,}",
                    "Please report this as a bug in kvatlas",
                )
                raise failed(got, hint, "The push delivered the wrong number of bytes")
            expected.arrived, one.arrived = parts, True
            if complete:
                expected.claim.release()
                expected.ready.set()


def _all_released(announced: list[Announcement], deadline: float) -> bool:
    """Wait until no pull of these announcements can write to the blocks.

    Return False if the deadline passes first.
    """
    return all(
        one.transfer.wait_released(max(0.0, deadline - time.monotonic())) for one in announced
    )


def _check_same_process(announced: Peer, reached: Peer, endpoint: str) -> None:
    """Raise an error unless the peers `announced` and `reached` are the same process.

    `announced` has announced the endpoint, and `reached` answers there.
    """
    same = all(
        getattr(announced, name) == getattr(reached, name)
        for name in ("name", "incarnation", "rank", "plan_hash")
    )
    if not same:
        raise AtlasError(
            Code.BAD_HANDSHAKE,
            "The process at the announced endpoint is not the one that announced the push",
            got=f"{_process(reached)} at {endpoint}, expected {_process(announced)}",
            hint="Push from a node whose endpoint the destination can connect to",
        )


def _process(peer: Peer) -> str:
    process, plan = peer.incarnation.hex()[:8], peer.plan_hash.hex()[:8]
    return f"node {peer.name!r} (rank {peer.rank}, process {process}, plan {plan})"


def _check_tokens(expected: Expected, question: protocol.Announce) -> None:
    if (question.start, question.stop) != (expected.start, expected.stop):
        raise AtlasError(
            Code.BAD_TOKENS,
            "The tokens of a push must be those that the destination expects, "
            f"({expected.start}, {expected.stop})",
            got=(question.start, question.stop),
            hint="Pass the same tokens to expect() and push()",
        )


def _not_expected(question: protocol.Announce) -> AtlasError:
    return AtlasError(
        Code.UNKNOWN_REQUEST,
        "The destination does not expect this request from the pushing node, or has already "
        "received the node's part of the request",
        got=f"request {question.request!r}",
        hint="Call expect() at the destination first. Set source= to the pushing node's plan, and "
        "include the pushing node's name in pushers=",
    )
