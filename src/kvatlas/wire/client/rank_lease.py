"""A transfer's lease at one rank: questions to the peer, staging buffers, and reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvatlas.copying.memory import STAGING, Memory
from kvatlas.copying.stream_copy import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.routing import Copy, Stream
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire import protocol
from kvatlas.wire.client.peer_connection import PeerConnection
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.client.warm_shapes import StartedRead
from kvatlas.wire.leases import Held, buffers_reclaimed
from kvatlas.wire.piece_sums import mac_key, piece_sum
from kvatlas.wire.protocol import Ok, Opened
from kvatlas.wire.refusals import lease_expired
from kvatlas.wire.rpc import log
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.errors import peer_lost
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.offer_board import PostedOffer, SeenOffer

A = TypeVar("A", bound=protocol.Message)

BUFFERS = 2
"""Staging buffers of a transfer at each end: one is filled while the other is sent."""

_NOT_NEEDED = 0xFFFFFFFF
"""The block id that stands for "no block" in a block table on the wire."""

_QUIET_SECONDS = 1.0
"""Seconds without a request after which a transfer with buffers of the peer renews its lease."""

_SEVERED = 1.0
"""Seconds to wait for a severed link to be confirmed idle."""


@dataclass
class RankLease:
    """A transfer's lease at one peer.

    The peer has `patience` seconds to answer a question. If the transfer has `others`, replicas to
    fall back to, the same limit applies to each batch of bytes.
    """

    node: NodeState
    connection: PeerConnection
    wanted: TransferRequest
    transfer: Transfer
    patience: float
    others: bool = False

    def __post_init__(self) -> None:
        wanted = self.wanted
        self.monitor = self.node.channels.monitor(self.connection.endpoint)
        self.deadline = self.transfer.deadline
        self.rank = self.connection.peer.rank
        self.tokens = token_range(wanted.tokens, self.node.plan.max_len)
        self.mine = protocol.by_group(wanted.blocks)
        self.theirs = None if wanted.peer_blocks is None else protocol.by_group(wanted.peer_blocks)
        self.seen: SeenOffer | None = None
        """The offer, if it was found on the peer's board. There is no lease then."""
        self.read_whole: Stream | None = None
        """The stream, if a single operation has read all of it."""
        self.buffers: list[int] = []
        """Staging buffers of this node."""
        self.lent: tuple[int, ...] = ()
        """Staging buffers of the peer."""
        self.lent_link = self.connection.link
        """The link over which they are read: a separate one if they are for this node alone."""
        self._asked_at = time.monotonic()
        self.runs: int | None = None
        """The runs that were read; None to use the runs of the stream."""
        self.received: dict[tuple[int, int], bytes] = {}
        """Checksums of the pieces as they were sent, if one end converted them."""
        self.given_up: dict[str, list[Handle]] = {"blocks": [], "buffers": []}
        """Abandoned reads that may not be over, by the memory that they write to."""

    # -- questions ------------------------------------------------------------------------

    def _ask(self, question: protocol.Message, kind: type[A]) -> A:
        deadline = min(self.deadline, time.monotonic() + self.patience)
        answer = self.node.channels.ask(self.connection.endpoint, question, deadline=deadline)
        if not isinstance(answer, kind):
            raise protocol.wrong_answer(answer, kind)
        return answer

    def ask_of_lease(
        self, message: Callable[..., protocol.Message], kind: type[A], **fields: Any
    ) -> A:
        """Return the peer's answer to a question about this lease."""
        session, lease = self.connection.session, self.opened.lease
        about = {"session": session, "lease": lease, "request": self.wanted.request}
        self._asked_at = time.monotonic()
        return self._ask(message(**about, **fields), kind)

    def open(self) -> None:
        """Find the offer on the peer's board, or ask the peer for a lease."""
        with self.node.metrics.phase("open"):
            self.seen = self._find_offer()
            if self.seen is None:
                self._ask_for_lease()
                return
        offer, forever = self.seen.offer, float("inf")
        self.opened = Opened(lease=b"", seconds=forever, blocks=offer.blocks, mark=offer.mark)
        self._renew_at = forever

    def _find_offer(self) -> SeenOffer | None:
        """Return the offer from the board, if reading its blocks is all that the transfer needs."""
        wanted, connection = self.wanted, self.connection
        if wanted.checksums or wanted.how not in ("auto", "direct"):
            return None
        if wanted.identity is not None:  # boards show offers of the node's own identity alone
            return None
        if not self.reaches_pools():
            return None
        converting = self.node.route_from(connection.peer).conversion is not None
        staged = converting or not self.may_fill_blocks()
        if staged and not connection.link.adds:
            return None
        return connection.link.find_offer(wanted.request)

    def ask_after_all(self) -> None:
        """Ask for a lease on an offer found on the board, if the peer must gather its bytes."""
        if self.seen is not None:
            self._ask_for_lease()  # for the blocks that were seen, and no others
            self.seen = None
            self.check_opened()

    def _ask_for_lease(self) -> None:
        wanted, theirs = self.wanted, self.theirs
        question = protocol.Open(
            session=self.connection.session,
            direction="pull",
            request=wanted.request,
            blocks=protocol.pack_tables(self.mine),
            peer_blocks=None if theirs is None else protocol.pack_tables(theirs),
            start=self.tokens[0],
            stop=self.tokens[1],
            layers=None if wanted.layers is None else tuple(wanted.layers),
            seconds=self._seconds_left(),
            final=wanted.final,
            identity=self._compared_identity(),
        )
        self.opened = self._ask(question, Opened)
        self._renew_at = time.monotonic() + self.opened.seconds / 2

    def _compared_identity(self) -> CacheIdentity | None:
        """Return the identity that the peer must compare; None if this node compares none."""
        if self.wanted.identity is not None:
            return self.wanted.identity
        return self.node.identity if self.node.check_identity else None

    def check_opened(self) -> None:
        """Check and store the peer's blocks and staging size from its answer."""
        told = protocol.unpack_tables(self.opened.blocks)
        if self.seen is not None:
            self._check_seen(self.seen.offer, told)
        self.theirs = told if self.theirs is None else self.theirs
        piece, room = self.opened.piece, self._staging_bytes()
        if piece and piece < protocol.MIN_PIECE_BYTES:
            least = f"{protocol.MIN_PIECE_BYTES:,}"
            got = f"staging buffers of {piece:,} bytes, expected at least {least}"
            raise protocol.bad_handshake(got)
        if room and piece > room:
            got = f"a staging buffer of {piece:,} bytes in staging memory of {room:,} bytes"
            raise protocol.bad_handshake(got)

    def _check_seen(self, offer: PostedOffer, told: Mapping[int, Int64s]) -> None:
        """Check an offer from the board as the peer would have done."""
        mine = {group: np.asarray(ids) for group, ids in (self.theirs or {}).items()}
        if mine:
            told = {group: np.where(ids == _NOT_NEEDED, -1, ids) for group, ids in told.items()}
        held = Held(offer.request, told, offer.start, offer.stop)
        held.check_asked(self.tokens, mine, self.connection.peer.plan)

    def _seconds_left(self, until: float = math.inf) -> float:
        return max(0.001, min(self.deadline, until) - time.monotonic())

    def renew_in_time(self) -> None:
        """Renew the lease if half of its time has passed, or if the peer may consider it idle."""
        now = time.monotonic()
        if now >= self._renew_at or (self.lent and now > self._asked_at + _QUIET_SECONDS):
            self.renew()

    def renew(self) -> None:
        """Extend the lease. The peer thereby confirms that the lease is still held."""
        if self.seen is not None:
            self._confirm(self.seen)
            return
        ok = self.ask_of_lease(protocol.Renew, Ok, seconds=self._seconds_left())
        self._renew_at = time.monotonic() + ok.seconds / 2

    def await_layer(self, layer: str) -> int | None:
        """Wait until the peer has written a layer. Return the mark after which it may be read."""
        if not self.opened.layered:
            return self.opened.mark
        while True:
            self._check_going_on()
            self.renew_in_time()
            seconds = min(self.patience / 2, self._seconds_left())
            about = {"layer": layer, "seconds": seconds}
            said = self.ask_of_lease(protocol.AwaitLayer, protocol.LayerWritten, **about)
            if said.written:
                return said.mark

    def close(self, *, complete: bool) -> None:
        """End the lease. After a complete transfer, the source confirms that the lease was held."""
        if self.seen is not None:
            if complete:
                with self.node.metrics.phase("confirm"):
                    self._confirm(self.seen)
            return
        if not complete:
            # In the background, because the peer may not answer. The lease then expires.
            self.connection.beside.submit(self._abandon)
            return
        with self.node.metrics.phase("confirm"):
            self.ask_of_lease(protocol.Close, Ok, complete=True)

    def _confirm(self, seen: SeenOffer) -> None:
        """Raise an error unless the source has held the blocks until now."""
        if not seen.confirmed:
            raise peer_lost("an exiting process") if seen.held else lease_expired()

    def tell_read(self, tell: Callable[..., object]) -> None:
        """Notify the source of a read without a lease. `tell` may run the notification later."""
        seen, wanted = self.seen, self.wanted
        if seen is None or self.transfer.error is not None:  # a retry may still read it
            return
        whole = wanted.layers is None and self.tokens == (seen.offer.start, seen.offer.stop)
        if whole or wanted.final:
            told = protocol.Release(
                session=self.connection.session, request=wanted.request, read=True,
                posting=seen.posting,
            )  # fmt: skip
            tell(self._tell, told)

    def _tell(self, told: protocol.Message) -> None:
        deadline = time.monotonic() + self.patience
        try:
            self.node.channels.ask(self.connection.endpoint, told, deadline=deadline)
        except AtlasError as refused:  # the offer then ends when it expires
            log.warning("release failed request=%r: %s", self.wanted.request, refused)

    def _abandon(self) -> None:
        deadline = time.monotonic() + min(1.0, self.patience)
        session, lease = self.connection.session, self.opened.lease
        question = protocol.Close(session=session, lease=lease, complete=False)
        with suppress(AtlasError):
            self.node.channels.ask(self.connection.endpoint, question, deadline=deadline)

    @property
    def mac_key(self) -> bytes | None:
        """The key of checksums; None if the session is not protected and they are CRC-32."""
        if not self.node.security.protected:
            return None
        version = self.connection.peer.version
        if version < protocol.KEYED_VERSION:
            needed = protocol.KEYED_VERSION
            problem = f"Checksums of protected nodes need protocol version {needed} at both ends"
            got, hint = f"version {version} at the peer", "Upgrade kvatlas at the peer"
            raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
        return mac_key(self.connection.session, self.opened.lease)

    def note_converted(self, start: int, stop: int, piece: Any) -> None:
        """Keep the checksum of a converted piece as it was sent, if checksums are compared."""
        if self.wanted.checksums:
            self.received[start, stop] = piece_sum(piece, self.mac_key)

    # -- what both ends lend --------------------------------------------------------------

    def borrow(self, count: int, until: float = math.inf) -> None:
        """Borrow staging buffers of the peer, and check that they are inside its staging memory."""
        while len(self.lent) < count and time.monotonic() < until:
            self.transfer.check_cancelled()
            seconds = min(self.patience / 2, self._seconds_left(until))
            answer = self.ask_of_lease(
                protocol.Borrow, protocol.Lent, buffers=count, seconds=seconds
            )
            lent = answer.buffers
            if answer.memory is not None:
                self._connect_to_lent(answer.memory.memory, answer.metadata)
            outside = any((one + 1) * self.opened.piece > self._staging_bytes() for one in lent)
            if outside:
                sizes = f"{self.opened.piece:,} bytes each, in {self._staging_bytes():,} bytes"
                raise protocol.bad_handshake(f"staging buffers {lent} of {sizes}")
            if len(set(lent)) < len(lent):
                raise protocol.bad_handshake(f"staging buffers {lent}, one of them twice")
            self.lent = lent
            if 0 < len(lent) < count:
                return

    def _connect_to_lent(self, memory: Memory, metadata: bytes) -> None:
        """Connect to memory that the peer has for this node alone."""
        transport = self.node.transport
        with _reclaimed_if_lost():
            self.lent_link = self.connection.link_to_lent(transport, memory, metadata)

    def borrow_both(self) -> None:
        """Acquire staging buffers at both ends, waiting if needed. The peer's are acquired last."""
        count = min(BUFFERS, self.node.staging.most())
        self.borrow_own(count)
        if self.opened.piece:
            self.borrow(count)
        if not self.buffers or not self.lent:
            raise AtlasError(
                Code.TOO_MANY,
                "A staged transfer needs staging buffers at both ends",
                got=f"{len(self.buffers)} buffers here, {len(self.lent)} at the peer",
                hint='Pass a larger buffers= to both nodes, or use how="auto"',
            )

    def borrow_own(self, count: int, until: float = math.inf) -> None:
        """Acquire staging buffers of this node, waiting if needed; none if it has none."""
        while count and not self.buffers and time.monotonic() < until:
            self.transfer.check_cancelled()
            seconds = min(0.1, self._seconds_left(until))
            self.buffers = self.node.staging.acquire(count, seconds)

    def borrow_in_time(self, seconds: float, *, both: bool) -> bool:
        """Acquire staging buffers here and, with `both`, at the peer. Return False if too slow."""
        until = time.monotonic() + seconds
        staging = self.node.staging
        threads = BUFFERS if both else max(1, self.node.landing_threads)
        self.borrow_own(min(BUFFERS, staging.most(), threads), until)
        if both and self.buffers:
            self.borrow(len(self.buffers), until)
        if self.buffers and (self.lent or not both):
            return True
        staging.give_back(self.buffers)
        self.buffers = []
        return False

    def staging_copy(self, buffer: int, nbytes: int, near: Any = (0,), far: Any = (0,)) -> Copy:
        """Return runs of one length from a staging buffer of the peer to one of this node."""
        mine = self.buffers[buffer] * self.node.staging.piece + np.asarray(near)
        theirs = self.lent[buffer] * self.opened.piece + np.asarray(far)
        return Copy(STAGING, STAGING, theirs, mine, np.full(len(mine), nbytes, dtype=np.int64))

    def _staging_bytes(self) -> int:
        staging = self.lent_link.theirs.get(STAGING)
        return 0 if staging is None else staging.nbytes

    # -- bytes ----------------------------------------------------------------------------

    def stream(self, layers: Collection[str] | None) -> AnyStream:
        """Return the stream of all layers, or of the given ones, between the two ends."""
        mine, theirs, peer = self.mine, self.theirs, self.connection.peer
        return self.node.stream(peer, mine, theirs, self.tokens, layers, incoming=True)

    def reaches_pools(self) -> bool:
        """Whether the peer's pools can be read, and this node's pools written, without staging."""
        node, peer = self.node, self.connection.peer
        own = node.plan.rank_pools(node.rank)
        taken = all(node.transport.takes(node.memory[index].device) for index in own)
        theirs = peer.plan.rank_pools(peer.rank)
        return taken and all(map(self.connection.link.reaches, theirs))

    def may_fill_blocks(self) -> bool:
        """Whether reads may go directly into the blocks.

        They may not if the link cannot end a stalled read promptly, and another process may then
        fill the same blocks.
        """
        others = self.others or self.wanted.replaceable
        return not others or self.connection.link.prompt

    def follow(self) -> None:
        """Order later copies after the GPU work that was queued when the transfer began."""
        self.node.mover.follow(self.wanted.mark)
        self.connection.link.follow(self.wanted.mark)

    def read(self, copies: Sequence[Copy], into: str = "buffers") -> None:
        """Read runs over the link, and record the read if it is abandoned."""
        handle = self.connection.link.read(copies, lease=self.opened.lease)
        self._finish(handle, into, self._check_going_on)

    def read_lent(self, copies: Sequence[Copy]) -> None:
        """Read runs of the peer's staging buffers into those of this node."""

        def check() -> None:
            self._check_going_on()
            self.renew_in_time()

        if self.lent_link is self.connection.link:
            self._finish(self.lent_link.read(copies, lease=self.opened.lease), "buffers", check)
            return
        with _reclaimed_if_lost():
            self._finish(self.lent_link.read(copies, lease=self.opened.lease), "buffers", check)

    def sever_links(self) -> None:
        """Tear down all links of the transfer."""
        self.connection.link.sever()
        if self.lent_link is not self.connection.link:
            self.lent_link.sever()

    def read_at_once(self, copies: Sequence[Copy], after: int | None) -> None:
        """Read runs into blocks with one operation, after a mark of the peer completes.

        The lease is renewed during the read.
        """

        def check() -> None:
            self._check_going_on()
            self.renew_in_time()

        self.count(sum(map(len, copies)))
        self._finish(self.connection.link.read(copies, after), "blocks", check)

    def finish_started(self, started: StartedRead) -> None:
        """Wait for a read that was started before the lease was granted."""
        self.seen = started.seen
        self._finish(started.handle, "blocks", self._check_going_on)

    def learn(self) -> None:
        """Prepare the fast path for the next request of this shape, in the background."""
        stream, total = self.read_whole, self.transfer.total
        plain = self.wanted.layers is None and not self.wanted.streamed
        if plain and stream is not None and total is not None and not self.others:
            self.connection.beside.submit(self._learn, stream, total)

    def _learn(self, stream: Stream, total: int) -> None:
        try:
            self.connection.warm.learn(self.tokens, stream, total)
        except Exception:  # the next pull then takes the normal path
            log.exception("preparing the fast path failed request=%r", self.wanted.request)

    def count(self, runs: int) -> None:
        """Add to the count of runs read."""
        self.runs = (self.runs or 0) + runs

    def _finish(self, handle: Handle, into: str, check: Callable[[], None]) -> None:
        """Wait for a read. Record it in `given_up` if it was abandoned and may not be over."""
        deadline = self.deadline
        if self.others:
            deadline = min(deadline, time.monotonic() + self.patience)
        tried_again = self.others
        try:
            _ = self.transfer.total  # computed during the read, if it is not known yet
            handle.wait(deadline, check)
        except AtlasError as refused:
            # The session will connect again, and read into the same blocks.
            tried_again = tried_again or refused.code is Code.UNKNOWN_SESSION
            raise
        finally:
            handle.release()
            if not handle.settle():
                self.given_up[into].append(handle)
                if tried_again and into == "blocks":
                    self._sever()

    def _check_going_on(self) -> None:
        """Raise an error if the transfer has ended or the peer has died."""
        self.transfer.check_cancelled()
        self.monitor.check()
        if self.seen is not None and not self.seen.held:
            raise lease_expired()

    def _sever(self) -> None:
        """Tear down the link of a stalled read before another read fills the same blocks."""
        self.connection.link.sever()
        patience = time.monotonic() + _SEVERED
        while not all(handle.settle() for handle in self.given_up["blocks"]):
            if time.monotonic() > patience:
                problem = "A stalled read may still write to the blocks after its link was closed"
                got = f"a read from {self.connection.endpoint}"
                hint = "Retry the transfer with other blocks"
                error = AtlasError(Code.DEADLINE, problem, got=got, hint=hint)
                self.transfer.failed(self.rank, error)
                return
            time.sleep(0.01)


@contextmanager
def _reclaimed_if_lost() -> Iterator[None]:
    """A context that turns `peer_lost` into `buffers_reclaimed`, for memory of this node alone.

    The peer frees that memory when it reclaims the buffers. If the peer itself is gone, the
    transfer finds out when it starts over.
    """
    try:
        yield
    except AtlasError as lost:
        if lost.code is Code.PEER_LOST:
            raise buffers_reclaimed() from lost
        raise
