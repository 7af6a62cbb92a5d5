"""The reads of one rank's part: staging buffers, reads in flight, and abandoned reads."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.client.rank_lease import RankLease, reclaimed_if_lost
from kvatlas.wire.transports.handles import Handle

BUFFERS = 2
"""Staging buffers of a transfer at each end: one is filled while the other is sent."""

_SEVERED = 1.0
"""Seconds to wait for a severed link to be confirmed idle."""

Target = Literal["blocks", "buffers"]
"""The memory that a read writes to."""


class RankReads:
    """The reads under one lease, and the memory that they use.

    As a context, it keeps blocks and staging buffers from being reused until no read can write to
    them.
    """

    def __init__(self, lease: RankLease) -> None:
        self.lease, self.node, self.transfer = lease, lease.node, lease.transfer
        self.buffers: list[int] = []
        """The indices of the staging buffers of this node that the transfer uses."""
        self.runs: int | None = None
        """The number of runs that were read; None for the number of runs in the stream."""
        self._uses_blocks = False
        self._given_up: dict[Target, list[Handle]] = {"blocks": [], "buffers": []}
        """Abandoned reads that may not be over, by the memory that they write to."""

    def __enter__(self) -> RankReads:
        return self

    def __exit__(self, *_: object) -> None:
        quarantine, held = self.node.quarantine, self._given_up
        if self._uses_blocks:
            quarantine.hold(held["blocks"], self.transfer.leave, sever=self._sever_links)
        give_back = partial(self.node.staging.give_back, self.buffers)
        quarantine.hold(held["buffers"], give_back, sever=self._sever_links)

    def use_blocks(self) -> None:
        """Keep the blocks from being reused until this context ends and no read writes to them."""
        self.transfer.use()
        self._uses_blocks = True

    def follow(self) -> None:
        """Order later copies after the GPU work that was already queued when the transfer began."""
        mark = self.lease.wanted.mark
        self.node.mover.follow(mark)
        self.lease.connection.link.follow(mark)

    # -- staging buffers --------------------------------------------------------------------

    def borrow(self, *, both: bool, until: float = math.inf) -> bool:
        """Acquire staging buffers of this node. If `both` is true, also borrow from the peer.

        Waits until buffers are free. Returns False, without borrowing any buffers, if one of the
        nodes has no staging buffers at all, or if the monotonic clock reaches `until` first.
        """
        staging, lease = self.node.staging, self.lease
        most = min(BUFFERS, staging.most())
        count = most if both else min(most, max(1, self.node.scatter_threads))
        while count and not self.buffers and time.monotonic() < until:
            self.transfer.check_cancelled()
            self.buffers = staging.acquire(count, min(0.1, lease.seconds_left(until)))
        if both and self.buffers and lease.opened.piece:
            lease.borrow(len(self.buffers), until)
        if self.buffers and (lease.lent or not both):
            return True
        staging.give_back(self.buffers)
        self.buffers = []
        return False

    def staging_copy(self, buffer: int, nbytes: int, near: Any = (0,), far: Any = (0,)) -> Copy:
        """Return the runs to copy from a staging buffer of the peer to a buffer of this node.

        `buffer` indexes the acquired pairs of buffers. Each run has `nbytes` bytes. Runs begin at
        the offsets `far` in the peer's buffer and `near` in this node's buffer.
        """
        lease = self.lease
        mine = self.buffers[buffer] * self.node.staging.piece + np.asarray(near)
        theirs = lease.lent[buffer] * lease.opened.piece + np.asarray(far)
        return Copy(STAGING, STAGING, theirs, mine, np.full(len(mine), nbytes, dtype=np.int64))

    # -- reads ------------------------------------------------------------------------------

    def read(self, copies: Sequence[Copy], into: Target) -> None:
        """Read runs of the peer's pools into blocks or staging buffers, and wait for completion."""
        lease = self.lease
        handle = lease.connection.link.read(copies, lease=lease.opened.lease)
        self.finish(handle, into, renewing=False)

    def read_at_once(self, copies: Sequence[Copy], after: int | None) -> None:
        """Read runs into blocks with one operation, after the peer's GPU event `after`."""
        self.finish(self.lease.connection.link.read(copies, after), "blocks", renewing=True)

    def read_lent(self, copies: Sequence[Copy]) -> None:
        """Read runs of the peer's staging buffers into staging buffers of this node."""
        lease = self.lease
        own = lease.lent_link is not lease.connection.link
        with reclaimed_if_lost() if own else nullcontext():
            handle = lease.lent_link.read(copies, lease=lease.opened.lease)
            self.finish(handle, "buffers", renewing=True)

    def count(self, runs: int) -> None:
        """Add `runs` to the number of runs that were read."""
        self.runs = (self.runs or 0) + runs

    def finish(self, handle: Handle, into: Target, *, renewing: bool) -> None:
        """Wait for a read. If a failed read may still write, quarantine the memory that it writes.

        If `renewing` is true, the lease is renewed during the read.
        """
        lease = self.lease

        def check() -> None:
            lease.check_going_on()
            if renewing:
                lease.renew_in_time()

        deadline = lease.deadline
        if lease.others:
            deadline = min(deadline, time.monotonic() + lease.timeout)
        tried_again = lease.others
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
                self._given_up[into].append(handle)
                if tried_again and into == "blocks":
                    self._sever_before_retry()

    def _sever_links(self) -> None:
        """Tear down all links of the transfer."""
        for link in {self.lease.connection.link, self.lease.lent_link}:
            link.sever()

    def _sever_before_retry(self) -> None:
        """Tear down the link of a stalled read before another read fills the same blocks."""
        connection = self.lease.connection
        connection.link.sever()
        severed_by = time.monotonic() + _SEVERED
        while not all(handle.settle() for handle in self._given_up["blocks"]):
            if time.monotonic() > severed_by:
                problem = "A stalled read may still write to the blocks after its link was closed"
                got = f"a read from {connection.endpoint}"
                hint = "Retry the transfer with other blocks"
                error = AtlasError(Code.DEADLINE, problem, got=got, hint=hint)
                self.transfer.failed(self.lease.rank, error)
                return
            time.sleep(0.01)
