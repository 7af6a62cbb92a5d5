"""Answer the questions of a node's peers with welcomes, leases, gathered bytes and checksums.

Every question is checked against the peer's session and lease before anything is accessed. An error
is sent to the peer as an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.stream_pieces import SOURCE, StreamPiece
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.handshake_checks import Peer, check_same_identity, checked_peer
from kvatlas.wire.leases import Lease, buffers_reclaimed
from kvatlas.wire.offers import Offer
from kvatlas.wire.piece_sums import mac_key, piece_sum, stream_sums
from kvatlas.wire.rpc import Caller, log
from kvatlas.wire.server.offering import OfferingNode
from kvatlas.wire.server.sessions import Sessions

_LONGEST_WAIT = 0.2
"""The maximum seconds that an answer waits for free staging buffers, or for a layer."""

AnswerAnnounce = Callable[[protocol.Announce, Peer, Caller], protocol.Message]


class Answers:
    """Answers the questions of a node's peers. It passes announcements of pushes to `announced`."""

    def __init__(self, node: OfferingNode, announced: AnswerAnnounce) -> None:
        self.node, self._announced = node, announced
        self.sessions = Sessions(self._sessions_ended)
        self._of_lease: dict[type, Callable[[Any, Lease], protocol.Message]] = {
            protocol.Renew: self._renew,
            protocol.Borrow: self._borrow,
            protocol.AwaitLayer: self._await_layer,
            protocol.Gather: self._gather,
            protocol.GetChecksums: self._checksums,
        }

    def sweep(self) -> None:
        """End sessions, leases and offers that have expired."""
        self.sessions.sweep()
        self.node.sweep()

    def close(self) -> None:
        """End the leases of all sessions, and free the staging memory lent to them."""
        self._sessions_ended(self.sessions.keys())

    def _sessions_ended(self, sessions: set[bytes]) -> None:
        """End the leases of these sessions, and free the staging memory that was lent to them."""
        self.node.leases.drop_all(sessions)
        self.node.lending.buffers.end_sessions(sessions)

    def __call__(self, question: Any, caller: Caller) -> protocol.Message:
        """Return the answer to a question, or raise an error."""
        self.node.metrics.add(messages=1)
        if isinstance(question, protocol.Hello):
            return self._welcome(question, caller)
        if isinstance(question, protocol.Keep):
            return self._keep(question, caller)
        peer = self.sessions.find(question.session, caller)
        match question:
            case protocol.Open():
                return self._open(question, peer, caller)
            case protocol.Release():
                return self._release(question, peer)
            case protocol.Announce():
                self.node.security.check_role(peer.name, "push")
                return self._announced(question, peer, caller)
        lease = self.node.leases.find(question.lease, question.session)
        lease.asked_at = time.monotonic()
        if isinstance(question, protocol.Close):
            return self._close(question, lease, peer)
        return self._of_lease[type(question)](question, lease)

    def _welcome(self, hello: protocol.Hello, caller: Caller) -> protocol.Message:
        plan = self.node.peer_plans.find(hello)
        if plan is None:
            return protocol.SendPlan()
        peer = checked_peer(hello, plan, self.node.transport.name, caller.names)
        self.node.check_peer(peer)
        session = self.sessions.begin(hello, peer, caller)
        log.info("connected name=%r rank=%d transport=%s", peer.name, peer.rank, hello.transport)
        answer = self.node.hello(with_plan=True, version=hello.version)
        return protocol.Welcome(hello=answer, session=session)

    # -- offers ---------------------------------------------------------------------------

    def _keep(self, question: protocol.Keep, caller: Caller) -> protocol.Message:
        """Keep an offer from expiring, for a reader that is connecting or about to connect."""
        node = self.node
        with node.lock:
            offer = node.offers.get(question.request)
            if offer is None or not self._may_read(offer, caller):
                raise _not_offered(question)
            return protocol.Ok(seconds=max(0.0, offer.keep(question.seconds)))

    def _may_read(self, offer: Offer, caller: Caller) -> bool:
        """Whether a peer without a session may read an offer, under a name that its key proves."""
        proved, security = caller.names, self.node.security
        return proved is None or any(
            offer.may_be_read_by(name) and security.has_role(name, "pull") for name in proved
        )

    def _open(self, question: protocol.Open, peer: Peer, caller: Caller) -> protocol.Message:
        """Grant a lease on an offer, after checking that the peer may read it."""
        if question.direction == "push":
            raise _old_push(peer)
        node = self.node
        theirs = protocol.unpack_tables(question.blocks)
        told = protocol.unpack_tables(question.peer_blocks or {})
        with node.lock:
            offer = node.offers.get(question.request)
        over = offer is None or offer.expires <= time.monotonic()
        if offer is None or over or not offer.may_be_read_by(peer.name):
            raise _not_offered(question)
        tokens = question.start, question.stop
        offer.check_asked(tokens, told, node.plan)
        if node.check_identity or question.identity is not None:
            asked = question.identity or peer.identity
            check_same_identity(offer.identity, asked, nodes=(node.name, peer.name))
        node.security.check_role(peer.name, "pull")
        stream = node.stream(peer, offer.blocks, theirs, tokens, question.layers, incoming=False)
        mark = self._mark_for_reader(offer.mark)
        with node.lock:
            if node.offers.get(question.request) is not offer:
                raise _not_offered(question)
            lease = node.leases.grant(
                offer.keep(question.seconds),
                session=question.session,
                peer=(caller.identity, peer.name),
                names=peer.names,
                request=question.request,
                complete=_is_complete(question, offer),
                stream=stream,
                part_of=offer,
                entries=sum(map(len, (*theirs.values(), *offer.blocks.values()))),
            )
        log.info("lease granted request=%r name=%r", lease.request, peer.name)
        try:
            self.sessions.find(question.session, caller)
        except AtlasError:  # the session has ended while the lease was granted
            node.leases.drop(lease)
            raise
        return protocol.Opened(
            lease=lease.key,
            seconds=lease.left,
            blocks=protocol.pack_tables(offer.blocks),
            piece=node.staging.piece if node.lending.count else 0,
            mark=mark,
            layered=offer.layers is not None,
        )

    def _mark_for_reader(self, mark: int | None) -> int | None:
        """Return `mark`, the GPU event that the reader must wait for; None if it need not wait.

        If readers cannot wait for GPU events, this method waits for the event and returns None.
        """
        transport = self.node.transport
        if mark is not None and not transport.marks_travel and transport.marks is not None:
            transport.marks.wait(mark)
            return None
        self.node.mover.follow(mark)
        return mark

    def _release(self, question: protocol.Release, peer: Peer) -> protocol.Message:
        node, posting = self.node, question.posting
        read = False
        if question.read and posting is not None and node.shares_pools:
            # The peer can read a whole offer that it found on the board, without a lease.
            read = node.route_to(peer).by_element(source_rank=node.rank, destination_rank=peer.rank)
        with node.lock:
            offer = node.offers.get(question.request)
            if posting is not None and node.posting(question.request) != posting:
                offer = None  # a newer offer has its name
        if offer is not None:
            self._finished(offer, peer, read=read)
        return protocol.Ok()

    def _finished(self, offer: Offer, peer: Peer, *, read: bool) -> None:
        """Record that a peer has finished reading an offer. End the offer after its last reader."""
        readers = {(peer.plan_hash, rank) for rank in self.node.readers(peer)}
        with self.node.lock:
            if not offer.may_be_read_by(peer.name):
                return
            why = offer.finished((peer.plan_hash, peer.rank), readers, read=read)
        if why:
            self.node.release(offer.request, why, offer)

    # -- leases ---------------------------------------------------------------------------

    def _renew(self, question: protocol.Renew, lease: Lease) -> protocol.Message:
        offer, seconds = lease.part_of, question.seconds
        if offer is not None:
            with self.node.lock:
                if self.node.offers.get(offer.request) is offer:
                    seconds = offer.keep(seconds)
        self.node.leases.renew(lease, seconds)
        return protocol.Ok(seconds=lease.left)

    def _await_layer(self, question: protocol.AwaitLayer, lease: Lease) -> protocol.Message:
        """Wait briefly for a layer. Return whether it is written."""
        layers = None if lease.part_of is None else lease.part_of.layers
        if layers is None:
            raise protocol.bad_handshake(
                f"layer {question.layer!r} of request {lease.request!r}",
                problem="The peer waits for one layer, but the request is not offered by layer",
            )
        seconds = min(question.seconds, lease.left, _LONGEST_WAIT)
        written, mark = layers.wait(question.layer, seconds)
        lease.check()
        return protocol.LayerWritten(written=written, mark=self._mark_for_reader(mark))

    def _borrow(self, question: protocol.Borrow, lease: Lease) -> protocol.Message:
        """Lend staging buffers to a lease, waiting a while until some are free."""
        seconds = min(question.seconds, lease.left, _LONGEST_WAIT)
        loan = self.node.lending.lend(lease, question.buffers, seconds)
        if loan is None:
            return protocol.Lent()
        if loan.segment is None:
            return protocol.Lent(buffers=loan.buffers)
        region = protocol.RegisteredMemory.of(STAGING, loan.segment.region)
        return protocol.Lent(buffers=loan.buffers, memory=region, metadata=loan.segment.metadata)

    def _gather(self, question: protocol.Gather, lease: Lease) -> protocol.Message:
        asked = f"bytes {question.start:,}..{question.stop:,}"
        nbytes, most = question.stop - question.start, self.node.staging.piece
        if not 0 <= nbytes <= most:
            raise protocol.bad_handshake(f"{asked}, expected a piece of 0 to {most:,} bytes")
        lease.check_lent()
        part = StreamPiece.of(lease.stream, question.start, question.stop, SOURCE)
        with lease.guard, self.node.metrics.phase("stage"):
            lease.check()
            loan = lease.check_lent()
            if question.buffer not in loan.buffers:
                got = f"buffer {question.buffer}, which the lease has not borrowed"
                raise protocol.bad_handshake(got)
            if question.stop < lease.gathered:
                # A duplicate that was delayed: its buffer has a later piece, which is being read.
                raise protocol.bad_handshake(
                    f"{asked}, after {lease.gathered:,} bytes were gathered",
                    problem="A delayed request asks again for bytes that were already gathered",
                    hint="Retry the transfer if it failed. Otherwise there is nothing to do",
                )
            self.node.fill(part, loan.view(question.buffer, nbytes))
            lease.staged = True
            if question.start <= lease.gathered < question.stop:
                lease.gathered, lease.moved_at = question.stop, time.monotonic()
        # The gathered bytes count only if the lease still held the blocks afterwards.
        lease.check()
        return protocol.Ok(seconds=lease.left)

    def _checksums(self, question: protocol.GetChecksums, lease: Lease) -> protocol.Message:
        lease.moved_at = lease.asked_at
        span = question.start, question.stop
        if not 0 <= span[1] - span[0] <= protocol.MAX_CHECKSUM_SPAN:
            raise protocol.bad_handshake(
                f"checksums of bytes {span[0]:,}..{span[1]:,}, expected 0 to "
                f"{protocol.MAX_CHECKSUM_SPAN:,} bytes at once"
            )
        key = mac_key(question.session, question.lease) if question.keyed else None
        if isinstance(lease.stream, ConvertedStream):
            # The two ends store different formats: the piece is summed as it is sent.
            part = StreamPiece.of(lease.stream, *span, SOURCE)
            piece = np.empty(span[1] - span[0], dtype=np.uint8)
            with lease.guard:
                lease.check()
                self.node.fill(part, piece)
            sums = piece_sum(piece, key)
        else:
            copies = lease.stream.copies(*span)
            with lease.guard:
                lease.check()
                sums = stream_sums(self.node.mover, copies, question.piece, key, source=True)
        lease.check()
        return protocol.Checksums(sums=sums)

    def _close(self, question: protocol.Close, lease: Lease, peer: Peer) -> protocol.Message:
        left = lease.left
        self.node.leases.drop(lease)
        if question.complete and lease.reclaimed and lease.staged:
            raise buffers_reclaimed()  # pieces that were read may be those of another lease
        if question.complete and lease.complete and lease.part_of is not None:
            if self._must_gather(lease):
                lease.check_all_gathered()
            self._finished(lease.part_of, peer, read=True)
        return protocol.Ok(seconds=left)

    def _must_gather(self, lease: Lease) -> bool:
        """Whether this node must gather the pull's bytes, because the peer cannot read the pools.

        A peer cannot read pools that are not shared. It also cannot read pools whose content needs
        a conversion, if the conversion cannot be part of the read.
        """
        stream, casts = lease.stream, self.node.transport.casts
        converts = isinstance(stream, ConvertedStream) and not (casts and stream.by_element)
        return converts or not self.node.shares_pools


def _is_complete(question: protocol.Open, offer: Offer) -> bool:
    """Whether this is the reader's last pull: it covers the whole offer, or is marked `final`."""
    whole = question.layers is None and (question.start, question.stop) == (offer.start, offer.stop)
    return whole or question.final


def _not_offered(question: protocol.Open | protocol.Keep) -> AtlasError:
    problem = "The source has no offer of this request for the reader"
    hint = "Call offer() at the source first, with a larger timeout= if the offer expired"
    got = f"request {question.request!r}"
    return AtlasError(Code.UNKNOWN_REQUEST, problem, got=got, hint=hint)


def _old_push(peer: Peer) -> AtlasError:
    problem = f"Pushes need protocol version {protocol.PUSH_VERSION} or newer at both ends"
    got, hint = f"version {peer.version} at the source", "Upgrade kvatlas at the source"
    return AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
