"""One rank's part of a transfer: a lease, the bytes, and the source's word afterwards."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy, Costs, report, token_range
from kvatlas.wire import protocol as say
from kvatlas.wire.peers import Peer
from kvatlas.wire.rpc import ask
from kvatlas.wire.staging import cut, gather, scatter, stream_bytes, sums
from kvatlas.wire.transports.base import STAGING, Handle, Link

if TYPE_CHECKING:
    from kvatlas.wire.client.transfer import Transfer
    from kvatlas.wire.server.node import Node

A = TypeVar("A", bound=say.Message)
How = Literal["auto", "direct", "staged"]

_BATCH = 64 << 20
"""Bytes that are posted at once: progress, and a chance to call it off, after each."""

_SUMMED = 1 << 20

_SLOTS = 2
"""Staging slots of a transfer at each end: one is filled while the other is sent."""


@dataclass
class Connected:
    """A peer with which hands were shaken."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    costs: Costs | None = None
    users: int = 0
    """Transfers that use it now: the link is closed after the last of them."""
    gone: bool = False


@dataclass(frozen=True)
class About:
    """What a transfer was asked for."""

    way: Literal["pull", "push"]
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


class Moving:
    """One rank's part of a transfer, with one peer."""

    def __init__(
        self,
        node: Node,
        connected: Connected,
        about: About,
        transfer: Transfer,
        *,
        deadline: float,
        patience: float,
    ) -> None:
        self.node, self.connected, self.about, self.transfer = node, connected, about, transfer
        self.deadline, self.patience = deadline, patience
        self.rank = connected.peer.rank
        self.link = connected.link

    def run(self) -> None:
        """Carry it out, or raise why not; what was leased is given back either way."""
        self.transfer.refuse_cancelled()
        with self.node.borrowed(self._slots()) as slots:
            self._run(slots)

    def _slots(self) -> list[int]:
        """Staging slots of this node; a transfer that must be staged waits for them."""
        if self.about.how == "direct" or self.about.streamed:
            return []
        slots = self.node.take(_SLOTS)
        waits = self.about.how == "staged" and self.node.slots >= _SLOTS
        while not slots and waits and time.monotonic() < self.deadline:
            self.transfer.refuse_cancelled()
            time.sleep(1e-3)
            slots = self.node.take(_SLOTS)
        return slots

    def _run(self, slots: list[int]) -> None:
        opened = self._open(len(slots))
        whole = False
        try:
            self._believe(opened)
            copies = self._copies(self.about.layers)
            self._move(copies, slots, opened)
            if self.about.checksums:
                self._compare(copies)
            whole = True
        finally:
            self._close(whole=whole)
        # Only now: the source has said that it held the blocks until after the last byte.
        for name in self._streamed_layers() if self.about.streamed else ():
            self.transfer.layer(self.rank, name)
        many = sum(map(len, copies))
        self.node.metrics.add(bytes=stream_bytes(copies), descriptors=many)

    # -- talking -------------------------------------------------------------------------

    def _ask(self, question: say.Message, kind: type[A]) -> A:
        deadline = min(self.deadline, time.monotonic() + self.patience)
        endpoint, secret = self.connected.endpoint, self.node.secret
        said = ask(endpoint, question, secret=secret, deadline=deadline)
        if not isinstance(said, kind):
            raise say.bad_handshake(f"{type(said).__name__} instead of {kind.__name__}")
        return said

    def _open(self, slots: int) -> say.Opened:
        about = self.about
        self.start, self.stop = token_range(about.tokens, self.node.plan.max_len)
        self.mine = _by_group(about.blocks)
        theirs = None if about.peer_blocks is None else _by_group(about.peer_blocks)
        with self.node.metrics.phase("open"):
            opened = self._ask(
                say.Open(
                    session=self.connected.session,
                    way=about.way,
                    request=about.request,
                    blocks=say.pack(self.mine),
                    peer_blocks=None if theirs is None else say.pack(theirs),
                    start=self.start,
                    stop=self.stop,
                    layers=None if about.layers is None else tuple(about.layers),
                    seconds=max(0.001, self.deadline - time.monotonic()),
                    slots=slots,
                ),
                say.Opened,
            )
        self._lease = opened.lease
        self._renew_at = time.monotonic() + opened.seconds / 2
        return opened

    def _believe(self, opened: say.Opened) -> None:
        """Take the peer's blocks and slots, the slots only inside its staging buffer."""
        about = self.about
        told = say.unpack(opened.blocks)
        self.theirs = told if about.peer_blocks is None else _by_group(about.peer_blocks)
        staging = self.connected.peer.memory.get(STAGING)
        most = 0 if staging is None else staging.nbytes
        small = opened.piece < say.SMALLEST_PIECE
        outside = any((slot + 1) * opened.piece > most for slot in opened.slots)
        if opened.slots and (small or outside or len(set(opened.slots)) < len(opened.slots)):
            raise say.bad_handshake(f"slots {opened.slots} of {opened.piece} bytes in {most}")

    def _renew(self) -> None:
        if time.monotonic() >= self._renew_at:
            self._confirm()

    def _confirm(self) -> None:
        """Have the peer say that the lease is held, and for longer."""
        seconds = max(0.001, self.deadline - time.monotonic())
        session = self.connected.session
        fine = self._ask(say.Renew(session=session, lease=self._lease, seconds=seconds), say.Fine)
        self._renew_at = time.monotonic() + fine.seconds / 2

    def _close(self, *, whole: bool) -> None:
        """Give the lease back; where all went well, the source says that it was held."""
        question = say.Close(session=self.connected.session, lease=self._lease, whole=whole)
        with self.node.metrics.phase("confirm"):
            if whole:
                self._ask(question, say.Fine)
            else:
                with suppress(AtlasError):
                    self._ask(question, say.Fine)

    def _compare(self, copies: Sequence[Copy]) -> None:
        """Refuse bytes that are not those of the other end."""
        total = stream_bytes(copies)
        wrong = 0
        for start in range(0, total, say.SUMMED):
            self.transfer.refuse_cancelled()
            self._renew()
            with self.node.metrics.phase("checksums"):
                wrong += self._unlike(copies, start, min(total, start + say.SUMMED))
        if wrong:
            raise AtlasError(
                Code.CHECKSUM,
                "The bytes that arrive are the bytes that were sent",
                got=f"{wrong} of {-(-total // _SUMMED)} pieces that differ",
                hint="Transfer them again, and mistrust the wire",
            )

    def _unlike(self, copies: Sequence[Copy], start: int, stop: int) -> int:
        """How many pieces of a span of the stream are not the same at both ends."""
        session, lease = self.connected.session, self._lease
        question = say.Sums(session=session, lease=lease, start=start, stop=stop, piece=_SUMMED)
        said = self._ask(question, say.Summed)
        pools, at_source = self.node.pools, self.about.way == "push"
        ours = sums(copies, pools, (start, stop), _SUMMED, src=at_source)
        if len(said.sums) != 4 * len(ours):
            raise say.bad_handshake(f"{len(said.sums)} bytes for {len(ours)} checksums")
        return int((ours != np.frombuffer(said.sums, dtype="<u4")).sum())

    # -- moving --------------------------------------------------------------------------

    def _copies(self, layers: Collection[str] | None) -> tuple[Copy, ...]:
        node, peer = self.node, self.connected.peer
        given: dict[str, Any] = {"tokens": (self.start, self.stop), "layers": layers}
        if self.about.way == "pull":
            given |= {"src_rank": peer.rank, "dst_rank": node.rank}
            given |= {"src_blocks": self.theirs, "dst_blocks": self.mine}
            return node.route_from(peer).bind(**given).copies
        given |= {"src_rank": node.rank, "dst_rank": peer.rank}
        given |= {"src_blocks": self.mine, "dst_blocks": self.theirs}
        return node.route_to(peer).bind(**given).copies

    def _move(self, copies: Sequence[Copy], slots: list[int], opened: say.Opened) -> None:
        if self.about.streamed:
            for name in self._streamed_layers():
                self.transfer.refuse_cancelled()
                self._directly(self._copies([name]))
                if not self.about.checksums:
                    # What was read counts once the source says that it still held it.
                    self._confirm()
                    self.transfer.layer(self.rank, name)
            return
        able = len(slots) == len(opened.slots) == _SLOTS
        if able and self._staged(copies, slots, opened):
            self._by_stages(copies, slots, opened)
            return
        if self.about.how == "staged" and stream_bytes(copies):
            raise AtlasError(
                Code.TOO_MANY,
                "A staged transfer has staging slots at both ends",
                got="none that are free",
                hint="Give the nodes more slots, or let the transfer choose",
            )
        self._directly(copies)

    def _streamed_layers(self) -> list[str]:
        layers = self.node.route_from(self.connected.peer).layers
        chosen = self.about.layers
        return [name for name in layers if chosen is None or name in chosen]

    def _directly(self, copies: Sequence[Copy]) -> None:
        """A descriptor for every run."""
        total = stream_bytes(copies)
        act = self.link.read if self.about.way == "pull" else self.link.write
        for start in range(0, total, _BATCH):
            self._renew()
            stop = min(total, start + _BATCH)
            part = copies if total <= _BATCH else cut(copies, start, stop)
            with self.node.metrics.phase("direct"):
                self._wait(act(part))
            self.transfer.add(self.rank, stop - start)

    def _wait(self, handle: Handle) -> None:
        """Wait for what was posted; it is over, or withdrawn, when this returns."""
        pause = 20e-6
        try:
            while not handle.poll():
                self.transfer.refuse_cancelled()
                if time.monotonic() > self.deadline:
                    handle.wait(self.deadline)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        finally:
            handle.release()

    def _staged(self, copies: Sequence[Copy], slots: list[int], opened: say.Opened) -> bool:
        """Whether to go by staging buffers: as asked, or by what this link was measured at."""
        if self.about.how == "staged":
            return True
        if self.about.costs is None and self.connected.costs is None:
            at = (opened.slots[0] * opened.piece, slots[0] * self.node.piece)
            with self.node.metrics.phase("measure"):
                self.connected.costs = self._measured(*at, min(opened.piece, self.node.piece))
        return report(copies, self.about.costs or self.connected.costs).stage

    def _by_stages(self, copies: Sequence[Copy], slots: list[int], opened: say.Opened) -> None:
        """Gather, send in large pieces, scatter; one piece is gathered while another is sent."""
        piece = min(self.node.piece, opened.piece)
        total = stream_bytes(copies)
        spans = range(0, total, piece)
        with ThreadPoolExecutor(1, thread_name_prefix="kvatlas-stage") as beside:
            waiting: list[Future[Any]] = []

            def remotely(number: int) -> None:
                start, stop = spans[number], min(total, spans[number] + piece)
                slot = opened.slots[number % _SLOTS]
                session, lease = self.connected.session, self._lease
                question = say.Gather(
                    session=session, lease=lease, start=start, stop=stop, slot=slot
                )
                waiting.append(beside.submit(self._ask, question, say.Fine))

            pull = self.about.way == "pull"
            if pull and spans:
                remotely(0)
            for number, start in enumerate(spans):
                stop = min(total, start + piece)
                self.transfer.refuse_cancelled()
                self._renew()
                far = opened.slots[number % _SLOTS] * opened.piece
                near = slots[number % _SLOTS] * self.node.piece
                room = self.node.pools[STAGING][near : near + stop - start]
                part = cut(copies, start, stop)
                if pull:
                    waiting.pop(0).result()
                    if number + 1 < len(spans):
                        remotely(number + 1)
                    self._send(far, near, stop - start)
                    scatter(part, room, self.node.pools)
                else:
                    if len(waiting) == _SLOTS:
                        waiting.pop(0).result()
                    gather(part, self.node.pools, room)
                    self._send(near, far, stop - start)
                    remotely(number)
                self.transfer.add(self.rank, stop - start)
            for scattered in waiting:
                scattered.result()

    def _send(self, src: int, dst: int, nbytes: int) -> None:
        """One piece from staging buffer to staging buffer."""
        one = [np.array([number], dtype=np.int64) for number in (src, dst, nbytes)]
        act = self.link.read if self.about.way == "pull" else self.link.write
        with self.node.metrics.phase("staged"):
            self._wait(act([Copy(STAGING, STAGING, *one)]))

    def _measured(self, far: int, near: int, piece: int) -> Costs:
        """What this link costs: many short runs against one long one, between staging slots."""
        short, many = 4096, max(1, min(64, piece // 8192))
        ends = (far, near) if self.about.way == "pull" else (near, far)
        act = self.link.read if self.about.way == "pull" else self.link.write
        order = np.arange(many)[::-1] * 2 * short
        runs = Copy(
            STAGING, STAGING, ends[0] + order, ends[1] + np.sort(order), np.full(many, short)
        )
        once = [np.array([n], dtype=np.int64) for n in (*ends, piece)]
        timed = []
        for copy in (runs, Copy(STAGING, STAGING, *once)):
            best = float("inf")
            for _ in range(3):
                begun = time.perf_counter()
                self._wait(act([copy]))
                best = min(best, time.perf_counter() - begun)
            timed.append(best)
        # A scatter of such short runs, as a staged transfer ends with, into scratch memory.
        spread = Copy(STAGING, 0, order, order, np.full(many, short))
        room = {0: np.empty(2 * many * short, dtype=np.uint8)}
        stream = self.node.pools[STAGING][near : near + many * short]
        scatter([spread], stream, room)
        begun = time.perf_counter()
        scatter([spread], stream, room)
        copied = many * short / max(1e-9, time.perf_counter() - begun)
        wire = piece / max(1e-9, timed[1])
        each = max(0.0, (timed[0] - many * short / wire) / many)
        return Costs(descriptor=each, wire=wire, copy=copied, piece=piece)


def _by_group(blocks: Any) -> Mapping[int, Any]:
    return blocks if isinstance(blocks, Mapping) else {0: blocks}
