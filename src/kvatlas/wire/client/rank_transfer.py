"""One rank's part of a transfer: a lease, the bytes, and the source's confirmation afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy, Costs, Stream, token_range
from kvatlas.wire import protocol
from kvatlas.wire.channels import no_answer
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.peers import Peer
from kvatlas.wire.protocol import Ok, Opened
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.staging import checksums, gather, scatter
from kvatlas.wire.transports.base import STAGING, Handle, Link
from kvatlas.wire.transports.errors import failed

A = TypeVar("A", bound=protocol.Message)
How = Literal["auto", "direct", "staged"]

_BATCH = 64 << 20
"""Bytes that are posted at once: progress, and a chance to cancel, after each."""

_BATCH_RUNS = 1 << 20
"""Runs that are posted at once, more or less: each costs memory at this end."""

_CHECKSUM_PIECE = 1 << 20

_BUFFERS = 2
"""Staging buffers of a transfer at each end: one is filled while the other is sent."""

_SEVERED = 1.0
"""Seconds in which a link that was torn down is seen to be done with what it was reading."""


@dataclass
class PeerConnection:
    """A peer that has welcomed this node, and the link to its memory."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    beside: ThreadPoolExecutor
    """Asks questions while a transfer does something else."""
    costs: Costs | None = None
    """What the link was measured at."""
    question_seconds: float = 0.0
    """How long the peer takes to answer a question."""
    users: int = 0
    """Transfers that use it now: the link is closed after the last of them."""
    gone: bool = False


@dataclass(frozen=True)
class TransferRequest:
    """What the caller of `pull` or `push` wants."""

    direction: protocol.Direction
    request: str
    blocks: Any
    peer_blocks: Any
    tokens: Any
    layers: Collection[str] | None
    seconds: float
    how: How
    costs: Costs | None
    checksums: bool
    streamed: bool
    final: bool = False
    wait_for_offer: float = 0.0


@dataclass
class RankTransfer:
    """One rank's part of a transfer, with one peer.

    The peer has `patience` seconds for an answer; where there are `others` to turn to, also
    for every batch of bytes.
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
        self.pull = wanted.direction == "pull"
        self.tokens = token_range(wanted.tokens, self.node.plan.max_len)
        self.mine = protocol.by_group(wanted.blocks)
        self.theirs = None if wanted.peer_blocks is None else protocol.by_group(wanted.peer_blocks)
        self.buffers: list[int] = []
        """Staging buffers of this node."""
        self.lent: tuple[int, ...] = ()
        """Staging buffers of the peer."""
        self.given_up: dict[str, list[Handle]] = {"blocks": [], "buffers": []}
        """Reads that were given up before they were done, by what they would land in."""

    def run(self) -> None:
        """Carry it out, or raise why not.

        What this end lent is given back, and the transfer is told that its blocks are left
        alone, once nothing can be read into them any more.
        """
        self.transfer.use()
        try:
            self.transfer.check_cancelled()
            self._run()
        finally:
            quarantine, sever = self.node.quarantine, self.connection.link.sever
            quarantine.hold(self.given_up["blocks"], self.transfer.leave, sever=sever)
            quarantine.hold(
                self.given_up["buffers"],
                partial(self.node.staging.give_back, self.buffers),
                sever=sever,
            )

    def _run(self) -> None:
        self._open()
        complete = False
        try:
            self._check_opened()
            stream = self._stream(self.wanted.layers)
            self._move(stream)
            if self.wanted.checksums:
                self._compare(stream)
            complete = True
        finally:
            self._close(complete=complete)
        # Only now: the source has confirmed that it held the blocks until after the last byte.
        for name in self._streamed_layers() if self.wanted.streamed else ():
            self.transfer.add_layer(self.rank, name)
        self.node.metrics.add(bytes=stream.nbytes, descriptors=stream.runs)

    # -- messages -------------------------------------------------------------------------

    def _ask(self, question: protocol.Message, kind: type[A]) -> A:
        deadline = min(self.deadline, time.monotonic() + self.patience)
        answer = self.node.channels.ask(self.connection.endpoint, question, deadline=deadline)
        if not isinstance(answer, kind):
            raise protocol.bad_handshake(f"{type(answer).__name__} instead of {kind.__name__}")
        return answer

    def _ask_of_lease(
        self, message: Callable[..., protocol.Message], kind: type[A], **fields: Any
    ) -> A:
        session, lease = self.connection.session, self.opened.lease
        about = {"session": session, "lease": lease, "request": self.wanted.request}
        return self._ask(message(**about, **fields), kind)

    def _open(self) -> None:
        wanted, theirs = self.wanted, self.theirs
        question = protocol.Open(
            session=self.connection.session,
            direction=wanted.direction,
            request=wanted.request,
            blocks=protocol.pack_tables(self.mine),
            peer_blocks=None if theirs is None else protocol.pack_tables(theirs),
            start=self.tokens[0],
            stop=self.tokens[1],
            layers=None if wanted.layers is None else tuple(wanted.layers),
            seconds=self._seconds_left(),
            final=wanted.final,
        )
        with self.node.metrics.phase("open"):
            self.opened = self._ask(question, Opened)
        self._renew_at = time.monotonic() + self.opened.seconds / 2

    def _check_opened(self) -> None:
        """Take the peer's blocks, and its staging only where that can be what it says."""
        told = protocol.unpack_tables(self.opened.blocks)
        self.theirs = told if self.theirs is None else self.theirs
        piece = self.opened.piece
        if piece and (piece < protocol.MIN_PIECE_BYTES or piece > self._staging_bytes()):
            got = f"buffers of {piece} bytes in {self._staging_bytes()}"
            raise protocol.bad_handshake(got)

    def _staging_bytes(self) -> int:
        staging = self.connection.peer.memory.get(STAGING)
        return 0 if staging is None else staging.nbytes

    def _borrow(self, count: int) -> None:
        """Get staging buffers of the peer, which lie inside its staging memory."""
        while len(self.lent) < count:
            self.transfer.check_cancelled()
            seconds = min(self.patience / 2, self._seconds_left())
            lent = self._ask_of_lease(
                protocol.Borrow, protocol.Lent, buffers=count, seconds=seconds
            ).buffers
            outside = any((one + 1) * self.opened.piece > self._staging_bytes() for one in lent)
            if outside or len(set(lent)) < len(lent):
                got = f"buffers {lent} of {self.opened.piece} in {self._staging_bytes()} bytes"
                raise protocol.bad_handshake(got)
            self.lent = lent
            if 0 < len(lent) < count:
                return

    def _seconds_left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def _renew_in_time(self) -> None:
        if time.monotonic() >= self._renew_at:
            self._renew()

    def _renew(self) -> None:
        """Have the peer confirm that the lease is held, and extend it."""
        ok = self._ask_of_lease(protocol.Renew, Ok, seconds=self._seconds_left())
        self._renew_at = time.monotonic() + ok.seconds / 2

    def _close(self, *, complete: bool) -> None:
        """End the lease; where all went well, the source confirms that it was held."""
        if not complete:
            # Nobody waits for a peer that may not answer: its lease ends by itself then.
            self.connection.beside.submit(self._abandon)
            return
        with self.node.metrics.phase("confirm"):
            self._ask_of_lease(protocol.Close, Ok, complete=True)

    def _abandon(self) -> None:
        deadline = time.monotonic() + min(1.0, self.patience)
        session, lease = self.connection.session, self.opened.lease
        question = protocol.Close(session=session, lease=lease, complete=False)
        with suppress(AtlasError):
            self.node.channels.ask(self.connection.endpoint, question, deadline=deadline)

    def _compare(self, stream: Stream) -> None:
        """Refuse bytes that are not those of the other end."""
        total, longest = stream.nbytes, protocol.MAX_CHECKSUM_SPAN
        wrong = 0
        for start in range(0, total, longest):
            self.transfer.check_cancelled()
            self._renew_in_time()
            with self.node.metrics.phase("checksums"):
                wrong += self._differing(stream, start, min(total, start + longest))
        if wrong:
            raise AtlasError(
                Code.CHECKSUM,
                got=f"{wrong} of {-(-total // _CHECKSUM_PIECE)} pieces that differ",
                hint="Transfer them again, and mistrust the wire",
            )

    def _differing(self, stream: Stream, start: int, stop: int) -> int:
        """How many pieces of a span of the stream are not the same at both ends."""
        span = {"start": start, "stop": stop, "piece": _CHECKSUM_PIECE}
        theirs = self._ask_of_lease(protocol.GetChecksums, protocol.Checksums, **span).sums
        part, pools = stream.copies(start, stop), self.node.pools
        ours = checksums(part, pools, _CHECKSUM_PIECE, src=not self.pull)
        if len(theirs) != 4 * len(ours):
            raise protocol.bad_handshake(f"{len(theirs)} bytes for {len(ours)} checksums")
        return int((ours != np.frombuffer(theirs, dtype="<u4")).sum())

    # -- bytes ----------------------------------------------------------------------------

    def _stream(self, layers: Collection[str] | None) -> Stream:
        mine, theirs, peer = self.mine, self.theirs, self.connection.peer
        return self.node.stream(peer, mine, theirs, self.tokens, layers, incoming=self.pull)

    def _move(self, stream: Stream) -> None:
        if not stream.nbytes:
            return
        if self.wanted.streamed and self._reaches_pools():
            self._move_layers()
        elif self.pull and not self._should_stage(stream):
            self._move_direct(stream)
        elif self.pull:
            self._borrow_both()
            self._pull_staged(stream)
        else:
            self._borrow(1)
            self._push(stream, staged=self._should_stage(stream))

    def _move_layers(self) -> None:
        for name in self._streamed_layers():
            self._move_direct(self._stream([name]))
            if not self.wanted.checksums:
                # What was read counts once the source confirms that it still held it.
                self._renew()
                self.transfer.add_layer(self.rank, name)

    def _streamed_layers(self) -> list[str]:
        layers = self.node.route_from(self.connection.peer).layers
        chosen = self.wanted.layers
        return [name for name in layers if chosen is None or name in chosen]

    def _borrow_both(self) -> None:
        """Get staging buffers of both ends, waiting for them; the peer's are got last."""
        count = min(_BUFFERS, self.node.staging.most())
        while count and not self.buffers:
            self.transfer.check_cancelled()
            self.buffers = self.node.staging.acquire(count, min(0.1, self._seconds_left()))
        if self.opened.piece:
            self._borrow(count)
        if not self.buffers or not self.lent:
            raise AtlasError(
                Code.TOO_MANY,
                "An end of the transfer has no staging buffers",
                got=f"{len(self.buffers)} here, {len(self.lent)} there",
                hint="Give the nodes more buffers, or let the transfer choose",
            )

    def _move_direct(self, stream: Stream) -> None:
        """A descriptor for every run."""
        total = stream.nbytes
        batch = max(4096, min(_BATCH, total * _BATCH_RUNS // max(1, stream.runs)))
        for start in range(0, total, batch):
            self._renew_in_time()
            stop = min(total, start + batch)
            with self.node.metrics.phase("direct"):
                self._read(stream.copies(start, stop), "blocks")
            self.transfer.add(self.rank, stop - start)

    def _read(self, copies: Sequence[Copy], into: str = "buffers") -> None:
        """Read runs over the link; where that is given up, it is remembered."""
        handle = self.connection.link.read(copies)
        deadline = self.deadline
        if self.others:
            deadline = min(deadline, time.monotonic() + self.patience)
        try:
            handle.wait(deadline, self._check_going_on)
        finally:
            handle.release()
            if not handle.settle():
                self.given_up[into].append(handle)
                if self.others and into == "blocks":
                    self._sever()

    def _check_going_on(self) -> None:
        """Raise where the transfer has ended, or the peer has died."""
        self.transfer.check_cancelled()
        self.monitor.check()

    def _sever(self) -> None:
        """Tear the link to a stalled replica down before another one fills the same blocks."""
        self.connection.link.sever()
        patience = time.monotonic() + _SEVERED
        while not all(handle.settle() for handle in self.given_up["blocks"]):
            if time.monotonic() > patience:
                self.transfer.failed(self.rank, no_answer(self.connection.endpoint))
                return
            time.sleep(0.01)

    def _should_stage(self, stream: Stream) -> bool:
        """Whether to go through staging buffers: as asked, or by what the link was measured at."""
        if self.wanted.how == "staged":
            return True
        if not self._reaches_pools():
            if self.wanted.how == "auto":
                return True
            got = "pools that the source keeps to itself"
            raise failed(got, "Share them, or let the transfer be staged")
        staging = self.node.staging
        if self.wanted.how == "direct" or not staging.most() or not self.opened.piece:
            return False
        if self.others and not self.connection.link.prompt:
            return True  # a replica that stalls in mid-read then leaves the blocks alone
        costs = self.wanted.costs or self.connection.costs or self._measured()
        # For buffers and to have them filled, and as much again for threads that take turns.
        asking = 4 * self.connection.question_seconds
        return asking + costs.staged(stream.nbytes) < costs.direct(stream.runs, stream.nbytes)

    def _pull_staged(self, stream: Stream) -> None:
        """Have pieces gathered, read and scatter them; one is gathered while another is read."""
        staging, pools = self.node.staging, self.node.pools
        piece = min(staging.piece, self.opened.piece)
        spans = list(_spans(stream.nbytes, piece))
        many = min(len(self.buffers), len(self.lent))
        gathering = self._gather_beside(spans[0], 0)
        try:
            for number, (start, stop) in enumerate(spans):
                self.transfer.check_cancelled()
                self._renew_in_time()
                gathering.result()
                if number + 1 < len(spans) and many > 1:
                    gathering = self._gather_beside(spans[number + 1], (number + 1) % many)
                with self.node.metrics.phase("staged"):
                    self._read([self._staging_copy(number % many, stop - start)])
                if number + 1 < len(spans) and many == 1:
                    gathering = self._gather_beside(spans[number + 1], 0)
                here = staging.view(self.buffers[number % many], stop - start)
                scatter(stream.copies(start, stop), here, pools)
                self.transfer.add(self.rank, stop - start)
        finally:
            wait([gathering])

    def _gather_beside(self, span: tuple[int, int], buffer: int) -> Future[Ok]:
        """Have the peer gather a piece into one of its buffers."""
        about = {"start": span[0], "stop": span[1], "buffer": self.lent[buffer]}
        ask = partial(self._ask_of_lease, protocol.Gather, Ok, **about)
        return self.connection.beside.submit(ask)

    def _push(self, stream: Stream, *, staged: bool) -> None:
        """Have the peer fetch piece after piece; the next is gathered while it does."""
        staging, pools = self.node.staging, self.node.pools
        piece = self.opened.piece
        if staged:
            self._borrow_both()
            piece = min(piece, staging.piece)
        fetching: Future[Ok] | None = None
        try:
            for number, (start, stop) in enumerate(_spans(stream.nbytes, piece)):
                self.transfer.check_cancelled()
                self._renew_in_time()
                span: dict[str, Any] = {"start": start, "stop": stop}
                if staged:
                    if fetching and len(self.buffers) == 1:
                        fetching.result()
                    buffer = self.buffers[number % len(self.buffers)]
                    gather(stream.copies(start, stop), pools, staging.view(buffer, stop - start))
                    span["staged_at"] = buffer * staging.piece
                if fetching:
                    fetching.result()
                fetching = self.connection.beside.submit(self._fetch, span)
            if fetching:
                fetching.result()
        finally:
            # Nobody else gets the buffers while the peer reads from them.
            wait([fetching] if fetching else [])

    def _fetch(self, span: dict[str, Any]) -> Ok:
        self.transfer.check_cancelled()
        with self.node.metrics.phase("fetch"):
            ok = self._ask_of_lease(protocol.Fetch, Ok, **span)
        self.transfer.add(self.rank, span["stop"] - span["start"])
        return ok

    def _reaches_pools(self) -> bool:
        """Whether the pools of the end that is read can be reached by the one that reads."""
        if not self.pull:
            return all(map(self.node.transport.shares, self.node.plan.rank_pools(self.node.rank)))
        peer = self.connection.peer
        return all(map(self.connection.link.reaches, peer.plan.rank_pools(peer.rank)))

    def _staging_copy(self, buffer: int, nbytes: int, near: Any = (0,), far: Any = (0,)) -> Copy:
        """Runs of one length between offsets in a staging buffer of the peer and of this end."""
        mine = self.buffers[buffer] * self.node.staging.piece + np.asarray(near)
        theirs = self.lent[buffer] * self.opened.piece + np.asarray(far)
        return Copy(STAGING, STAGING, theirs, mine, np.full(len(mine), nbytes, dtype=np.int64))

    def _measured(self) -> Costs:
        """What the link is measured at, if there are buffers for that now."""
        self.buffers = self.node.staging.acquire(min(_BUFFERS, self.node.staging.most()))
        if not self.buffers:
            return Costs()
        self._borrow(len(self.buffers))
        with self.node.metrics.phase("measure"):
            self.connection.question_seconds = _quickest(self._renew)
            self.connection.costs = self._measure()
        return self.connection.costs

    def _measure(self) -> Costs:
        """What this link costs: many short runs against one long one, between staging buffers."""
        piece = min(self.opened.piece, self.node.staging.piece)
        short, count = 4096, max(1, min(64, piece // 8192))
        at = np.arange(count) * 2 * short
        runs = self._staging_copy(0, short, at, at[::-1])
        many = _quickest(partial(self._read, [runs]))
        one = _quickest(partial(self._read, [self._staging_copy(0, piece)]))
        # A scatter of such short runs, as a staged transfer ends with, into scratch memory.
        spread = Copy(STAGING, 0, at, at[::-1], np.full(count, short))
        scratch = {0: np.empty(2 * count * short, dtype=np.uint8)}
        stream = self.node.staging.view(self.buffers[0], count * short)
        copying = _quickest(partial(scatter, [spread], stream, scratch))
        wire = piece / one
        each = max(0.0, (many - count * short / wire) / count)
        return Costs(descriptor=each, wire=wire, copy=count * short / copying, piece=piece)


def _spans(total: int, piece: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a stream start and stop."""
    return ((start, min(total, start + piece)) for start in range(0, total, piece))


def _quickest(act: Callable[[], object]) -> float:
    """Least seconds of three turns."""
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return max(1e-9, min(taken))
