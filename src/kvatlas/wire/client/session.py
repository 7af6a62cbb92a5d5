"""`Session`: a node's connections to the ranks it pulls from or pushes to.

`pull` reads a request from its source ranks, and `push` has its destination ranks read it. Both
return a `Transfer` at once and run in the background. A pull is ready when every source rank of the
route has delivered all of its bytes and has then confirmed that its blocks were still held.
Otherwise the transfer fails with an error code and delivers nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from kvatlas.wire.client.connections import Connections
from kvatlas.wire.client.fast_path import LaunchedPull
from kvatlas.wire.client.filled_blocks import FilledBlocks
from kvatlas.wire.client.follow_ups import FollowUps
from kvatlas.wire.client.prepared_shapes import plain_tables
from kvatlas.wire.client.push import OfferedPush
from kvatlas.wire.client.rank_pull import ANSWER_SECONDS, RankPull, RankReader
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest, check_how
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.protocol import How, Ok, Release
from kvatlas.wire.server.offering import OfferingNode
from kvatlas.wire.transports.base import Link

Needed = Callable[[], int] | int | None
_AT_ONCE = 64
"""The maximum number of parts of transfers that run at once; others wait for one to end."""


class Session:
    """A node's connections to the ranks of one plan. Several endpoints of one rank are replicas."""

    def __init__(
        self, node: OfferingNode, endpoints: Sequence[str], *, timeout: float = 10.0
    ) -> None:
        node.process.check()
        self._process = OwningProcess("session")
        self.node, endpoints, timeout = node, text_list(endpoints, "endpoints"), duration(timeout)
        self._replicas: dict[int, list[str]] = {}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvatlas-transfer")
        self._background = ThreadPoolExecutor(2 * _AT_ONCE, thread_name_prefix="kvatlas-background")
        self._connections = Connections(node, self._background)
        self._reader = RankReader(node, self._connections)
        self._follow_ups = FollowUps(self._workers, self._background)
        self._running: WeakSet[Transfer] = WeakSet()
        self._filled = FilledBlocks(node.ledger, node.rank)
        self._closed = False
        try:
            for endpoint in endpoints:
                with self._connections.use(endpoint, time.monotonic() + timeout) as connection:
                    self._connections.known[endpoint] = connection.peer
                    self._replicas.setdefault(connection.peer.rank, []).append(endpoint)
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
        destination_blocks: Any,
        tokens: Any,
        source_blocks: Any = None,
        layers: Iterable[str] | None = None,
        timeout: float = 30.0,
        how: How = "auto",
        costs: Costs | None = None,
        checksums: bool = False,
        streamed: bool = False,
        recompute: int = 0,
        final: bool = False,
        wait_for_offer: float = 0.0,
        identity: CacheIdentity | None = None,
        patient: bool = False,
    ) -> Transfer:
        """Read a request's tokens from its source ranks into blocks of this node.

        `source_blocks` may be omitted: the source's offer contains them. `layers` are the names of
        the layers to read; None for all. The pull fails after `timeout` seconds; if `patient` is
        true, after `timeout` seconds without progress. `how` selects the way to move the bytes (see
        `How`), and `costs` replaces the measured costs for `auto`. If `checksums` is true, the
        bytes at both ends are compared by checksums before the pull is ready.

        If `streamed` is true, layers arrive one by one: `Transfer.layers` lists the layers that
        have arrived, and `wait_layers` waits for some. The last `recompute` tokens are not
        transferred, because this node computes them itself. The pull then includes the sliding
        windows that the first of these tokens needs. If `final` is true, this is the node's last
        read of the request, even if it reads only a part of the offer: the source may reuse its
        blocks once no other rank reads them. The pull waits up to `wait_for_offer` seconds for a
        request that is not offered yet. `identity` overrides the node's identity for this request,
        for example if it uses an adapter or a salt.

        Raises `blocks_in_use` if an offer, a push or another pull uses one of the blocks. The
        blocks of a failed pull stay in use until the transfer is `released`.
        """
        check_request_name(request)
        timeout, wait_for_offer = duration(timeout), duration(wait_for_offer)
        layers = None if layers is None else tuple(layers)
        if recompute:
            start, stop = token_range(tokens, self.node.plan.max_len)
            tokens = (start, max(start, stop - natural(recompute, "recompute")))
        launched: dict[int, LaunchedPull] = {}
        incoming = self.node.route_from(self._any_peer())
        tables = plain_tables(destination_blocks)
        span = token_range(tokens, self.node.plan.max_len)
        claim = self._filled.claim(incoming, request, destination_blocks, tables, span, layers)
        try:
            plain = source_blocks is None and layers is None and how in ("auto", "direct")
            if plain and not checksums and not streamed and identity is None:
                self._launch(launched, request, tokens, tables)
            destination_blocks = table_arrays(destination_blocks, "destination")
            ranks = incoming.sources(self.node.rank)
            all_launched = bool(ranks) and len(launched) == len(ranks)
            wanted = TransferRequest(
                request, destination_blocks, source_blocks, tokens, layers, timeout, how, costs,
                checksums=checksums, streamed=streamed, final=final,
                wait_for_offer=wait_for_offer, mark=None if all_launched else self.node.mark(),
                identity=identity, patient=patient,
            )  # fmt: skip
            needed: Needed = launched[ranks[0]].total if all_launched else None
            if needed is None:
                about = {
                    "tokens": tokens,
                    "layers": layers,
                    "destination_blocks": destination_blocks,
                }
                needed = partial(incoming.needed_bytes, destination_rank=self.node.rank, **about)
            brings = incoming.layers if layers is None else layers
            return self._start(wanted, ranks, needed, brings, claim, launched)
        except BaseException:
            for one in launched.values():
                one.abandon()
            claim.release()
            raise

    def release(self, request: str, *, timeout: float = ANSWER_SECONDS) -> Transfer:
        """Notify all ranks of the session that this node has finished reading a request.

        A rank ends its offer once every destination rank that reads from it has read or released
        the request. A rank from which no destination rank reads ends its offer at the first
        notification. The returned transfer is ready when all ranks are notified. The offer of an
        unreachable rank ends when it expires.
        """
        check_request_name(request)
        self._process.check()  # before the lock, which a thread of the parent may hold
        with self._lock:
            self._any_peer()
            return self._tell(request, list(self._replicas), duration(timeout))

    def push(
        self,
        request: str,
        *,
        source_blocks: Any,
        tokens: Any,
        timeout: float = 30.0,
        how: How = "auto",
        checksums: bool = False,
        identity: CacheIdentity | None = None,
    ) -> Transfer:
        """Have each destination rank read its part of a request from this node's blocks.

        The destination must expect the request from this node, with the same tokens. This node
        offers the blocks to the destination and asks it to pull them. The push fails after
        `timeout` seconds. `how` selects the way to move the bytes (see `How`). If `checksums` is
        true, each destination rank compares checksums of its part with this node.

        The transfer is ready once every destination rank has read its part. The blocks must not
        change until the transfer is `released`. Raises `blocks_in_use` if a pull is filling one of
        the blocks.
        """
        check_request_name(request)
        check_how(how)
        timeout, node = duration(timeout), self.node
        ranks = node.readers(self._any_peer())
        self._check_connected(ranks)
        start, stop = token_range(tokens, node.plan.max_len)
        transfer = Transfer(request, ranks, None, timeout)
        if not ranks:
            return transfer
        push = OfferedPush(node, self._connections, transfer, (start, stop), how, checksums)
        readers = [self._connections.known[one] for rank in ranks for one in self._replicas[rank]]
        push.offer(source_blocks, readers, timeout, identity)
        try:
            with self._lock:
                self._any_peer()
                self._running.add(transfer)
                for rank in ranks:
                    transfer.use()
                    run = partial(push.run, rank, tuple(self._replicas[rank]))
                    self._workers.submit(transfer.add_part(run))
        except BaseException:
            push.withdraw()
            raise
        return transfer

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
        self._background.shutdown(wait=True)
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
                hint="Open a new session, and pass the endpoints of its peers",
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

    def _launch(
        self,
        launched: dict[int, LaunchedPull],
        request: str,
        tokens: Any,
        tables: Mapping[int, Int64s],
    ) -> None:
        """Start to read from each rank for which the fast path applies.

        The started reads are added to `launched`, by rank.
        """
        for rank, endpoints in self._replicas.items():
            if len(endpoints) == 1:
                read = LaunchedPull.launch(self._connections, endpoints[0], request, tokens, tables)
                if read is not None:
                    launched[rank] = read

    def _start(
        self,
        wanted: TransferRequest,
        ranks: Sequence[int],
        needed: Needed,
        brings: Collection[str] | None,
        claim: BlockClaim,
        launched: Mapping[int, LaunchedPull],
    ) -> Transfer:
        self._check_connected(ranks)
        quick = bool(ranks) and all(map(self._sees_offers, ranks))
        total = needed() if callable(needed) and not quick else needed
        transfer = Transfer(
            wanted.request, ranks, total, wanted.timeout, brings, claim, patient=wanted.patient
        )
        with self._lock:
            self._any_peer()
            self._running.add(transfer)
            for rank in ranks:
                transfer.use()
                read = launched.get(rank)
                run = partial(self._run_rank, transfer, wanted, rank, read)
                if read is None:
                    self._workers.submit(transfer.add_part(run, quick=quick))
                else:
                    soon = partial(read.ends_within, transfer)
                    part = transfer.add_part(run, quick=quick, ends_within=soon)
                    then = partial(self._after_launched, transfer, wanted, read)
                    self._follow_ups.add(part, then)
        return transfer

    def _sees_offers(self, rank: int) -> bool:
        """Whether this node sees a rank's offers in shared memory, without asking the rank."""
        found = map(self._connections.find, self._replicas[rank])
        return all(one is not None and one.link.board is not None for one in found)

    def _tell(self, request: str, ranks: Sequence[int], timeout: float) -> Transfer:
        """Notify all replicas of the given ranks that this node has finished reading a request."""
        transfer = Transfer(request, ranks, 0, timeout)
        with self._lock:
            self._running.add(transfer)
        for rank in ranks:
            try:
                self._background.submit(self._tell_rank, transfer, rank)
            except RuntimeError:  # the session is being closed, and waits for this thread
                self._tell_rank(transfer, rank)
        return transfer

    def _tell_rank(self, transfer: Transfer, rank: int) -> None:
        def tell() -> None:
            problem: AtlasError | None = None
            for endpoint in self._replicas[rank]:
                try:
                    self._tell_endpoint(transfer, endpoint)
                except AtlasError as refused:  # the others are notified all the same
                    problem = refused
            if problem is not None:
                raise problem

        transfer.run_rank(rank, tell)

    def _tell_endpoint(self, transfer: Transfer, endpoint: str) -> None:
        with self._connections.use(endpoint, transfer.deadline) as connection:
            told = Release(session=connection.session, request=transfer.request)
            self.node.channels.ask(endpoint, told, (Ok,), deadline=transfer.deadline)

    def _tell_unread(self, transfer: Transfer, wanted: TransferRequest) -> None:
        """After a final pull, release the request at source ranks that no rank of this plan reads.

        Such a source rank holds only bytes that other source ranks hold as well.
        """
        if not wanted.final or not transfer.ready:
            return
        incoming = self.node.route_from(next(iter(self._connections.known.values())))
        read = {one for mine in range(self.node.plan.ranks) for one in incoming.sources(mine)}
        self._tell(wanted.request, sorted(set(self._replicas) - read), ANSWER_SECONDS)

    def _run_rank(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, launched: LaunchedPull | None
    ) -> None:
        """Run one rank's part of a pull, and record its outcome."""
        pulls: list[RankPull] = []

        def read() -> None:
            about = (self.node, wanted, transfer, ANSWER_SECONDS)
            try:
                if launched is None or not launched.finish(*about):
                    # If a launched read is invalid, this reads again or raises the error. The reads
                    # still run after the work on the caller's stream: the queue was ordered after
                    # that work when the first read was launched.
                    pulls.append(self._reader.read(transfer, wanted, rank, self._replicas[rank]))
            finally:
                transfer.leave()

        if transfer.run_rank(rank, read, partial(self.node.metrics.ended, "pull")):
            for pull in pulls:  # after a read that was launched, `_after_launched` does this
                if pull.lease.seen is not None:
                    self._background.submit(pull.follow_up)
                self._tell_unread(transfer, wanted)

    def _after_launched(
        self, transfer: Transfer, wanted: TransferRequest, launched: LaunchedPull
    ) -> None:
        """Finish the work after a launched read. Does nothing if the read failed."""
        lease = launched.tidy_up(self.node, wanted, transfer, ANSWER_SECONDS)
        if lease is not None:
            lease.notify_source()
            self._tell_unread(transfer, wanted)
