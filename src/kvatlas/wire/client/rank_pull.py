"""One rank's part of a pull. The replicas of the rank are tried until one succeeds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.client.connections import PEER_GONE, Connections, Way
from kvatlas.wire.client.link_costs import choose_way, converts_on_the_way, must_coalesce
from kvatlas.wire.client.pull_pipeline import PullPipeline
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_reads import RankReads
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.piece_sums import CRC_BYTES, MAC_BYTES, piece_sum, stream_sums
from kvatlas.wire.rpc import log
from kvatlas.wire.server.node_state import NodeState

ANSWER_SECONDS = 5.0
"""Seconds that a peer has to answer, within the transfer's deadline."""
_RETRIED = PEER_GONE | {
    Code.LEASE_EXPIRED, Code.UNKNOWN_REQUEST, Code.CHECKSUM, Code.BUSY, Code.BUFFERS_RECLAIMED
}  # fmt: skip
"""Error codes that a retry on another replica may avoid."""
_TURNS = 4
"""The number of parts that run at once while all of them progress. More would be slower."""
_TURN_SECONDS = 0.5
"""Seconds that a part waits for its turn while the parts before it do not progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between retries of a request that is not offered yet; doubled each time."""
_CHECKSUM_PIECE = 1 << 20


class RankPull:
    """Pulls one rank's part from one peer: opens a lease, reads, verifies, and ends the lease."""

    def __init__(self, lease: RankLease) -> None:
        self.lease, self.reads = lease, RankReads(lease)
        self.node, self.wanted, self.transfer = lease.node, lease.wanted, lease.transfer
        self._read_whole: AnyStream | None = None
        """The stream, if a single operation has read all of an offer that needs no lease."""
        self._received: dict[tuple[int, int], bytes] = {}
        """Checksums of converted pieces as they were sent, by (start, stop) in the stream."""

    def run(self) -> None:
        """Read this part into the blocks. Raise an error if any step fails."""
        lease = self.lease
        with self.reads:
            self.transfer.check_cancelled()
            lease.open()
            complete = False
            try:
                lease.check_opened()
                self.reads.use_blocks()
                self.transfer.check_cancelled()  # if it has ended, the blocks may be in use again
                stream = lease.stream(self.wanted.layers)
                self._read(stream)
                if self.wanted.checksums:
                    self._verify(stream)
                complete = True
            finally:
                lease.close(complete=complete)
            # Only now: the source has confirmed that it held the blocks until after the last byte.
            for name in self._streamed_layers() if self.wanted.streamed else ():
                self.transfer.add_layer(lease.rank, name)
        runs = stream.runs if self.reads.runs is None else self.reads.runs
        self.node.metrics.add(bytes=stream.nbytes, descriptors=runs)

    def _read(self, stream: AnyStream) -> None:
        """Read a stream into its blocks: whole, or layer by layer."""
        lease = self.lease
        if not stream.nbytes:
            return
        self.reads.follow()
        plain = not isinstance(stream, ConvertedStream) or converts_on_the_way(lease, stream)
        if self.wanted.streamed and lease.reaches_pools() and plain:
            self._read_layers()
            return
        opened, after_event = lease.opened, self._last_event()
        way = choose_way(self.reads, stream)
        if lease.opened is not opened:  # leased after all, maybe from a newer offer
            after_event = self._last_event()
        self._pull(stream, way, after_event)
        at_once = way == "direct" and lease.connection.link.adds
        if at_once and lease.seen is not None:
            self._read_whole = stream

    def _pull(self, stream: AnyStream, way: Way, after_event: int | None) -> None:
        PullPipeline(self.reads, stream, way, after_event, self._note_converted).run()

    def _last_event(self) -> int | None:
        """Wait until the source has queued the kernels of all layers. Return its last GPU event."""
        lease = self.lease
        if not lease.opened.layered:
            return lease.opened.mark
        held = [name for name in self._streamed_layers() if lease.stream([name]).nbytes]
        marks = [lease.await_layer(name) for name in held]
        return max((mark for mark in marks if mark is not None), default=None)

    def _read_layers(self) -> None:
        lease = self.lease
        way: Way = "coalesced" if must_coalesce(lease) else "direct"
        for name, layer in self._bound_layers():
            if layer.nbytes:  # else other source ranks have the layer
                self._pull(layer, way, lease.await_layer(name))
            if not self.wanted.checksums:
                # A layer counts once the source confirms that it still held the blocks.
                lease.renew()
                self.transfer.add_layer(lease.rank, name)

    def _bound_layers(self) -> Iterator[tuple[str, AnyStream]]:
        """Yield each layer's name and stream. The next stream is computed in the background."""
        names = self._streamed_layers()
        bind = self.lease.connection.background.submit
        coming = [bind(self._layer_stream, name) for name in names[:1]]
        for name, later in zip_longest(names, names[1:]):
            coming += [bind(self._layer_stream, later)] if later else []
            yield name, coming.pop(0).result()

    def _layer_stream(self, name: str) -> AnyStream:
        """Return the byte stream of one layer. If a GPU computes the runs, prepare them."""
        stream = self.lease.stream([name])
        if self.lease.connection.link.adds:
            stream.grids()
        return stream

    def _streamed_layers(self) -> list[str]:
        layers = self.node.route_from(self.lease.connection.peer).layers
        chosen = self.wanted.layers
        return [name for name in layers if chosen is None or name in chosen]

    def follow_up(self) -> None:
        """Notify the source that a read without a lease has ended, and prepare the fast path."""
        lease, wanted, total = self.lease, self.wanted, self.transfer.total
        lease.notify_source()
        if self._read_whole is None or total is None or lease.others:
            return
        if wanted.layers is None and not wanted.streamed:
            try:
                lease.connection.shapes.learn(lease.tokens, self._read_whole, total)
            except Exception:  # the next pull then takes the normal path
                log.exception("preparing the fast path failed request=%r", wanted.request)

    # -- checksums --------------------------------------------------------------------------

    def _note_converted(self, start: int, stop: int, piece: Any) -> None:
        """If checksums are requested, store the checksum of a received piece.

        The piece contains bytes start .. stop - 1 of the stream, in the format in which the source
        has sent them.
        """
        if self.wanted.checksums:
            self._received[start, stop] = piece_sum(piece, self.lease.mac_key)

    def _verify(self, stream: AnyStream) -> None:
        """Raise an error if the bytes have different checksums at the source and at this node."""
        total, longest = stream.nbytes, protocol.MAX_CHECKSUM_SPAN
        if isinstance(stream, ConvertedStream):
            spans, pieces = sorted(self._received), len(self._received)
        else:
            spans = [(at, min(total, at + longest)) for at in range(0, total, longest)]
            pieces = -(-total // _CHECKSUM_PIECE)
        wrong = 0
        for start, stop in spans:
            self.transfer.check_cancelled()
            self.lease.renew_in_time()
            with self.node.metrics.phase("checksums"):
                wrong += self._differing(stream, start, stop)
        if wrong:
            raise AtlasError(
                Code.CHECKSUM,
                got=f"{wrong} of {pieces} pieces with different checksums",
                hint="Retry the transfer, and check the network hardware if the error recurs",
            )

    def _differing(self, stream: AnyStream, start: int, stop: int) -> int:
        """Return how many pieces have different checksums at the source and at this node.

        Only the pieces in bytes `start .. stop - 1` of the stream are compared.
        """
        lease = self.lease
        key, piece = lease.mac_key, _CHECKSUM_PIECE
        span: dict[str, Any] = {"start": start, "stop": stop, "piece": piece}
        span["keyed"] = key is not None
        theirs = lease.ask_of_lease(protocol.GetChecksums, protocol.Checksums, **span).sums
        if isinstance(stream, ConvertedStream):  # both ends have the bytes that were sent
            ours = self._received[start, stop]
        else:
            part = stream.copies(start, stop)
            ours = stream_sums(self.node.mover, part, piece, key, source=False)
        if len(theirs) != len(ours):
            got = f"{len(theirs):,} bytes of checksums, expected {len(ours):,}"
            raise protocol.bad_handshake(got)
        each = CRC_BYTES if key is None else MAC_BYTES
        return sum(
            theirs[at : at + each] != ours[at : at + each] for at in range(0, len(ours), each)
        )


class RankReader:
    """Reads parts of transfers in the calling thread. Any thread may use it."""

    def __init__(self, node: NodeState, connections: Connections) -> None:
        self._node, self._connections = node, connections
        self._turns = threading.Semaphore(_TURNS)

    def read(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, replicas: Sequence[str]
    ) -> RankPull:
        """Read one rank's part. If many parts are being read, first wait a while for some to end.

        A request that is not offered yet is retried for `wanted.wait_for_offer` seconds.
        """
        pause, until = _FIRST_PAUSE, transfer.begun + wanted.wait_for_offer
        while True:
            has_turn = self._turns.acquire(timeout=_TURN_SECONDS)
            try:
                return self._try_replicas(transfer, wanted, rank, replicas)
            except AtlasError as refused:
                if refused.code is not Code.UNKNOWN_REQUEST or time.monotonic() >= until:
                    raise
            finally:
                if has_turn:
                    self._turns.release()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try_replicas(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, replicas: Sequence[str]
    ) -> RankPull:
        """Try the replicas in turn, connected replicas first. Return the pull that succeeded."""
        unknown = {one: self._connections.find(one) is None for one in replicas}
        left = deque(sorted(unknown, key=unknown.__getitem__))
        reconnected: set[str] = set()
        while True:
            endpoint = left.popleft()
            # A replica that never answers leaves time for the others.
            remaining = transfer.deadline - time.monotonic()
            timeout = min(ANSWER_SECONDS, remaining / (len(left) + 1))
            try:
                transfer.check_cancelled()
                with self._connections.use(endpoint, time.monotonic() + timeout) as connection:
                    part = (self._node, connection, wanted, transfer, timeout)
                    pull = RankPull(RankLease(*part, others=bool(left)))
                    pull.run()
                return pull
            except AtlasError as refused:
                if refused.code is Code.UNKNOWN_SESSION and endpoint not in reconnected:
                    # The peer has restarted: connect to it again, once.
                    reconnected.add(endpoint)
                    left.appendleft(endpoint)
                if refused.code is Code.BUFFERS_RECLAIMED:
                    left.append(endpoint)  # try the other replicas first, then this one again
                if refused.code not in _RETRIED or transfer.done or not left:
                    raise
                transfer.restart(rank)
