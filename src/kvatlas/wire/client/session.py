"""`Session`: a node's connections to the ranks it pulls from or pushes to.

`pull` reads a request from its source ranks, and `push` has its destination ranks read it. Both
return a `Transfer` at once and run in the background. A pull is ready when every source rank of the
route has delivered all of its bytes and has then confirmed that its blocks were still held.
Otherwise the transfer fails with an error code and delivers nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import duration, natural
from kvatlas.models import CacheIdentity
from kvatlas.routing import Costs
from kvatlas.routing.block_tables import table_arrays
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire.arguments import check_request_name, text_list
from kvatlas.wire.block_ledger import BlockClaim
from kvatlas.wire.client.connections import PEER_GONE, Connections
from kvatlas.wire.client.filled_blocks import FilledBlocks
from kvatlas.wire.client.follow_ups import FollowUps
from kvatlas.wire.client.push import OfferedPush
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_transfer import RankTransfer
from kvatlas.wire.client.started_pull import StartedPull
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest, check_how
from kvatlas.wire.client.warm_shapes import plain_tables
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.protocol import How, Ok, Release, wrong_answer
from kvatlas.wire.rpc import log
from kvatlas.wire.server.offering import OfferingNode
from kvatlas.wire.transports.base import Link
from kvatlas.wire.transports.errors import failed, own_limit

Needed = Callable[[], int] | int | None
_RETRIED = PEER_GONE | {
    Code.LEASE_EXPIRED, Code.UNKNOWN_REQUEST, Code.CHECKSUM, Code.BUSY, Code.BUFFERS_RECLAIMED
}  # fmt: skip
"""Error codes that a retry on another replica may avoid."""
_AT_ONCE = 64
"""The maximum number of parts of transfers that run at once; others wait for one to end."""
_TURNS = 4
"""Parts that run at once while all of them progress: more would only contend."""
_TURN_SECONDS = 0.5
"""Seconds that a part waits for its turn while the parts before it do not progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between retries of a request that is not offered yet; doubled each time."""
_ANSWER_SECONDS = 5.0
"""Seconds that a peer has to answer, within the transfer's deadline."""


class Session:
    """A node's connections to the ranks of one plan. Several endpoints of one rank are replicas."""

    def __init__(
        self, node: OfferingNode, endpoints: Sequence[str], *, seconds: float = 10.0
    ) -> None:
        node.process.check()
        self._process = OwningProcess("session")
        self.node, endpoints, patience = node, text_list(endpoints, "endpoints"), duration(seconds)
        self._replicas: dict[int, list[str]] = {}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvatlas-transfer")
        self._beside = ThreadPoolExecutor(2 * _AT_ONCE, thread_name_prefix="kvatlas-beside")
        self._connections = Connections(node, endpoints, self._beside)
        self._follow_ups = FollowUps(self._workers, self._beside)
        self._turns = threading.Semaphore(_TURNS)
        self._running: WeakSet[Transfer] = WeakSet()
        self._filled = FilledBlocks(node.ledger, node.rank)
        self._closed = False
        try:
            for endpoint in endpoints:
                peer = self._connections.connect(endpoint, time.monotonic() + patience)
                self._replicas.setdefault(peer.rank, []).append(endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def peers(self) -> list[Peer]:
        """The peers as they were at the first connection, ordered by rank."""
        known = self._connections.known
        return [known[one] for rank in sorted(self._replicas) for one in self._replicas[rank]]

    def link(self, rank: int) -> Link:
        """Return the transport's link to a rank, for direct access to its memory.

        Over `tcp`, each read also needs the key of a lease.
        """
        for connection in map(self._connections.find, self._replicas.get(rank, ())):
            if connection is not None:
                return connection.link
        raise self._not_connected([rank])

    def pull(
        self,
        request: str,
        *,
        dst_blocks: Any,
        tokens: Any,
        src_blocks: Any = None,
        layers: Iterable[str] | None = None,
        seconds: float = 30.0,
        how: How = "auto",
        costs: Costs | None = None,
        checksums: bool = False,
        streamed: bool = False,
        recompute: int = 0,
        final: bool = False,
        wait_for_offer: float = 0.0,
        identity: CacheIdentity | None = None,
    ) -> Transfer:
        """Read a request's tokens from its source ranks into blocks of this node.

        `src_blocks` may be omitted: the source's offer contains them. With `streamed`, layers
        arrive one by one: `Transfer.layers` lists those that have arrived, and `wait_layers` waits
        for some. With `recompute`, this node computes the last `recompute` tokens itself: they are
        not transferred, and sliding windows arrive as the first of these tokens needs them. A
        `final` pull is this node's last read of the request, even if it reads only a part of the
        offer: the source may reuse its blocks once no other rank reads them. The pull waits up to
        `wait_for_offer` seconds for a request that is not offered yet. `identity` overrides the
        node's identity for this request, for example if it uses an adapter or a salt.

        Raises `blocks_in_use` if an offer, a push or another pull uses one of the blocks. The
        blocks of a failed pull stay in use until the transfer is `released`.
        """
        check_request_name(request)
        seconds, wait_for_offer = duration(seconds), duration(wait_for_offer)
        layers = None if layers is None else tuple(layers)
        if recompute:
            start, stop = token_range(tokens, self.node.plan.max_len)
            tokens = (start, max(start, stop - natural(recompute, "recompute")))
        started: dict[int, StartedPull] = {}
        incoming = self.node.route_from(self._any_peer())
        tables = plain_tables(dst_blocks)
        span = token_range(tokens, self.node.plan.max_len)
        claim = self._filled.claim(incoming, request, dst_blocks, tables, span, layers)
        try:
            plain = src_blocks is None and layers is None and how in ("auto", "direct")
            if plain and not checksums and not streamed and identity is None:
                self._start_warm(started, request, tokens, tables)
            dst_blocks = table_arrays(dst_blocks, "destination")
            ranks = incoming.sources(self.node.rank)
            warm = bool(ranks) and len(started) == len(ranks)
            total = started[ranks[0]].total if warm else None
            about = {"tokens": tokens, "layers": layers, "dst_blocks": dst_blocks}
            needed = partial(incoming.needed_bytes, dst_rank=self.node.rank, **about)
            wanted = TransferRequest(
                request, dst_blocks, src_blocks, tokens, layers, seconds, how, costs,
                checksums=checksums, streamed=streamed, final=final,
                wait_for_offer=wait_for_offer, mark=None if warm else self.node.mark(),
                identity=identity,
            )  # fmt: skip
            brings = incoming.layers if layers is None else layers
            bytes_needed = needed if total is None else total
            return self._start(wanted, ranks, bytes_needed, brings, claim, started)
        except BaseException:
            for one in started.values():
                one.abandon()
            claim.release()
            raise

    def release(self, request: str, *, seconds: float = _ANSWER_SECONDS) -> Transfer:
        """Notify all ranks of the session that this node has finished reading a request.

        A rank ends its offer once every destination rank that reads from it has read or released
        the request. A rank that no destination needs ends its offer at the first notification. The
        returned transfer is ready when all ranks are notified. The offer of an unreachable rank
        ends when it expires.
        """
        check_request_name(request)
        self._process.check()  # before the lock, which a thread of the parent may hold
        with self._lock:
            self._any_peer()
            return self._tell(request, list(self._replicas), duration(seconds))

    def push(
        self,
        request: str,
        *,
        src_blocks: Any,
        tokens: Any,
        seconds: float = 30.0,
        how: How = "auto",
        checksums: bool = False,
        identity: CacheIdentity | None = None,
    ) -> Transfer:
        """Have every rank that reads from this node read a request's tokens from its blocks.

        The destination must expect the request from this node, with the same tokens. This node
        offers the blocks to it and asks it to pull them. The transfer is ready once every
        destination rank has read and verified its part. The blocks must not change until the
        transfer is `released`. Raises `blocks_in_use` if a pull is filling one of the blocks.
        """
        check_request_name(request)
        check_how(how)
        seconds, node = duration(seconds), self.node
        ranks = node.readers(self._any_peer())
        self._check_connected(ranks)
        start, stop = token_range(tokens, node.plan.max_len)
        transfer = Transfer(request, ranks, None, seconds)
        if not ranks:
            return transfer
        push = OfferedPush(node, self._connections, transfer, (start, stop), how, checksums)
        readers = [self._connections.known[one] for rank in ranks for one in self._replicas[rank]]
        push.offer(src_blocks, readers, seconds, identity)
        try:
            with self._lock:
                self._any_peer()
                self._running.add(transfer)
                for rank in ranks:
                    transfer.use()
                    run = partial(push.run, rank, tuple(self._replicas[rank]))
                    self._workers.submit(transfer.add_part(run, quick=False))
        except BaseException:
            push.withdraw()
            raise
        return transfer

    def read_rank(self, transfer: Transfer, wanted: TransferRequest, rank: int) -> None:
        """Read one rank's part in the calling thread, into blocks that the caller has claimed."""
        self._take_turns(transfer, wanted, rank)

    def close(self) -> None:
        """Disconnect from all peers. Transfers in flight are cancelled.

        A call in a forked child has no effect.
        """
        if self._process.forked:
            return
        with self._lock:
            self._closed = True
            running = list(self._running)
        for transfer in running:
            transfer.cancel()
        self._follow_ups.close()
        self._workers.shutdown(wait=True)
        for transfer in running:
            transfer.join()
        self._beside.shutdown(wait=True)
        self._connections.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _any_peer(self) -> Peer:
        self._process.check()
        if self._closed or not self._connections.known:
            raise AtlasError(
                Code.PEER_LOST,
                "The session is closed" if self._closed else "The session has no peers",
                got="no connection",
                hint="Open a new session with the endpoints of the other plan's ranks",
            )
        return next(iter(self._connections.known.values()))

    def _check_connected(self, ranks: Sequence[int]) -> None:
        missing = [rank for rank in ranks if rank not in self._replicas]
        if missing:
            raise self._not_connected(missing)

    def _not_connected(self, ranks: Sequence[int]) -> AtlasError:
        return AtlasError(
            Code.NOT_A_SOURCE,
            f"The session is not connected to ranks {', '.join(map(str, ranks))}",
            got=f"connections to ranks {sorted(self._replicas)}",
            hint="Pass the endpoints of all ranks that the request needs",
        )

    def _start_warm(
        self,
        started: dict[int, StartedPull],
        request: str,
        tokens: Any,
        tables: Mapping[int, Int64s],
    ) -> None:
        """Start to read from the ranks for which the fast path applies; add them to `started`."""
        for rank, endpoints in self._replicas.items():
            if len(endpoints) == 1:
                read = StartedPull.begin(self._connections, endpoints[0], request, tokens, tables)
                if read is not None:
                    started[rank] = read

    def _start(
        self,
        wanted: TransferRequest,
        ranks: Sequence[int],
        needed: Needed,
        brings: Collection[str] | None,
        claim: BlockClaim,
        started: Mapping[int, StartedPull] = MappingProxyType({}),
    ) -> Transfer:
        self._check_connected(ranks)
        quick = bool(ranks) and all(map(self._sees_offers, ranks))
        total = needed() if callable(needed) and not quick else needed
        transfer = Transfer(wanted.request, ranks, total, wanted.seconds, brings, claim)
        with self._lock:
            self._any_peer()
            self._running.add(transfer)
            for rank in ranks:
                transfer.use()
                read = started.get(rank)
                run = partial(self._run_rank, transfer, wanted, rank, read)
                part = transfer.add_part(run, quick=quick)
                if read is None:
                    self._workers.submit(part)
                else:
                    then = partial(self._after_started, transfer, wanted, read)
                    self._follow_ups.add(transfer, part, then)
        return transfer

    def _sees_offers(self, rank: int) -> bool:
        """Whether this node finds the offers of a rank on its board, without a request."""
        found = map(self._connections.find, self._replicas[rank])
        return all(one and one.link.sees_offers for one in found)

    def _tell(self, request: str, ranks: Sequence[int], seconds: float) -> Transfer:
        """Notify all replicas of the given ranks that this node has finished reading a request."""
        transfer = Transfer(request, ranks, 0, seconds)
        with self._lock:
            self._running.add(transfer)
            for rank in ranks:
                self._beside.submit(self._tell_rank, transfer, rank)
        return transfer

    def _tell_rank(self, transfer: Transfer, rank: int) -> None:
        problem: AtlasError | None = None
        for endpoint in self._replicas[rank]:
            try:
                with self._connections.use(endpoint, transfer.deadline) as connection:
                    told = Release(session=connection.session, request=transfer.request)
                    answer = self.node.channels.ask(endpoint, told, deadline=transfer.deadline)
                    if not isinstance(answer, Ok):
                        raise wrong_answer(answer, Ok)
            except AtlasError as refused:
                problem = refused
                log.warning(
                    "release failed request=%r rank=%d: %s", transfer.request, rank, refused
                )
        if problem is None:
            transfer.finished(rank)
        else:
            transfer.failed(rank, problem)

    def _tell_unread(self, request: str) -> None:
        """Release a request at ranks from which no rank of this plan reads.

        Such a rank holds only bytes that other ranks hold too. Has no effect once the threads of a
        closed session have ended.
        """
        incoming = self.node.route_from(next(iter(self._connections.known.values())))
        read = {one for mine in range(self.node.plan.ranks) for one in incoming.sources(mine)}
        with suppress(RuntimeError):  # no threads are left: the offers expire
            self._tell(request, sorted(set(self._replicas) - read), _ANSWER_SECONDS)

    def _run_rank(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, started: StartedPull | None
    ) -> None:
        """Carry out one rank's part, and record its outcome."""
        try:
            about = (self.node, wanted, transfer, _ANSWER_SECONDS)
            if started is not None and not started.finish(*about):
                # The normal path reads again or raises the error. Its reads are still ordered
                # after the caller's stream, because the queue was when this read was started.
                started = None
            if started is None:
                lease = self._take_turns(transfer, wanted, rank)
        except AtlasError as refused:
            error = refused
        except Exception as defect:
            log.exception("transfer failed request=%r rank=%d", wanted.request, rank)
            got, hint = f"{type(defect).__name__}: {defect}", "See the traceback in the log"
            error = own_limit(defect) or failed(got, hint)
        else:
            if started is not None:
                transfer.finished(rank)  # `_after_started` does the rest in another thread
                return
            self.node.metrics.ended("pull", "ok")
            transfer.finished(rank)
            self._after_reading(transfer, lease, self._beside.submit)
            lease.learn()
            return
        finally:
            transfer.leave()
        transfer.failed(rank, error)
        code = error.code if transfer.error is None else transfer.error.code
        self.node.metrics.ended("pull", str(code))
        log.warning("transfer failed request=%r rank=%d code=%s", wanted.request, rank, error.code)

    def _after_reading(
        self, transfer: Transfer, lease: RankLease, tell: Callable[..., object]
    ) -> None:
        """Notify the sources of a read without a lease, and the other ranks of a final one."""
        lease.tell_read(tell)
        if lease.wanted.final and transfer.ready:
            self._tell_unread(lease.wanted.request)

    def _after_started(
        self, transfer: Transfer, wanted: TransferRequest, started: StartedPull
    ) -> None:
        """Finish the work after a read that was started early. Does nothing if the read failed."""
        lease = started.tidy_up(self.node, wanted, transfer, _ANSWER_SECONDS)
        if lease is not None:
            self.node.metrics.ended("pull", "ok")
            self.node.metrics.add(bytes=started.nbytes, descriptors=started.runs)
            self._after_reading(transfer, lease, lambda act, told: act(told))

    def _take_turns(self, transfer: Transfer, wanted: TransferRequest, rank: int) -> RankLease:
        """Run one rank's part when it is its turn. Retry while the request is not offered yet."""
        pause, until = _FIRST_PAUSE, transfer.begun + wanted.wait_for_offer
        while True:
            has_turn = self._turns.acquire(timeout=_TURN_SECONDS)
            try:
                return self._try_replicas(transfer, wanted, rank)
            except AtlasError as refused:
                if refused.code is not Code.UNKNOWN_REQUEST or time.monotonic() >= until:
                    raise
            finally:
                if has_turn:
                    self._turns.release()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try_replicas(self, transfer: Transfer, wanted: TransferRequest, rank: int) -> RankLease:
        """Try the replicas in turn, connected ones first. Return the lease that succeeded."""
        unknown = {one: self._connections.find(one) is None for one in self._replicas[rank]}
        left = deque(sorted(unknown, key=unknown.__getitem__))
        reconnected: set[str] = set()
        while True:
            endpoint = left.popleft()
            # A replica that never answers leaves time for the others.
            remaining = transfer.deadline - time.monotonic()
            patience = min(_ANSWER_SECONDS, remaining / (len(left) + 1))
            try:
                transfer.check_cancelled()
                with self._connections.use(endpoint, time.monotonic() + patience) as connection:
                    part = (self.node, connection, wanted, transfer, patience)
                    lease = RankLease(*part, others=bool(left))
                    RankTransfer(lease).run()
                return lease
            except AtlasError as refused:
                if refused.code is Code.UNKNOWN_SESSION and endpoint not in reconnected:
                    # The peer has restarted: connect to it again, once.
                    reconnected.add(endpoint)
                    left.appendleft(endpoint)
                if refused.code is Code.BUFFERS_RECLAIMED:
                    left.append(endpoint)  # it starts over, there last
                if refused.code not in _RETRIED or transfer.done or not left:
                    raise
                transfer.restart(rank)
