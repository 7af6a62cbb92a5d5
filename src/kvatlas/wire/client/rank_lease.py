"""A pull's lease at one peer: open the lease, renew it, borrow buffers for it, and confirm it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire import protocol
from kvatlas.wire.client.connections import PeerConnection
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.leases import buffers_reclaimed, lease_expired
from kvatlas.wire.offers import Offer
from kvatlas.wire.piece_sums import mac_key
from kvatlas.wire.protocol import Ok, Opened
from kvatlas.wire.rpc import log
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.errors import peer_lost
from kvatlas.wire.transports.offer_board import PostedOffer, SeenOffer

A = TypeVar("A", bound=protocol.Message)

_NOT_NEEDED = 0xFFFFFFFF
"""The block id that means "no block" in the block tables of a message."""

_QUIET_SECONDS = 1.0
"""Seconds without a request after which a transfer with buffers of the peer renews its lease."""


@dataclass
class RankLease:
    """A transfer's lease at one peer, or an offer that was found on the peer's board.

    The board is shared memory in which a peer on this host posts its offers. Reading the blocks of
    such an offer needs no lease.

    The peer has `timeout` seconds to answer a question. If `others` is true, there are replicas to
    fall back to, and each batch of bytes must also arrive within `timeout` seconds.
    """

    node: NodeState
    connection: PeerConnection
    wanted: TransferRequest
    transfer: Transfer
    timeout: float
    others: bool = False
    seen: SeenOffer | None = None
    """The offer that was found on the peer's board, which needs no lease; None if there is none."""

    def __post_init__(self) -> None:
        wanted = self.wanted
        self.monitor = self.node.channels.monitor(self.connection.endpoint)
        self.rank = self.connection.peer.rank
        self.tokens = token_range(wanted.tokens, self.node.plan.max_len)
        self.mine = protocol.by_group(wanted.blocks)
        self.theirs = None if wanted.peer_blocks is None else protocol.by_group(wanted.peer_blocks)
        self.lent: tuple[int, ...] = ()
        """The indices of the peer's staging buffers that are lent to this lease."""
        self.lent_link = self.connection.link
        """The link over which lent buffers are read.

        It is a separate link if the peer has allocated the buffers for this node only.
        """
        self._asked_at = time.monotonic()
        self._renew_at = math.inf

    @property
    def deadline(self) -> float:
        """The transfer's deadline. In a patient transfer, each arrival of bytes extends it."""
        return self.transfer.deadline

    # -- questions ------------------------------------------------------------------------

    def _ask(
        self, question: protocol.Message, kind: type[A], check: Callable[[], None] | None = None
    ) -> A:
        deadline = min(self.deadline, time.monotonic() + self.timeout)
        endpoint, ask = self.connection.endpoint, self.node.channels.ask
        answer: A = ask(endpoint, question, (kind,), deadline=deadline, check=check)
        return answer

    def ask_of_lease(
        self, message: Callable[..., protocol.Message], kind: type[A], **fields: Any
    ) -> A:
        """Return the peer's answer to a question about this lease.

        Raise an error if the transfer ends before the peer answers.
        """
        session, lease = self.connection.session, self.opened.lease
        about = {"session": session, "lease": lease, "request": self.wanted.request}
        self._asked_at = time.monotonic()
        return self._ask(message(**about, **fields), kind, self.transfer.check_cancelled)

    def open(self) -> None:
        """Find the offer on the peer's board, or ask the peer for a lease."""
        with self.node.metrics.phase("open"):
            self.seen = self._find_offer()
            if self.seen is None:
                self._ask_for_lease()
                return
        offer = self.seen.offer
        self.opened = Opened(lease=b"", seconds=math.inf, blocks=offer.blocks, mark=offer.mark)

    def _find_offer(self) -> SeenOffer | None:
        """Return the offer from the peer's board; None if it is not there or a lease is needed."""
        wanted, link = self.wanted, self.connection.link
        board = link.board
        if board is None or wanted.checksums or wanted.how not in ("auto", "direct"):
            return None
        if wanted.identity is not None:  # boards show offers of the node's own identity alone
            return None
        if not self.reaches_pools():
            return None
        converting = self.node.route_from(self.connection.peer).conversion is not None
        if (converting or not self.may_fill_blocks()) and not link.adds:
            return None
        seen = board.find(wanted.request)
        if seen is not None and seen.offer.mark is not None and not link.owner.marks_travel:
            return None  # the peer waits for the mark before it grants a lease
        return seen

    def ask_for_lease_instead(self) -> None:
        """Ask for a lease on an offer found on the board, if the peer must gather the bytes."""
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
            seconds=self.seconds_left(),
            final=wanted.final,
            identity=self._compared_identity(),
        )
        self.opened = self._ask(question, Opened)
        self._renew_at = time.monotonic() + self.opened.seconds / 2

    def _compared_identity(self) -> CacheIdentity | None:
        """Return the cache identity that the peer must share; None if any identity is allowed."""
        if self.wanted.identity is not None:
            return self.wanted.identity
        return self.node.identity if self.node.check_identity else None

    def check_opened(self) -> None:
        """Check the block tables and the staging buffer size in the peer's answer.

        If the caller passed no source blocks, use the block tables of the answer.
        """
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
        """Raise an error if an offer from the board lacks the requested tokens or source blocks.

        `told` are the offer's block tables.
        """
        mine = {group: np.asarray(ids) for group, ids in (self.theirs or {}).items()}
        if mine:
            told = {group: np.where(ids == _NOT_NEEDED, -1, ids) for group, ids in told.items()}
        held = Offer(offer.request, told, offer.start, offer.stop, expires=math.inf)
        held.check_asked(self.tokens, mine, self.connection.peer.plan)

    def seconds_left(self, until: float = math.inf) -> float:
        """Return the seconds until the transfer's deadline, or until `until` if that is earlier."""
        return max(0.001, min(self.deadline, until) - time.monotonic())

    def renew_in_time(self) -> None:
        """Renew the lease if half of its time has passed, or if it may soon count as idle."""
        now = time.monotonic()
        if now >= self._renew_at or (self.lent and now > self._asked_at + _QUIET_SECONDS):
            self.renew()

    def renew(self) -> None:
        """Extend the lease. The peer thereby confirms that the lease is still held."""
        if self.seen is not None:
            self._confirm(self.seen)
            return
        ok = self.ask_of_lease(protocol.Renew, Ok, seconds=self.seconds_left())
        self._renew_at = time.monotonic() + ok.seconds / 2

    def check_going_on(self) -> None:
        """Raise an error if the transfer has ended, the peer has died or the offer was ended."""
        self.transfer.check_cancelled()
        self.monitor.check()
        if self.seen is not None and not self.seen.held:
            raise lease_expired()

    def await_layer(self, layer: str) -> int | None:
        """Wait until the peer has queued a layer's kernels.

        Return the peer's GPU event after these kernels; None if there is no event to wait for.
        """
        if not self.opened.layered:
            return self.opened.mark
        while True:
            self.check_going_on()
            self.renew_in_time()
            seconds = min(self.timeout / 2, self.seconds_left())
            about = {"layer": layer, "seconds": seconds}
            said = self.ask_of_lease(protocol.AwaitLayer, protocol.LayerWritten, **about)
            if said.written:
                return said.mark

    def borrow(self, count: int, until: float = math.inf) -> None:
        """Borrow staging buffers of the peer, and check that they are inside its staging memory."""
        while len(self.lent) < count and time.monotonic() < until:
            self.transfer.check_cancelled()
            seconds = min(self.timeout / 2, self.seconds_left(until))
            answer = self.ask_of_lease(
                protocol.Borrow, protocol.Lent, buffers=count, seconds=seconds
            )
            lent = answer.buffers
            if answer.memory is not None:
                memory, transport = answer.memory.memory, self.node.transport
                with reclaimed_if_lost():
                    self.lent_link = self.connection.link_to_lent(
                        transport, memory, answer.metadata
                    )
            outside = any((one + 1) * self.opened.piece > self._staging_bytes() for one in lent)
            if outside:
                count = self._staging_bytes() // self.opened.piece
                got = f"staging buffer {max(lent)} in a memory of only {count} buffers"
                raise protocol.bad_handshake(got)
            if len(set(lent)) < len(lent):
                raise protocol.bad_handshake(f"staging buffers {lent}, expected no buffer twice")
            self.lent = lent
            if 0 < len(lent) < count:
                return

    def _staging_bytes(self) -> int:
        staging = self.lent_link.peer_memory.get(STAGING)
        return 0 if staging is None else staging.nbytes

    def close(self, *, complete: bool) -> None:
        """End the lease. If `complete`, raise an error unless the source confirms the lease."""
        if complete:
            with self.node.metrics.phase("confirm"):
                if self.seen is not None:
                    self._confirm(self.seen)
                else:
                    self.ask_of_lease(protocol.Close, Ok, complete=True)
        elif self.seen is None:
            # In the background, because the peer may not answer. The lease then expires.
            self.connection.background.submit(self._abandon)

    def _confirm(self, seen: SeenOffer) -> None:
        """Raise an error unless the source has held the blocks since the offer was found."""
        if not seen.confirmed:
            raise peer_lost("an exiting process") if seen.held else lease_expired()

    def _abandon(self) -> None:
        deadline = time.monotonic() + min(1.0, self.timeout)
        session, lease = self.connection.session, self.opened.lease
        question = protocol.Close(session=session, lease=lease, complete=False)
        with suppress(AtlasError):
            self.node.channels.ask(self.connection.endpoint, question, deadline=deadline)

    def notify_source(self) -> None:
        """Notify the source that this node no longer needs an offer from the source's board.

        Does nothing if the read failed, or if this node may read more of the offer.
        """
        seen, wanted = self.seen, self.wanted
        if seen is None or self.transfer.error is not None:
            return
        whole = wanted.layers is None and self.tokens == (seen.offer.start, seen.offer.stop)
        if not whole and not wanted.final:
            return
        told = protocol.Release(
            session=self.connection.session, request=wanted.request, read=True,
            posting=seen.posting,
        )  # fmt: skip
        deadline = time.monotonic() + self.timeout
        try:
            self.node.channels.ask(self.connection.endpoint, told, deadline=deadline)
        except AtlasError as refused:  # the offer then ends when it expires
            log.warning("release failed request=%r: %s", self.wanted.request, refused)

    # -- what the lease covers ------------------------------------------------------------

    @property
    def mac_key(self) -> bytes | None:
        """The key of the MACs; None if connections are unprotected and checksums are CRC-32."""
        if not self.node.security.protected:
            return None
        version = self.connection.peer.version
        if version < protocol.KEYED_VERSION:
            needed = protocol.KEYED_VERSION
            problem = (
                "Checksums over protected connections need protocol version "
                f"{needed} or newer at both ends"
            )
            got, hint = f"version {version} at the peer", "Upgrade kvatlas at the peer"
            raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
        return mac_key(self.connection.session, self.opened.lease)

    def stream(self, layers: Collection[str] | None) -> AnyStream:
        """Return the stream of bytes that the transfer reads from these layers (None: all)."""
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
        """Whether reads may go directly into the blocks, rather than into staging buffers.

        False if another process may fill the same blocks after a read stalls, and the link cannot
        end the stalled read promptly.
        """
        others = self.others or self.wanted.replaceable
        return not others or self.connection.link.prompt


@contextmanager
def reclaimed_if_lost() -> Iterator[None]:
    """A context that turns `peer_lost` into `buffers_reclaimed`, so that the transfer starts over.

    Use this for reads of staging memory that the peer has allocated for this node only. The peer
    frees this memory when it reclaims the buffers. If the peer has exited, the second attempt
    fails.
    """
    try:
        yield
    except AtlasError as lost:
        if lost.code is Code.PEER_LOST:
            raise buffers_reclaimed() from lost
        raise
