"""What a node answers its peers: welcome, leases, staged pieces, checksums, goodbye.

Every question is held against what the peer's session and lease allow before anything
is touched; a refusal is an answer too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.planning import Plan
from kvatlas.wire import protocol as say
from kvatlas.wire.leases import Expected, Lease, Offer
from kvatlas.wire.peers import Peer, checked_peer
from kvatlas.wire.rpc import log
from kvatlas.wire.staging import cut, gather, scatter, sums

if TYPE_CHECKING:
    from kvatlas.wire.server.node import Node

_SESSIONS = 1024
_LONGEST = 3600.0


class Answers:
    """Answers in the name of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._sessions: OrderedDict[bytes, Peer] = OrderedDict()

    def __call__(self, question: Any) -> say.Message:
        """The answer to a question, or a refusal raised."""
        self.node.metrics.add(messages=1)
        match question:
            case say.Hello():
                return self._welcome(question)
            case say.Open():
                return self._open(question)
            case say.Renew():
                lease = self._lease(question)
                self.node.leases.renew(lease, min(question.seconds, self._longest(lease)))
                return say.Fine(seconds=lease.left)
            case say.Gather():
                return self._stage(question)
            case say.Sums():
                return self._sum(question)
            case say.Close():
                return self._close(question)
        raise say.bad_handshake(type(question).__name__)

    def _welcome(self, hello: say.Hello) -> say.Message:
        plan = self.node.plans.find(hello)
        if plan is None:
            return say.SendPlan()
        peer = checked_peer(hello, plan, self.node.transport.name)
        self.node.route_to(peer)
        session = say.new_key()
        with self.node.lock:
            # A process that starts again under its name leaves nothing of its last run.
            gone = {
                key
                for key, old in self._sessions.items()
                if (old.name, old.rank) == (peer.name, peer.rank) and old.run != peer.run
            }
            for key in gone:
                del self._sessions[key]
            self._sessions[session] = peer
            while len(self._sessions) > _SESSIONS:
                gone.add(self._sessions.popitem(last=False)[0])
            self.node.leases.drop_all(gone)
        log.info("welcome name=%s rank=%d transport=%s", peer.name, peer.rank, peer.transport)
        return say.Welcome(hello=self.node.hello(with_plan=True), session=session)

    def _open(self, asked: say.Open) -> say.Message:
        peer = self._peer(asked.session)
        theirs = say.unpack(asked.blocks)
        known = None if asked.peer_blocks is None else say.unpack(asked.peer_blocks)
        with self.node.lock:
            held = self._held(asked, peer)
            _refuse_other_blocks(held.blocks, known)
            _refuse_outside(held, asked.start, asked.stop, self.node.plan)
            about: dict[str, Any] = {"tokens": (asked.start, asked.stop), "layers": asked.layers}
            if asked.way == "pull":
                bound = self.node.route_to(peer).bind(
                    src_rank=self.node.rank, dst_rank=peer.rank, src_blocks=held.blocks,
                    dst_blocks=theirs, **about,
                )  # fmt: skip
            else:
                bound = self.node.route_from(peer).bind(
                    src_rank=peer.rank, dst_rank=self.node.rank, src_blocks=theirs,
                    dst_blocks=held.blocks, **about,
                )  # fmt: skip
            seconds = asked.seconds
            if isinstance(held, Offer):
                seconds = min(seconds, held.expires - time.monotonic())
            else:
                # Who writes again has not arrived until it is done again.
                held.arrived.discard(peer.rank)
            lease = self.node.leases.add(
                seconds,
                session=asked.session,
                request=asked.request,
                way=asked.way,
                peer_rank=peer.rank,
                whole=asked.layers is None and (asked.start, asked.stop) == (held.start, held.stop),
                copies=bound.copies,
                slots=tuple(self.node.take(asked.slots)),
            )
        return say.Opened(
            lease=lease.key,
            seconds=lease.left,
            blocks=say.pack(held.blocks),
            slots=lease.slots,
            piece=self.node.piece,
        )

    def _held(self, asked: say.Open, peer: Peer) -> Offer | Expected:
        offer = self.node.offers.get(asked.request) if asked.way == "pull" else None
        if offer is not None and offer.expires > time.monotonic():
            return offer
        expected = self.node.expected.get(asked.request) if asked.way == "push" else None
        wanted = expected is not None and expected.source == peer.plan_hash
        if expected is not None and wanted and not expected.ready.is_set():
            return expected
        raise AtlasError(
            Code.UNKNOWN_REQUEST,
            "A request is offered where it is read, and where it is written it is expected "
            "from that plan and not yet there",
            got=repr(asked.request),
            hint="Offer it first, and for long enough",
        )

    def _stage(self, asked: say.Gather) -> say.Message:
        lease = self._lease(asked)
        if not 0 <= asked.stop - asked.start <= self.node.piece:
            raise say.bad_handshake(f"a piece of bytes {asked.start}..{asked.stop}")
        if asked.slot not in lease.slots:
            raise say.bad_handshake(f"slot {asked.slot}, not one of the lease's")
        part = cut(lease.copies, asked.start, asked.stop)
        room = self.node.staging[asked.slot * self.node.piece :][: asked.stop - asked.start]
        with lease.guard, self.node.metrics.phase("stage"):
            self._lease(asked)
            if lease.way == "pull":
                gather(part, self.node.pools, room)
            else:
                scatter(part, room, self.node.pools)
        # What was gathered counts only if the blocks were still held when it was done.
        return say.Fine(seconds=self._lease(asked).left)

    def _sum(self, asked: say.Sums) -> say.Message:
        lease = self._lease(asked)
        if not 0 <= asked.stop - asked.start <= say.SUMMED:
            raise say.bad_handshake(f"checksums of bytes {asked.start}..{asked.stop}")
        span, pools = (asked.start, asked.stop), self.node.pools
        with lease.guard:
            self._lease(asked)
            found = sums(lease.copies, pools, span, asked.piece, src=lease.way == "pull")
        self._lease(asked)
        return say.Summed(sums=found.astype("<u4").tobytes())

    def _close(self, asked: say.Close) -> say.Message:
        self._peer(asked.session)
        lease = self.node.leases.find(asked.lease, asked.session)
        left = lease.left
        self.node.leases.drop(lease)
        if asked.whole and lease.whole:
            if lease.way == "pull":
                if self._all_have_read(lease, self._peer(asked.session)):
                    self.node.release(lease.request, "read")
            else:
                self._arrived(lease)
        return say.Fine(seconds=left)

    def _all_have_read(self, lease: Lease, peer: Peer) -> bool:
        """Whether every rank that reads from this one has now read the whole request."""
        with self.node.lock:
            offer = self.node.offers.get(lease.request)
            if offer is None:
                return False
            offer.readers.add((peer.plan_hash, peer.rank))
            way = self.node.route_to(peer)
            ranks = range(peer.plan.tp * peer.plan.pp)
            return all(
                (peer.plan_hash, rank) in offer.readers
                for rank in ranks
                if self.node.rank in way.sources(rank)
            )

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

    def _peer(self, session: bytes) -> Peer:
        with self.node.lock:
            peer = self._sessions.get(session)
            if peer is not None:
                self._sessions.move_to_end(session)
        if peer is None:
            raise AtlasError(
                Code.UNKNOWN_SESSION,
                "A session is one that this process has opened since it started",
                got="another",
                hint="Shake hands again",
            )
        return peer

    def _lease(self, asked: Any) -> Lease:
        self._peer(asked.session)
        return self.node.leases.find(asked.lease, asked.session)

    def _longest(self, lease: Lease) -> float:
        offer = self.node.offers.get(lease.request) if lease.way == "pull" else None
        return _LONGEST if offer is None else offer.expires - time.monotonic()


def _refuse_other_blocks(mine: Mapping[int, Int64s], known: Mapping[int, Int64s] | None) -> None:
    """Refuse a peer that means other blocks than this node has for the request."""
    for group, ids in (known or {}).items():
        if group not in mine or not np.array_equal(ids, mine[group] & 0xFFFFFFFF):
            raise AtlasError(
                Code.UNKNOWN_REQUEST,
                "Both ends mean the same blocks by a request",
                got=f"other blocks for group {group}",
                hint="Leave the peer's blocks out to be told them",
            )


def _refuse_outside(held: Offer | Expected, start: int, stop: int, plan: Plan) -> None:
    """Refuse tokens that are not there; a lone recurrent state is the one after the last."""
    alone = any(
        group.kind == "recurrent" and len(held.blocks.get(index, ())) == 1
        for index, group in enumerate(plan.groups)
    )
    if not held.start <= start <= stop <= held.stop or (alone and stop != held.stop):
        raise AtlasError(
            Code.BAD_TOKENS,
            f"Tokens are among {held.start}..{held.stop}"
            + (", up to the last: the state is the one after it" if alone else ""),
            got=(start, stop),
            hint="Ask for what is offered",
        )
