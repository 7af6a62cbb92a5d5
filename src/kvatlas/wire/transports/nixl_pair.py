"""A NIXL link with a second link, so that two threads can copy in parallel.

Between processes of one host, the CPU copies the data during the call that starts a read, and an
agent handles one call at a time. If there are enough cores, a large read is divided between two
agents, and two concurrent reads use one agent each. The second agent is created in the background
during the first large read, which does not wait for the second agent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from kvatlas.errors import AtlasError
from kvatlas.routing import Copy
from kvatlas.wire.transports.access import Access
from kvatlas.wire.transports.handles import Done, Handle
from kvatlas.wire.transports.nixl_link import NixlLink

log = logging.getLogger("kvatlas.wire")

_WORTH = 4 << 20
"""Reads of at least this many bytes may use a second agent."""
_DIVIDED = 16 << 20
"""Reads of at least this many bytes are divided between both agents."""


class PairedNixlLink(NixlLink):
    """A link that divides large reads between two threads, if its transport allows two threads."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._helper: ThreadPoolExecutor | None = None
        self._second: NixlLink | None = None
        self._pairing = threading.Lock()
        """Held while `_helper` or `_second` changes. No other lock is taken under it."""

    def _post(self, copies: Sequence[Copy]) -> Handle:
        if self.owner.copy_threads < 2:
            return super()._post(copies)
        nbytes = sum(copy.nbytes for copy in copies)
        second = self._found_second() if nbytes >= _WORTH else None
        if second is None:
            return super()._post(copies)
        if nbytes >= _DIVIDED:
            return self._divided(copies, second)
        if not self.lock.acquire(blocking=False):  # another thread reads with this agent
            return second._post(copies)
        try:
            return super()._post(copies)
        finally:
            self.lock.release()

    def _divided(self, copies: Sequence[Copy], second: NixlLink) -> Handle:
        """Read half of the runs in this thread, the other half over `second` in a helper thread."""
        near = [half for copy in copies if len(half := _rows(copy, slice(0, len(copy) // 2)))]
        far = [half for copy in copies if len(half := _rows(copy, slice(len(copy) // 2, None)))]
        helper = self._helper
        if not near or helper is None:
            return super()._post(copies)
        try:
            other = helper.submit(second._post, far)
        except RuntimeError:  # the link is being closed
            return super()._post(copies)
        try:
            return _BothHandles(super()._post(near), other)
        except AtlasError as problem:  # this half was not posted, but the other one may be
            return _BothHandles(Done(), other, problem)
        except BaseException:  # an interrupt: the caller gets no handle to wait for
            wait([other])
            if not _BothHandles(Done(), other).settle():
                second.sever()
            raise

    def _found_second(self) -> NixlLink | None:
        """Return the second link. If there is none yet, create it in a thread and return None."""
        with self._pairing:
            if self._helper is None and self.open:
                self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvatlas-nixl")
                self._helper.submit(self._make_second)
            return self._second

    def _make_second(self) -> None:
        made = None
        try:
            made = NixlLink(self.owner, self._agents, self._published, self.peer_memory)
            made.sign_in(Access(), math.inf)
            with self._pairing:
                if self.open:
                    self._second, made = made, None
        except AtlasError as problem:
            log.warning("cannot create a second NIXL agent, reading with one: %s", problem)
        finally:
            if made is not None:
                made.close()

    @property
    def over(self) -> bool:
        """Whether both agents were given up."""
        return super().over and (self._second is None or self._second.over)

    def sever(self) -> None:
        """Give up both agents, and all operations in flight."""
        super().sever()
        if self._second is not None:
            self._second.sever()

    def _end(self) -> None:
        """Give up this agent, and close the second link, which first finishes its operations."""
        super()._end()
        with self._pairing:
            helper, second = self._helper, self._second
        if helper is not None:
            helper.shutdown(wait=False)
        if second is not None:
            second.close()


class _BothHandles(Handle):
    """An operation in two parts. Another thread posts the second part."""

    def __init__(
        self, first: Handle, second: Future[Handle], problem: AtlasError | None = None
    ) -> None:
        self._first, self._second, self._problem = first, second, problem

    def _poll(self) -> bool:
        if self._problem is not None:
            raise self._problem
        first = self._first.poll()
        return self._second.done() and self._second.result().poll() and first

    def _release(self) -> None:
        self._first.release()
        if self._second.done():
            with suppress(AtlasError):
                self._second.result().release()

    def _settle(self) -> bool:
        if not self._second.done():
            return False
        # If the second part was not posted, no bytes of it can arrive.
        second = self._second.exception() is not None or self._second.result().settle()
        return self._first.settle() and second


def _rows(copy: Copy, rows: slice) -> Copy:
    """Return a `Copy` with only the runs of `copy` whose index is in the slice `rows`."""
    source, destination, length = (
        column[rows] for column in (copy.source, copy.destination, copy.length)
    )
    return Copy(copy.source_pool, copy.destination_pool, source, destination, length)
