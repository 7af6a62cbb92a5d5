"""A node's state: its rank's memory, its leases, and its routes to and from peers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
import numpy as np

from kvatlas.copying.memory import HOST, STAGING, Memory
from kvatlas.copying.memory_copy import as_bytes, memory_of
from kvatlas.copying.movers import GpuMover, HostMover, PoolMover, pools_device
from kvatlas.copying.stream_pieces import AnyStream, StreamPiece
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import Copy, Route, Scales, fingerprint, route
from kvatlas.routing.block_tables import checked_rank
from kvatlas.wire import encoding, protocol
from kvatlas.wire.arguments import check_node_name, checked_identity
from kvatlas.wire.block_ledger import BlockLedger
from kvatlas.wire.channels import Channels
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.handshake_checks import (
    Peer,
    PeerPlans,
    check_memory,
    check_plan_size,
    check_same_identity,
    conversion_terms,
    plan_hash,
)
from kvatlas.wire.leases import Leases
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.quarantine import Quarantine
from kvatlas.wire.security import PeerAccess, Secret, Security, TlsContexts
from kvatlas.wire.server.lending import Lending
from kvatlas.wire.staging import PeerSegments, StagingBuffers, staging_memory
from kvatlas.wire.transports.access import AskedRead
from kvatlas.wire.transports.base import Transport

_MAX_ROUTES = 128


@dataclass(eq=False, repr=False)
class NodeState:
    """One rank's memory, the leases on it, and the routes to and from its peers."""

    plan: Plan
    _: KW_ONLY
    rank: int = 0
    memory: Any
    transport: Transport
    name: str = ""
    listen: str = "tcp://127.0.0.1:0"
    secret: Secret = None
    tls: TlsContexts | None = None
    peers: Mapping[str, PeerAccess] | None = None
    unprotected: bool = False
    piece: int = 4 << 20
    buffers: int = 8
    convert: str | None = None
    scales: Scales = None
    identity: CacheIdentity | None = None
    check_identity: bool = True

    def __post_init__(self) -> None:
        self.plan_hash = plan_hash(self.plan)
        self.incarnation = protocol.new_key()
        self.process = OwningProcess("node")
        self.name = self.name or f"kvatlas-{self.incarnation.hex()[:12]}"
        self.metrics = Metrics()
        self.channels = Channels(self.security)
        self.peer_plans = PeerPlans()
        self.routes: OrderedDict[tuple[object, ...], Route] = OrderedDict()
        self._routes_lock = threading.Lock()
        self.quarantine = Quarantine()
        staging: Any = np.zeros(0, np.uint8)
        if self.buffers:
            nbytes = self.piece * self.buffers
            staging = staging_memory(self.transport, self.staging_device, nbytes)
            self.memory = {**self.memory, **memory_of({STAGING: staging})}
        private = self.transport.shared == "staging"
        self.padding = not private
        """Whether routes copy padding: not if peers must not see bytes of earlier requests."""
        self.staging = StagingBuffers(staging, self.piece, wiped=private)
        for_peers: StagingBuffers | PeerSegments = self.staging
        most = self.staging.most(for_peer=True)
        if self.transport.lends_segments:
            for_peers = PeerSegments(self.transport.lend_to_one, self.piece, most)
        self.lending = Lending(for_peers, most)
        """The staging buffers that peers borrow."""
        self.scatter_threads = 2
        """The number of threads that move one request: while one reads, another scatters.

        It may be changed at any time. Set it to 1 if other work needs the CPU cores.
        """
        self.leases = Leases(self.lending.end)
        self.ledger = BlockLedger(self.plan, self.rank)
        """The blocks that offers, pulls, pushes and expectations of this node use."""
        self.pools = {i: as_bytes(at) for i, at in self.memory.items() if at.device == HOST}
        """The node's host memory, as bytes."""

    def check_arguments(self) -> None:
        """Raise an error for an invalid name, secret, rank, memory or staging option."""
        if self.name:
            check_node_name(self.name)
        self.security = Security(self.secret, tls=self.tls, peers=self.peers)
        rank = checked_rank(self.plan, self.rank, "node")
        self.memory = memory_of(self.memory)
        device = pools_device(self.memory)
        self.staging_device = device if self.transport.takes(device) else HOST
        """The device of the staging buffers: the pools' device if the transport can access it."""
        self.conversion = conversion_terms(self.plan, self.convert, self.scales)
        if self.identity is not None or self.check_identity:
            self.identity = checked_identity(self.identity)
        try:
            check_memory(self.plan, rank, self.memory)
        except AtlasError as error:
            problem = f"The memory does not match the pools of rank {rank}"
            hint = "Pass {pool index: Memory(address, nbytes)}, aligned and as large as in the plan"
            raise AtlasError(error.code, problem, got=error.got, hint=hint) from None
        self.buffers = natural(self.buffers, "the number of staging buffers")
        self.piece = natural(self.piece, "the size of a staging buffer")
        if self.buffers and self.piece < protocol.MIN_PIECE_BYTES:
            problem = f"A staging buffer must have at least {protocol.MIN_PIECE_BYTES} bytes"
            hint = "Omit piece=, or pass buffers=0 for no staging"
            raise AtlasError(Code.BAD_SIZE, problem, got=f"piece={self.piece}", hint=hint)
        transport = self.transport
        private = transport.shared == "staging" or not transport.takes(device)
        if not self.buffers and private:
            raise AtlasError(
                Code.CONTRADICTORY,
                "Peers can access neither the pools of this node nor staging buffers",
                got=f"buffers=0, pools on {device}, "
                f"transport {transport.name!r} with shared={transport.shared!r}",
                hint='Omit buffers=, or use a transport with shared="all" that supports the device',
            )

    def check_plan_travels(self) -> None:
        """Raise an error for a plan that does not fit into one message."""
        plan = self.plan.without_notes().to_json()
        try:
            check_plan_size(plan)
            hello = self.hello(with_plan=True)
            encoding.encode(protocol.Welcome(hello=hello, session=self.incarnation))
        except AtlasError as refused:
            problem = "The plan is too large to send to peers"
            got = f"{len(plan):,} bytes as JSON: {refused.got}"
            hint = "Plan fewer layers or pools, or give layers shorter names"
            raise AtlasError(Code.TOO_MANY, problem, got=got, hint=hint) from None

    def hello(self, *, with_plan: bool, version: int = protocol.VERSION) -> protocol.Hello:
        """Return the hello of this node for a peer with the given protocol version."""
        memory = self.transport.reachable
        if self.transport.lends_segments:
            memory = {STAGING: Memory(0, 0)}
        return protocol.Hello(
            version=protocol.VERSION,
            oldest=protocol.OLDEST_VERSION,
            name=self.name,
            incarnation=self.incarnation,
            fingerprint=fingerprint(self.plan),
            plan_hash=self.plan_hash,
            plan=self.plan.without_notes().to_json() if with_plan else None,
            rank=self.rank,
            memory=tuple(protocol.RegisteredMemory.of(*one) for one in memory.items()),
            transport=self.transport.name,
            metadata=self.transport.publish(),
            conversion=self.conversion,
            identity=self.identity if version >= protocol.IDENTITY_VERSION else None,
            padding=self.padding and version >= protocol.PADDING_VERSION,
        )

    def check_peer(self, peer: Peer) -> None:
        """Raise an error for a peer that this node cannot exchange caches with.

        Possible reasons: its name does not match its key, its version is too old, there is no route
        between the two plans, or the caches have different weights or settings.
        """
        self.security.check_name(peer.name, peer.names)
        if peer.version < self.transport.oldest_version:
            needed = f"protocol version {self.transport.oldest_version} or newer at both ends"
            problem = f"The transport {self.transport.name!r} needs {needed}"
            got = f"version {peer.version} at node {peer.name!r}"
            hint = "Upgrade kvatlas at that node"
            raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
        try:
            self.route_to(peer)
        except AtlasError as refused:
            # A conversion needs the agreement of both ends, and works in one direction.
            if refused.code is not Code.BAD_CONVERSION:
                raise
            self.route_from(peer)
        if self.check_identity:
            check_same_identity(self.identity, peer.identity, nodes=(self.name, peer.name))

    def authorise(self, asked: AskedRead) -> AbstractContextManager[None]:
        """Allow a peer to read bytes that its lease covers, or raise an error."""
        return self.leases.find(asked.lease).reading(asked)

    @property
    def shares_pools(self) -> bool:
        """Whether peers can read the pools, and not only staging buffers."""
        return all(map(self.transport.shares, self.plan.rank_pools(self.rank)))

    def register(self) -> None:
        """Register the memory with the transport, and create the mover for the pools."""
        self.transport.protect(self.security, self.authorise)
        self.transport.register(self.memory)
        pools = {index: at for index, at in self.memory.items() if index != STAGING}
        self.mover: PoolMover
        if pools_device(pools) == HOST:
            self.mover = HostMover({index: as_bytes(at) for index, at in pools.items()})
            return

        def count(metric: str, nbytes: int) -> None:
            self.metrics.add(**{metric: nbytes})

        driver, marks = self.transport.driver, self.transport.marks
        self.mover = GpuMover(driver, marks, pools, self.staging.memory, count)

    def mark(self) -> int | None:
        """Record a GPU event on the caller's stream, and return its number; None without a GPU."""
        return None if self.transport.marks is None else self.transport.marks.mark()

    def route_from(self, peer: Peer) -> Route:
        """Return the route from a peer to this node."""
        return self._route(peer, "from", peer.plan, self.plan)

    def route_to(self, peer: Peer) -> Route:
        """Return the route from this node to a peer."""
        return self._route(peer, "to", self.plan, peer.plan)

    def _route(self, peer: Peer, way: str, source: Plan, destination: Plan) -> Route:
        terms = b"" if peer.conversion is None else msgspec.json.encode(peer.conversion)
        key = (peer.plan_hash, way, terms, peer.padding)
        with self._routes_lock:
            if key in self.routes:
                self.routes.move_to_end(key)
                return self.routes[key]
        made = self._agreed_route(peer, source, destination)
        with self._routes_lock:
            made = self.routes.setdefault(key, made)
            while len(self.routes) > _MAX_ROUTES:
                self.routes.popitem(last=False)
        return made

    def _agreed_route(self, peer: Peer, source: Plan, destination: Plan) -> Route:
        """Return the route between two plans, with the conversion that both ends request."""
        mine, theirs = self.conversion, peer.conversion
        alike = fingerprint(source) == fingerprint(destination)
        padding = self.padding and peer.padding
        if mine is None or theirs is None:
            if alike or mine is theirs:
                return route(source, destination, padding=padding)
        elif alike or mine.convert == theirs.convert:
            scales = [mine.scales or None, theirs.scales or None]
            if source is peer.plan:
                scales.reverse()
            return route(
                source,
                destination,
                convert=None if alike else mine.convert,
                source_scales=scales[0],
                destination_scales=scales[1],
                padding=padding,
            )
        named = [repr(terms.convert) if terms else "no conversion" for terms in (mine, theirs)]
        raise AtlasError(
            Code.UNLIKE_CONVERSIONS,
            got=f"{named[0]} at node {self.name!r}, {named[1]} at {peer.name!r}",
            hint="Pass the same convert= to both nodes",
        )

    def readers(self, peer: Peer) -> list[int]:
        """Return the ranks of a peer's plan that read from this node."""
        outgoing = self.route_to(peer)
        return [rank for rank in range(peer.plan.ranks) if self.rank in outgoing.sources(rank)]

    def stream(
        self, peer: Peer, blocks: Any, peer_blocks: Any, tokens: Any, layers: Any, *, incoming: bool
    ) -> AnyStream:
        """Return the stream of bytes to transfer between this node's blocks and a peer's.

        `blocks` and `peer_blocks` are the block tables. If `incoming` is true, the peer is the
        source, else this node is.
        """
        between = self.route_from(peer) if incoming else self.route_to(peer)
        ends = (peer.rank, peer_blocks), (self.rank, blocks)
        (source_rank, source_blocks), (destination_rank, destination_blocks) = (
            ends if incoming else ends[::-1]
        )
        bind = between.stream if between.conversion is None else between.converted
        return bind(
            source_rank=source_rank, destination_rank=destination_rank,
            source_blocks=source_blocks, destination_blocks=destination_blocks,
            tokens=tokens, layers=layers,
        )  # fmt: skip

    def fill(self, part: StreamPiece, piece: Any) -> None:
        """Gather a part of a stream from this node's pools into the buffer `piece`.

        The bytes are converted to the format in which they are sent. Returns after the last byte is
        in the buffer.
        """
        part.fill(self.mover.gather, piece)
        if part.parts:
            self.mover.wait_for_caller()

    def deliver(self, piece: Any, part: StreamPiece) -> int:
        """Scatter the buffer `piece` into this node's pools. Return the number of bytes written."""
        return part.deliver(piece, self._scatter_converted if part.parts else self.mover.scatter)

    def _scatter_converted(self, copies: Sequence[Copy], stream: Any) -> int:
        """Scatter a converted piece, after waiting for the GPU work that converts it.

        Return the number of bytes written.
        """
        self.mover.wait_for_caller()
        return self.mover.scatter(copies, stream)
