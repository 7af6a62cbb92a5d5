"""One rank's part of a transfer: a lease, the bytes, and the source's confirmation afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy, Costs, report, token_range
from kvatlas.wire import protocol
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.peers import Peer
from kvatlas.wire.protocol import Ok, Opened
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.staging import checksums, gather, scatter, stream_bytes, stream_slice
from kvatlas.wire.transports.base import STAGING, Link

A = TypeVar("A", bound=protocol.Message)
How = Literal["auto", "direct", "staged"]

_BATCH = 64 << 20
"""Bytes that are posted at once: progress, and a chance to cancel, after each."""

_CHECKSUM_PIECE = 1 << 20

_BUFFERS = 2
"""Staging buffers of a transfer at each end: one is filled while the other is sent."""


@dataclass
class PeerConnection:
    """A peer that has welcomed this node, and the link to its memory."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    costs: Costs | None = None
    """What the link was measured at."""
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


@dataclass
class RankTransfer:
    """One rank's part of a transfer, with one peer that has `patience` seconds for an answer."""

    node: NodeState
    connection: PeerConnection
    wanted: TransferRequest
    transfer: Transfer
    patience: float

    def __post_init__(self) -> None:
        wanted = self.wanted
        self.monitor = self.node.channels.monitor(self.connection.endpoint)
        self.deadline = self.transfer.begun + wanted.seconds
        self.rank = self.connection.peer.rank
        self.pull = wanted.direction == "pull"
        self.tokens = token_range(wanted.tokens, self.node.plan.max_len)
        self.mine = protocol.by_group(wanted.blocks)
        self.theirs = None if wanted.peer_blocks is None else protocol.by_group(wanted.peer_blocks)

    def run(self) -> None:
        """Carry it out, or raise why not; the lease and the buffers are given back either way."""
        self.transfer.check_cancelled()
        self.buffers = self._acquire_buffers()
        try:
            self._run()
        finally:
            self.node.staging.give_back(self.buffers)

    def _acquire_buffers(self) -> list[int]:
        """Staging buffers of this node; a transfer that must be staged waits for them."""
        if self.wanted.how == "direct" or self.wanted.streamed:
            return []
        staging = self.node.staging
        buffers = staging.acquire(_BUFFERS)
        waits = self.wanted.how == "staged" and staging.count >= _BUFFERS
        while not buffers and waits and time.monotonic() < self.deadline:
            self.transfer.check_cancelled()
            time.sleep(1e-3)
            buffers = staging.acquire(_BUFFERS)
        return buffers

    def _run(self) -> None:
        self._open()
        complete = False
        try:
            self._check_opened()
            copies = self._copies(self.wanted.layers)
            self._move(copies)
            if self.wanted.checksums:
                self._compare(copies)
            complete = True
        finally:
            self._close(complete=complete)
        # Only now: the source has confirmed that it held the blocks until after the last byte.
        for name in self._streamed_layers() if self.wanted.streamed else ():
            self.transfer.add_layer(self.rank, name)
        self.node.metrics.add(bytes=stream_bytes(copies), descriptors=sum(map(len, copies)))

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
            buffers=len(self.buffers),
        )
        with self.node.metrics.phase("open"):
            self.opened = self._ask(question, Opened)
        self._renew_at = time.monotonic() + self.opened.seconds / 2

    def _check_opened(self) -> None:
        """Take the peer's blocks and buffers, the buffers only inside its staging memory."""
        opened = self.opened
        told = protocol.unpack_tables(opened.blocks)
        self.theirs = told if self.theirs is None else self.theirs
        staging = self.connection.peer.memory.get(STAGING)
        size = 0 if staging is None else staging.nbytes
        small = opened.piece < protocol.MIN_PIECE_BYTES
        outside = any((buffer + 1) * opened.piece > size for buffer in opened.buffers)
        twice = len(set(opened.buffers)) < len(opened.buffers)
        if opened.buffers and (small or outside or twice):
            got = f"buffers {opened.buffers} of {opened.piece} bytes in {size}"
            raise protocol.bad_handshake(got)

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
        with self.node.metrics.phase("confirm"), suppress(*(() if complete else (AtlasError,))):
            self._ask_of_lease(protocol.Close, Ok, complete=complete)

    def _compare(self, copies: Sequence[Copy]) -> None:
        """Refuse bytes that are not those of the other end."""
        total, longest = stream_bytes(copies), protocol.MAX_CHECKSUM_SPAN
        wrong = 0
        for start in range(0, total, longest):
            self.transfer.check_cancelled()
            self._renew_in_time()
            with self.node.metrics.phase("checksums"):
                wrong += self._differing(copies, start, min(total, start + longest))
        if wrong:
            raise AtlasError(
                Code.CHECKSUM,
                got=f"{wrong} of {-(-total // _CHECKSUM_PIECE)} pieces that differ",
                hint="Transfer them again, and mistrust the wire",
            )

    def _differing(self, copies: Sequence[Copy], start: int, stop: int) -> int:
        """How many pieces of a span of the stream are not the same at both ends."""
        span = {"start": start, "stop": stop, "piece": _CHECKSUM_PIECE}
        theirs = self._ask_of_lease(protocol.GetChecksums, protocol.Checksums, **span).sums
        pools = self.node.pools
        ours = checksums(copies, pools, (start, stop), _CHECKSUM_PIECE, src=not self.pull)
        if len(theirs) != 4 * len(ours):
            raise protocol.bad_handshake(f"{len(theirs)} bytes for {len(ours)} checksums")
        return int((ours != np.frombuffer(theirs, dtype="<u4")).sum())

    # -- bytes ----------------------------------------------------------------------------

    def _copies(self, layers: Collection[str] | None) -> tuple[Copy, ...]:
        mine, theirs, peer = self.mine, self.theirs, self.connection.peer
        return self.node.copies(peer, mine, theirs, self.tokens, layers, incoming=self.pull)

    def _move(self, copies: Sequence[Copy]) -> None:
        if self.wanted.streamed:
            for name in self._streamed_layers():
                self.transfer.check_cancelled()
                self._move_direct(self._copies([name]))
                if not self.wanted.checksums:
                    # What was read counts once the source confirms that it still held it.
                    self._renew()
                    self.transfer.add_layer(self.rank, name)
            return
        able = len(self.buffers) == len(self.opened.buffers) == _BUFFERS
        if able and self._should_stage(copies):
            self._move_staged(copies)
            return
        if self.wanted.how == "staged" and stream_bytes(copies):
            raise AtlasError(
                Code.TOO_MANY,
                "All staging buffers are in use",
                got="none free at one end, or none at all",
                hint="Give the nodes more buffers, or let the transfer choose",
            )
        self._move_direct(copies)

    def _streamed_layers(self) -> list[str]:
        layers = self.node.route_from(self.connection.peer).layers
        chosen = self.wanted.layers
        return [name for name in layers if chosen is None or name in chosen]

    def _move_direct(self, copies: Sequence[Copy]) -> None:
        """A descriptor for every run."""
        total = stream_bytes(copies)
        for start in range(0, total, _BATCH):
            self._renew_in_time()
            stop = min(total, start + _BATCH)
            part = copies if total <= _BATCH else stream_slice(copies, start, stop)
            with self.node.metrics.phase("direct"):
                self._carry_out(part)
            self.transfer.add(self.rank, stop - start)

    def _carry_out(self, copies: Sequence[Copy]) -> None:
        """Move runs over the link; what was posted is done, or released, when this returns."""
        link = self.connection.link
        handle = link.read(copies) if self.pull else link.write(copies)
        try:
            handle.wait(self.deadline, self._check_going_on)
        finally:
            handle.release()

    def _check_going_on(self) -> None:
        """Raise where the transfer was cancelled, or the peer has died."""
        self.transfer.check_cancelled()
        self.monitor.check()

    def _should_stage(self, copies: Sequence[Copy]) -> bool:
        """Whether to go through staging buffers: as asked, or by what the link was measured at."""
        if self.wanted.how == "staged":
            return True
        if self.wanted.costs is None and self.connection.costs is None:
            with self.node.metrics.phase("measure"):
                self.connection.costs = self._measure()
        return report(copies, self.wanted.costs or self.connection.costs).stage

    def _move_staged(self, copies: Sequence[Copy]) -> None:
        """Gather, send in large pieces, scatter; one piece is gathered while another is sent."""
        staging, pools, opened = self.node.staging, self.node.pools, self.opened
        piece = min(staging.piece, opened.piece)
        total = stream_bytes(copies)
        spans = [(start, min(total, start + piece)) for start in range(0, total, piece)]
        waiting: list[Future[Ok]] = []

        def ask_peer(number: int) -> None:
            """Have the peer gather a piece, or scatter it, beside what happens here."""
            start, stop = spans[number]
            span = {"start": start, "stop": stop, "buffer": opened.buffers[number % _BUFFERS]}
            waiting.append(beside.submit(lambda: self._ask_of_lease(protocol.Gather, Ok, **span)))

        with ThreadPoolExecutor(1, thread_name_prefix="kvatlas-stage") as beside:
            if self.pull and spans:
                ask_peer(0)
            for number, (start, stop) in enumerate(spans):
                self.transfer.check_cancelled()
                self._renew_in_time()
                stream = staging.view(self.buffers[number % _BUFFERS], stop - start)
                part = stream_slice(copies, start, stop)
                if self.pull:
                    waiting.pop(0).result()
                    if number + 1 < len(spans):
                        ask_peer(number + 1)
                    self._send(number, stop - start)
                    scatter(part, stream, pools)
                else:
                    if len(waiting) == _BUFFERS:
                        waiting.pop(0).result()
                    gather(part, pools, stream)
                    self._send(number, stop - start)
                    ask_peer(number)
                self.transfer.add(self.rank, stop - start)
            for scattered in waiting:
                scattered.result()

    def _send(self, number: int, nbytes: int) -> None:
        """One piece between the staging buffers of the two ends."""
        with self.node.metrics.phase("staged"):
            self._carry_out([self._staging_copy(number % _BUFFERS, nbytes)])

    def _staging_copy(self, buffer: int, nbytes: int, near: Any = (0,), far: Any = (0,)) -> Copy:
        """Runs of one length between offsets in a staging buffer of either end."""
        mine = self.buffers[buffer] * self.node.staging.piece + np.asarray(near)
        theirs = self.opened.buffers[buffer] * self.opened.piece + np.asarray(far)
        src, dst = (theirs, mine) if self.pull else (mine, theirs)
        return Copy(STAGING, STAGING, src, dst, np.full(len(src), nbytes, dtype=np.int64))

    def _measure(self) -> Costs:
        """What this link costs: many short runs against one long one, between staging buffers."""
        piece = min(self.opened.piece, self.node.staging.piece)
        short, count = 4096, max(1, min(64, piece // 8192))
        at = np.arange(count) * 2 * short
        runs = self._staging_copy(0, short, at, at[::-1])
        many = _quickest(partial(self._carry_out, [runs]))
        one = _quickest(partial(self._carry_out, [self._staging_copy(0, piece)]))
        # A scatter of such short runs, as a staged transfer ends with, into scratch memory.
        spread = Copy(STAGING, 0, at, at[::-1], np.full(count, short))
        scratch = {0: np.empty(2 * count * short, dtype=np.uint8)}
        stream = self.node.staging.view(self.buffers[0], count * short)
        copying = _quickest(partial(scatter, [spread], stream, scratch))
        wire = piece / one
        each = max(0.0, (many - count * short / wire) / count)
        return Costs(descriptor=each, wire=wire, copy=count * short / copying, piece=piece)


def _quickest(act: Callable[[], object]) -> float:
    """Least seconds of three turns."""
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return max(1e-9, min(taken))
