"""Answers to a node's peers: welcomes, leases, staged pieces, checksums.

Every question is checked against the peer's session and lease before anything is accessed. An error
is sent to the peer as an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.stream_pieces import SOURCE, StreamPiece
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.leases import Lease, Offer, buffers_reclaimed
from kvatlas.wire.peer_buffers import Loan
from kvatlas.wire.peers import Peer, check_same_identity, checked_peer
from kvatlas.wire.piece_sums import mac_key, piece_sum, stream_sums
from kvatlas.wire.read_grants import ReadGrant
from kvatlas.wire.rpc import Caller, log
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.server.sessions import Sessions
from kvatlas.wire.transports.offer_board import Posting

_LONGEST_WAIT = 0.2
"""The maximum seconds that an answer waits for free staging buffers, or for a layer."""

AnswerAnnounce = Callable[[protocol.Announce, Peer, Caller], protocol.Message]


class Answers:
    """Answers peers on behalf of a node. `announced` answers those that push."""

    def __init__(self, node: NodeState, announced: AnswerAnnounce) -> None:
        self.node, self._announced = node, announced
        self.sessions = Sessions(self._sessions_ended)

    def sweep(self) -> None:
        """End sessions, leases and offers that have expired."""
        self.sessions.sweep()
        self.node.sweep()

    def __call__(self, question: Any, caller: Caller) -> protocol.Message:
        """Return the answer to a question, or raise an error."""
        self.node.metrics.add(messages=1)
        if isinstance(question, protocol.Hello):
            return self._welcome(question, caller)
        peer = self.sessions.find(question.session, caller)
        match question:
            case protocol.Open():
                opened = self._open(question, peer, caller)
                self._check_session(question.session, caller)
                return opened
            case protocol.Renew():
                return self._renew(question)
            case protocol.Borrow():
                return self._borrow(question)
            case protocol.AwaitLayer():
                return self._await_layer(question)
            case protocol.Gather():
                return self._gather(question)
            case protocol.GetChecksums():
                return self._checksums(question)
            case protocol.Close():
                return self._close(question, peer)
            case protocol.Release():
                seen = question.read and question.posting is not None
                read = seen and self._reads_in_place(peer)
                self._reads_no_more(question.request, peer, question.posting, read=read)
                return protocol.Ok()
            case protocol.Announce():
                self.node.security.check_role(peer.name, "push")
                return self._announced(question, peer, caller)
        name = type(question).__name__
        raise protocol.bad_handshake(f"a message {name}, which a node does not answer")

    def _welcome(self, hello: protocol.Hello, caller: Caller) -> protocol.Message:
        plan = self.node.peer_plans.find(hello)
        if plan is None:
            return protocol.SendPlan()
        peer = replace(checked_peer(hello, plan, self.node.transport.name), names=caller.names)
        self.node.check_peer(peer)
        self.node.check_route(peer)
        self.node.check_peer_identity(peer)
        session = self.sessions.begin(hello, peer, caller)
        log.info("welcome name=%r rank=%d transport=%s", peer.name, peer.rank, hello.transport)
        answer = self.node.hello(with_plan=True, version=hello.version)
        return protocol.Welcome(hello=answer, session=session)

    def _open(self, question: protocol.Open, peer: Peer, caller: Caller) -> protocol.Message:
        if question.direction == "push":
            raise _old_push(peer)
        node = self.node
        theirs = protocol.unpack_tables(question.blocks)
        told = protocol.unpack_tables(question.peer_blocks or {})
        offer = self._offer(question, peer)
        tokens = question.start, question.stop
        offer.check_asked(tokens, told, node.plan)
        if node.check_identity or question.identity is not None:
            asked = question.identity or peer.identity
            check_same_identity(offer.identity, asked, nodes=(node.name, peer.name))
        node.security.check_role(peer.name, "pull")
        stream = node.stream(peer, offer.blocks, theirs, tokens, question.layers, incoming=False)
        mark = self._told(offer.mark)
        with node.lock:
            if node.offers.get(question.request) is not offer:
                raise _not_offered(question)
            lease = node.leases.grant(
                min(question.seconds, offer.expires - time.monotonic()),
                session=question.session,
                peer=(caller.identity, peer.name),
                request=question.request,
                complete=_is_complete(question, offer),
                stream=stream,
                part_of=offer,
                entries=sum(map(len, (*theirs.values(), *offer.blocks.values()))),
            )
            lease.grant = ReadGrant(
                question.session, stream, lease.buffers_lent, node.staging.piece, peer.names
            )
        log.info("open request=%r name=%r", lease.request, peer.name)
        return protocol.Opened(
            lease=lease.key,
            seconds=lease.left,
            blocks=protocol.pack_tables(offer.blocks),
            piece=node.staging.piece if node.lending.count else 0,
            mark=mark,
            layered=offer.layers is not None,
        )

    def _renew(self, question: protocol.Renew) -> protocol.Message:
        lease = self._lease(question)
        offer = lease.part_of
        longest = question.seconds if offer is None else offer.expires - time.monotonic()
        self.node.leases.renew(lease, min(question.seconds, longest))
        return protocol.Ok(seconds=lease.left)

    def _await_layer(self, question: protocol.AwaitLayer) -> protocol.Message:
        """Wait briefly for a layer. Return whether it is written."""
        lease = self._lease(question)
        offer = lease.part_of
        if offer is None or offer.layers is None:
            raise protocol.bad_handshake(
                f"layer {question.layer!r} of request {lease.request!r}",
                problem="The peer waits for a layer of an offer that is not layered",
            )
        seconds = min(question.seconds, lease.left, _LONGEST_WAIT)
        written, mark = offer.layers.wait(question.layer, seconds)
        lease.check()
        return protocol.LayerWritten(written=written, mark=self._told(mark))

    def _told(self, mark: int | None) -> int | None:
        """Return the mark for a reader to wait for. If readers cannot wait for marks, wait here."""
        transport = self.node.transport
        if mark is not None and not transport.marks_travel and transport.marks is not None:
            transport.marks.wait(mark)
            return None
        self.node.mover.follow(mark)
        return mark

    def _check_session(self, session: bytes, caller: Caller) -> None:
        """Drop the leases of a session that has ended while a lease was granted."""
        try:
            self.sessions.find(session, caller)
        except AtlasError:
            self.node.leases.drop_all({session})
            raise

    def _offer(self, question: protocol.Open, peer: Peer) -> Offer:
        """Return the offer of a request to this peer."""
        with self.node.lock:
            offer = self.node.offers.get(question.request)
        if offer is None or offer.expires <= time.monotonic():
            raise _not_offered(question)
        if not offer.may_be_read_by(peer.name):
            raise _not_offered(question)
        return offer

    def _borrow(self, question: protocol.Borrow) -> protocol.Message:
        """Lend staging buffers to a lease, waiting a while until some are free."""
        lease, node = self._lease(question), self.node
        lending = node.lending
        with lease.guard:
            if lease.loan is not None or lease.reclaimed:
                return _lent(lease.check_lent())
            if lease.borrowing or not lending.count:
                return protocol.Lent()
            lease.borrowing = True
        try:
            seconds = min(question.seconds, lease.left, _LONGEST_WAIT)
            loan = lending.lend(lease, question.buffers, seconds, node.reclaim_buffers)
            with lease.guard:
                if loan is not None and lease.held:
                    lease.keep_loan(loan)
                    return _lent(loan)
        finally:
            lease.borrowing = False
        if loan is not None:
            lending.take_back(lease, loan, keep=False)
        lease.check()
        return protocol.Lent()

    def _gather(self, question: protocol.Gather) -> protocol.Message:
        lease = self._lease(question)
        nbytes = self._checked_piece(question)
        if question.buffer not in lease.check_lent().buffers:
            raise protocol.bad_handshake(
                f"buffer {question.buffer}, which the lease has not borrowed"
            )
        part = StreamPiece.of(lease.stream, question.start, question.stop, SOURCE)
        with lease.guard, self.node.metrics.phase("stage"):
            lease.check()
            loan = lease.check_lent()
            if question.stop < lease.gathered:
                # A duplicate that was delayed: its buffer has a later piece, which is being read.
                raise protocol.bad_handshake(
                    f"bytes {question.start:,}..{question.stop:,}, after {lease.gathered:,} bytes "
                    "were gathered",
                    problem="A delayed request asks again for bytes that were already gathered",
                    hint="Retry the transfer if it failed. Otherwise there is nothing to do",
                )
            self.node.fill(part, loan.view(question.buffer, nbytes))
            lease.staged = True
            if question.start <= lease.gathered < question.stop:
                lease.gathered, lease.moved_at = question.stop, time.monotonic()
        # What was gathered counts only if the blocks were still held when it was done.
        lease.check()
        return protocol.Ok(seconds=lease.left)

    def _checked_piece(self, question: protocol.Gather) -> int:
        nbytes = question.stop - question.start
        if not 0 <= nbytes <= self.node.staging.piece:
            raise protocol.bad_handshake(
                f"bytes {question.start:,}..{question.stop:,}, expected a piece of 0 to "
                f"{self.node.staging.piece:,} bytes"
            )
        return nbytes

    def _checksums(self, question: protocol.GetChecksums) -> protocol.Message:
        lease = self._lease(question)
        lease.moved_at = lease.asked_at
        if not 0 <= question.stop - question.start <= protocol.MAX_CHECKSUM_SPAN:
            raise protocol.bad_handshake(
                f"checksums of bytes {question.start:,}..{question.stop:,}, expected 0 to "
                f"{protocol.MAX_CHECKSUM_SPAN:,} bytes at once"
            )
        if isinstance(lease.stream, ConvertedStream):
            return self._converted_checksum(question, lease, lease.stream)
        part = lease.stream.copies(question.start, question.stop)
        with lease.guard:
            lease.check()
            key = self._mac_key(question) if question.keyed else None
            sums = stream_sums(self.node.mover, part, question.piece, key, src=True)
        lease.check()
        return protocol.Checksums(sums=sums)

    def _converted_checksum(
        self, question: protocol.GetChecksums, lease: Lease, stream: ConvertedStream
    ) -> protocol.Message:
        """Return the checksum of a piece as it is sent: the two ends store different formats."""
        span = question.start, question.stop
        part = StreamPiece.of(stream, *span, SOURCE)
        piece = np.empty(span[1] - span[0], dtype=np.uint8)
        with lease.guard:
            lease.check()
            self.node.fill(part, piece)
        found = piece_sum(piece, self._mac_key(question) if question.keyed else None)
        lease.check()
        return protocol.Checksums(sums=found)

    def _mac_key(self, question: protocol.LeaseQuestion) -> bytes:
        return mac_key(question.session, question.lease)

    def _close(self, question: protocol.Close, peer: Peer) -> protocol.Message:
        lease = self._lease(question)
        left = lease.left
        self.node.leases.drop(lease)
        if question.complete and lease.reclaimed and lease.staged:
            raise buffers_reclaimed()  # pieces that were read may be those of another lease
        if question.complete and lease.complete:
            if self._alone_sends(lease):
                lease.check_all_gathered()
            self._reads_no_more(lease.request, peer, None, read=True, only=lease.part_of)
        return protocol.Ok(seconds=left)

    def _alone_sends(self, lease: Lease) -> bool:
        """Whether the peer gets the bytes of a pull only if this node gathers them."""
        if not self._shares_pools():
            return True
        stream, casts = lease.stream, self.node.transport.casts
        return isinstance(stream, ConvertedStream) and not (casts and stream.by_element)

    def _reads_in_place(self, peer: Peer) -> bool:
        """Whether a peer can read a whole offer that it found on the board, without a lease."""
        ranks = {"src_rank": self.node.rank, "dst_rank": peer.rank}
        return self._shares_pools() and self.node.route_to(peer).by_element(**ranks)

    def _shares_pools(self) -> bool:
        own = self.node.plan.rank_pools(self.node.rank)
        return all(map(self.node.transport.shares, own))

    def _reads_no_more(
        self,
        request: str,
        peer: Peer,
        posting: Posting | None,
        *,
        read: bool,
        only: Offer | None = None,
    ) -> None:
        """End an offer if this peer was the last that reads from it.

        An offer that was made after the posting was read, or that is not `only`, is left alone.
        The reason is `read` if all ranks have read the offer.
        """
        own = peer.plan_hash, peer.rank
        readers = {(peer.plan_hash, rank) for rank in self.node.readers(peer)}
        with self.node.lock:
            offer = self.node.offers.get(request)
            if offer is None or not offer.may_be_read_by(peer.name):
                return
            if only is not None and offer is not only:
                return
            if posting is not None and self.node.posting(request) != posting:
                return
            if read:
                offer.let_go_by.discard(own)
            elif own not in offer.read_by:
                offer.let_go_by.add(own)
            offer.read_by.add(own)
            if not readers <= offer.read_by:
                return
            why = "let_go" if offer.let_go_by & {own, *readers} else "read"
        self.node.release(request, why, offer)

    def close(self) -> None:
        """End all sessions, and free peers' memory."""
        self._sessions_ended(self.sessions.keys())

    def _sessions_ended(self, sessions: set[bytes]) -> None:
        """End the leases of sessions, and free the memory of their peers."""
        self.node.leases.drop_all(sessions)
        self.node.lending.end_sessions(sessions)

    def _lease(self, question: protocol.LeaseQuestion) -> Lease:
        lease = self.node.leases.find(question.lease, question.session)
        lease.asked_at = time.monotonic()
        return lease


def _is_complete(question: protocol.Open, offer: Offer) -> bool:
    """Whether the pull is the last one: it covers everything, or its reader is done."""
    if question.final:
        return True
    return question.layers is None and (question.start, question.stop) == (offer.start, offer.stop)


def _lent(loan: Loan) -> protocol.Message:
    """Return the message that lists lent buffers and, if needed, how to connect to them."""
    if loan.segment is None:
        return protocol.Lent(buffers=loan.buffers)
    region = protocol.RegisteredMemory.of(STAGING, loan.segment.region)
    return protocol.Lent(buffers=loan.buffers, memory=region, metadata=loan.segment.metadata)


def _not_offered(question: protocol.Open) -> AtlasError:
    problem = "The request is not offered to this node"
    hint = "Call offer() at the source first, with a larger seconds= if the offer expired"
    return AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(question.request), hint=hint)


def _old_push(peer: Peer) -> AtlasError:
    problem = f"Pushes need protocol version {protocol.PUSH_VERSION} at both ends"
    got, hint = f"version {peer.version} at the source", "Upgrade kvatlas at the source"
    return AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
