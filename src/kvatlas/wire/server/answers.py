"""What a node answers its peers: welcome, leases, staged pieces, checksums.

Every question is checked against what the peer's session and lease allow before anything
is touched; a refusal is an answer too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.planning import Plan
from kvatlas.wire import protocol
from kvatlas.wire.leases import Expected, Lease, Offer
from kvatlas.wire.peers import Peer, checked_peer
from kvatlas.wire.rpc import Caller, log
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.server.sessions import Sessions
from kvatlas.wire.staging import checksums, gather, scatter, stream_slice

_LONGEST_LEASE = 3600.0


class Answers:
    """Answers peers on behalf of a node."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.sessions = Sessions(node.leases.drop_all)

    def sweep(self) -> None:
        """End what has expired: sessions, leases and offers."""
        self.sessions.sweep()
        self.node.sweep()

    def __call__(self, question: Any, caller: Caller) -> protocol.Message:
        """The answer to a question, or a refusal raised."""
        self.node.metrics.add(messages=1)
        if isinstance(question, protocol.Hello):
            return self._welcome(question, caller)
        peer = self.sessions.find(question.session, caller)
        match question:
            case protocol.Open():
                return self._open(question, peer)
            case protocol.Renew():
                lease = self._lease(question)
                self.node.leases.renew(lease, min(question.seconds, self._longest(lease)))
                return protocol.Ok(seconds=lease.left)
            case protocol.Gather():
                return self._stage(question)
            case protocol.GetChecksums():
                return self._checksums(question)
            case protocol.Close():
                return self._close(question, peer)
        raise protocol.bad_handshake(type(question).__name__)

    def _welcome(self, hello: protocol.Hello, caller: Caller) -> protocol.Message:
        plan = self.node.peer_plans.find(hello)
        if plan is None:
            return protocol.SendPlan()
        peer = checked_peer(hello, plan, self.node.transport.name)
        self.node.route_to(peer)
        session = self.sessions.begin(hello, peer, caller)
        log.info("welcome name=%r rank=%d transport=%s", peer.name, peer.rank, hello.transport)
        return protocol.Welcome(hello=self.node.hello(with_plan=True), session=session)

    def _open(self, question: protocol.Open, peer: Peer) -> protocol.Message:
        node = self.node
        theirs = protocol.unpack_tables(question.blocks)
        told = protocol.unpack_tables(question.peer_blocks or {})
        with node.lock:
            held = self._held(question, peer)
            tokens = question.start, question.stop
            _check_same_blocks(held.blocks, told)
            _check_tokens(held, *tokens, node.plan)
            copies = node.copies(
                peer, held.blocks, theirs, tokens, question.layers,
                incoming=question.direction == "push",
            )  # fmt: skip
            seconds = question.seconds
            if isinstance(held, Offer):
                seconds = min(seconds, held.expires - time.monotonic())
            else:
                # A retried push resets what has arrived.
                held.arrived.discard(peer.rank)
            buffers = tuple(node.staging.acquire(question.buffers))
            try:
                lease = node.leases.grant(
                    seconds,
                    session=question.session,
                    request=question.request,
                    direction=question.direction,
                    peer_rank=peer.rank,
                    complete=question.layers is None and tokens == (held.start, held.stop),
                    copies=copies,
                    buffers=buffers,
                )
            except AtlasError:
                node.staging.give_back(buffers)
                raise
        log.info("open request=%r direction=%s name=%r", lease.request, lease.direction, peer.name)
        return protocol.Opened(
            lease=lease.key,
            seconds=lease.left,
            blocks=protocol.pack_tables(held.blocks),
            buffers=lease.buffers,
            piece=node.staging.piece,
        )

    def _held(self, question: protocol.Open, peer: Peer) -> Offer | Expected:
        """What this node offers to be read, or expects to be written, under a request's name."""
        if question.direction == "pull":
            offer = self.node.offers.get(question.request)
            if offer is not None and offer.expires > time.monotonic():
                return offer
            problem = "The request is not offered"
        else:
            expected = self.node.expected.get(question.request)
            if expected is not None and expected.wants(peer.plan_hash):
                return expected
            problem = "The request is not expected from this plan, or has arrived"
        hint = "Offer or expect it first, and for long enough"
        raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(question.request), hint=hint)

    def _stage(self, question: protocol.Gather) -> protocol.Message:
        lease, staging = self._lease(question), self.node.staging
        nbytes = question.stop - question.start
        if not 0 <= nbytes <= staging.piece:
            raise protocol.bad_handshake(f"a piece of bytes {question.start}..{question.stop}")
        if question.buffer not in lease.buffers:
            raise protocol.bad_handshake(f"buffer {question.buffer}, not one of the lease's")
        part = stream_slice(lease.copies, question.start, question.stop)
        stream = staging.view(question.buffer, nbytes)
        with lease.guard, self.node.metrics.phase("stage"):
            self._lease(question)
            if lease.direction == "pull":
                gather(part, self.node.pools, stream)
            else:
                scatter(part, stream, self.node.pools)
        # What was gathered counts only if the blocks were still held when it was done.
        return protocol.Ok(seconds=self._lease(question).left)

    def _checksums(self, question: protocol.GetChecksums) -> protocol.Message:
        lease = self._lease(question)
        span = question.start, question.stop
        if not 0 <= question.stop - question.start <= protocol.MAX_CHECKSUM_SPAN:
            raise protocol.bad_handshake(f"checksums of bytes {question.start}..{question.stop}")
        with lease.guard:
            self._lease(question)
            at_source = lease.direction == "pull"
            sums = checksums(lease.copies, self.node.pools, span, question.piece, src=at_source)
        self._lease(question)
        return protocol.Checksums(sums=sums.astype("<u4").tobytes())

    def _close(self, question: protocol.Close, peer: Peer) -> protocol.Message:
        lease = self._lease(question)
        left = lease.left
        self.node.leases.drop(lease)
        if question.complete and lease.complete:
            if lease.direction == "push":
                self._arrived(lease)
            elif self._all_have_read(lease, peer):
                self.node.release(lease.request, "read")
        return protocol.Ok(seconds=left)

    def _all_have_read(self, lease: Lease, peer: Peer) -> bool:
        """Whether every rank that reads from this one has now read the whole request."""
        with self.node.lock:
            offer = self.node.offers.get(lease.request)
            if offer is None:
                return False
            offer.readers.add((peer.plan_hash, peer.rank))
            readers = {(peer.plan_hash, rank) for rank in self.node.readers(peer)}
            return readers <= offer.readers

    def _arrived(self, lease: Lease) -> None:
        with self.node.lock:
            expected = self.node.expected.get(lease.request)
            if expected is None:
                return
            expected.arrived.add(lease.peer_rank)
            if expected.sources <= expected.arrived:
                # Nobody may write any more to what is now there.
                self.node.leases.drop_request(lease.request, "push")
                expected.ready.set()

    def _lease(self, question: Any) -> Lease:
        return self.node.leases.find(question.lease, question.session)

    def _longest(self, lease: Lease) -> float:
        offer = self.node.offers.get(lease.request) if lease.direction == "pull" else None
        return _LONGEST_LEASE if offer is None else offer.expires - time.monotonic()


def _check_same_blocks(mine: Mapping[int, Int64s], told: Mapping[int, Int64s]) -> None:
    """Refuse a peer that means other blocks than this node has for the request."""
    for group, ids in told.items():
        if group not in mine or not np.array_equal(ids, mine[group] & 0xFFFFFFFF):
            raise AtlasError(
                Code.UNKNOWN_REQUEST,
                "The two ends mean different blocks by the request",
                got=f"other blocks for group {group}",
                hint="Leave the peer's blocks out to be told them",
            )


def _check_tokens(held: Offer | Expected, start: int, stop: int, plan: Plan) -> None:
    """Refuse tokens that are not held; a lone recurrent state is the one after the last."""
    alone = any(
        group.kind == "recurrent" and len(held.blocks.get(index, ())) == 1
        for index, group in enumerate(plan.groups)
    )
    if not held.start <= start <= stop <= held.stop or (alone and stop != held.stop):
        raise AtlasError(
            Code.BAD_TOKENS,
            f"The tokens are not among {held.start}..{held.stop}"
            + (", or do not end with the last, whose state is the one kept" if alone else ""),
            got=(start, stop),
            hint="Ask for what is offered",
        )
