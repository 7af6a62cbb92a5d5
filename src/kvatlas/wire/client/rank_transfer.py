"""One rank's part of a transfer: take a lease, move the bytes, confirm the lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.client.direct import pull_converted, pull_direct
from kvatlas.wire.client.landed import pull_landed
from kvatlas.wire.client.link_costs import choose_way, converts_on_the_way, must_land
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.staged import pull_staged
from kvatlas.wire.client.warm_shapes import StartedRead
from kvatlas.wire.piece_sums import CRC_BYTES, MAC_BYTES, stream_sums

_CHECKSUM_PIECE = 1 << 20


@dataclass
class RankTransfer:
    """One rank's part of a transfer, with one peer."""

    lease: RankLease

    def __post_init__(self) -> None:
        lease = self.lease
        self.node, self.wanted, self.transfer = lease.node, lease.wanted, lease.transfer
        self._uses_blocks = False

    def run(self) -> None:
        """Run this part, or raise its error.

        Staging buffers are returned, and the blocks marked as no longer used, once no read can
        write to them.
        """
        self._carry_out(self._run)

    def finish(self, started: StartedRead) -> None:
        """Wait for a read that was started before, and have it confirmed."""
        self._carry_out(partial(self._finish, started))

    def _carry_out(self, act: Callable[[], None]) -> None:
        lease = self.lease
        try:
            act()
        finally:
            quarantine, sever = self.node.quarantine, lease.sever_links
            if self._uses_blocks:
                quarantine.hold(lease.given_up["blocks"], self.transfer.leave, sever=sever)
            quarantine.hold(
                lease.given_up["buffers"],
                partial(self.node.staging.give_back, lease.buffers),
                sever=sever,
            )

    def _use_blocks(self) -> None:
        """Keep the blocks from being reused until no read can write to them."""
        self.transfer.use()
        self._uses_blocks = True

    def _finish(self, started: StartedRead) -> None:
        lease = self.lease
        self._use_blocks()
        lease.finish_started(started)
        self.transfer.add(lease.rank, started.warm.shape.nbytes)
        lease.close(complete=True)

    def _run(self) -> None:
        lease = self.lease
        self.transfer.check_cancelled()
        lease.open()
        complete = False
        try:
            lease.check_opened()
            self._use_blocks()
            self.transfer.check_cancelled()  # if it has ended, the blocks may be in use again
            stream = lease.stream(self.wanted.layers)
            self._move(stream)
            if self.wanted.checksums:
                self._compare(stream)
            complete = True
        finally:
            lease.close(complete=complete)
        # Only now: the source has confirmed that it held the blocks until after the last byte.
        for name in self._streamed_layers() if self.wanted.streamed else ():
            self.transfer.add_layer(lease.rank, name)
        runs = stream.runs if lease.runs is None else lease.runs
        self.node.metrics.add(bytes=stream.nbytes, descriptors=runs)

    def _move(self, stream: AnyStream) -> None:
        lease = self.lease
        if not stream.nbytes:
            return
        lease.follow()
        as_it_lies = not isinstance(stream, ConvertedStream) or converts_on_the_way(lease, stream)
        if self.wanted.streamed and lease.reaches_pools() and as_it_lies:
            self._move_layers()
            return
        opened, behind = lease.opened, self._behind()
        way = choose_way(lease, stream)
        if lease.opened is not opened:  # leased after all, maybe from a newer offer
            behind = self._behind()
        if not lease.connection.link.adds:  # else it is computed while the read is in flight
            self.transfer.find_total_beside(lease.connection.beside)
        if way == "staged":
            pull_staged(lease, stream)
        elif isinstance(stream, ConvertedStream):
            pull_converted(lease, stream, behind)
        elif way == "coalesced":
            pull_landed(lease, stream)
        else:
            pull_direct(lease, stream, behind)

    def _behind(self) -> int | None:
        """Return the mark after which the stream may be read, after waiting for all layers."""
        opened = self.lease.opened
        return self._all_written() if opened.layered else opened.mark

    def _all_written(self) -> int | None:
        """Wait until the source has written every layer. Return its last mark, which covers all."""
        lease = self.lease
        held = [name for name in self._streamed_layers() if lease.stream([name]).nbytes]
        marks = [lease.await_layer(name) for name in held]
        return max((mark for mark in marks if mark is not None), default=None)

    def _move_layers(self) -> None:
        lease = self.lease
        for name, layer in self._bound_layers():
            if layer.nbytes:  # else another rank has it
                behind = lease.await_layer(name)
                if isinstance(layer, ConvertedStream):
                    pull_converted(lease, layer, behind)
                elif must_land(lease):
                    pull_landed(lease, layer)
                else:
                    pull_direct(lease, layer, behind)
            if not self.wanted.checksums:
                # A layer counts once the source confirms that it still held the blocks.
                lease.renew()
                self.transfer.add_layer(lease.rank, name)

    def _bound_layers(self) -> Iterator[tuple[str, AnyStream]]:
        """Yield each layer and its stream, which is bound while the previous layer is read."""
        names = self._streamed_layers()
        bind = self.lease.connection.beside.submit
        coming = [bind(self._layer_stream, name) for name in names[:1]]
        for name, later in zip_longest(names, names[1:]):
            coming += [bind(self._layer_stream, later)] if later else []
            yield name, coming.pop(0).result()

    def _layer_stream(self, name: str) -> AnyStream:
        """Return the stream of one layer. Its grids are computed now if the link uses them."""
        stream = self.lease.stream([name])
        if self.lease.connection.link.adds:
            stream.grids()
        return stream

    def _streamed_layers(self) -> list[str]:
        layers = self.node.route_from(self.lease.connection.peer).layers
        chosen = self.wanted.layers
        return [name for name in layers if chosen is None or name in chosen]

    def _compare(self, stream: AnyStream) -> None:
        """Raise an error if the checksums of the two ends differ."""
        total, longest = stream.nbytes, protocol.MAX_CHECKSUM_SPAN
        converting = isinstance(stream, ConvertedStream)
        pieces = len(self.lease.received) if converting else -(-total // _CHECKSUM_PIECE)
        starts = range(0, total, longest)
        spans = [(start, min(total, start + longest)) for start in starts]
        wrong = 0
        for start, stop in self.lease.received if converting else spans:
            self.transfer.check_cancelled()
            self.lease.renew_in_time()
            with self.node.metrics.phase("checksums"):
                wrong += self._differing(stream, start, stop)
        if wrong:
            raise AtlasError(
                Code.CHECKSUM,
                got=f"{wrong} of {pieces} pieces with different checksums",
                hint="Retry the transfer, and check the network and its devices",
            )

    def _differing(self, stream: AnyStream, start: int, stop: int) -> int:
        """Return the number of pieces in a span of the stream that differ between the ends."""
        lease = self.lease
        key, piece = lease.mac_key, _CHECKSUM_PIECE
        span: dict[str, Any] = {"start": start, "stop": stop, "piece": piece}
        span["keyed"] = key is not None
        theirs = lease.ask_of_lease(protocol.GetChecksums, protocol.Checksums, **span).sums
        if isinstance(stream, ConvertedStream):  # both ends have the bytes that were sent
            ours = lease.received[start, stop]
        else:
            part = stream.copies(start, stop)
            ours = stream_sums(self.node.mover, part, piece, key, src=False)
        if len(theirs) != len(ours):
            got = f"{len(theirs):,} bytes of checksums, expected {len(ours):,}"
            raise protocol.bad_handshake(got)
        each = CRC_BYTES if key is None else MAC_BYTES
        return sum(
            theirs[at : at + each] != ours[at : at + each] for at in range(0, len(ours), each)
        )
