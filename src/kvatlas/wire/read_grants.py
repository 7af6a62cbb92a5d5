"""The bytes that one lease allows a peer to read, for transports that authorise each read."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.byte_ranges import ByteRanges, source_ranges
from kvatlas.wire.refusals import lease_expired
from kvatlas.wire.transports.access import SESSION_BYTES, AskedRead

_FINISHING = 0.05
"""Seconds that a send may take to end by itself when its lease ends."""


def session_id(key: bytes) -> bytes:
    """Return the id that data connections send instead of the secret key of their session."""
    return hashlib.blake2b(key, digest_size=SESSION_BYTES, person=b"kvatlas session").digest()


class ReadGrant:
    """The bytes of a lease that its peer may read: those of its stream, and its buffers.

    `stream` is None if only buffers may be read. `lent` returns the staging buffers that
    are lent to the lease at the moment.
    """

    def __init__(
        self,
        session: bytes,
        stream: AnyStream | None,
        lent: Callable[[], Sequence[int]],
        piece: int,
        names: frozenset[str] | None = None,
    ) -> None:
        self._session, self._names = session_id(session), names
        self._stream, self._lent, self._piece = stream, lent, piece
        self._sends: dict[object, Callable[[], None]] = {}
        """For each send in progress, the function that ends its connection."""
        self._changed = threading.Condition()
        self._over = False

    @contextmanager
    def reading(self, asked: AskedRead) -> Iterator[None]:
        """Allow a read while the context lasts, or raise an error."""
        if not hmac.compare_digest(asked.session, self._session):
            raise lease_expired()
        if self._names is not None and asked.names != self._names:
            raise lease_expired()
        send = object()
        with self._changed:
            if self._over:
                raise lease_expired()
            self._sends[send] = asked.hang_up
        try:
            # Recorded before the check: if the buffers are reclaimed now, that waits for this send.
            self._check_covered(asked)
            yield
        finally:
            with self._changed:
                del self._sends[send]
                self._changed.notify_all()

    def end(self) -> None:
        """Allow no more reads. When this returns, no bytes are being sent.

        If a peer does not receive the bytes of a send, its connection is closed.
        """
        with self._changed:
            self._over = True
            self._end_sends()

    def interrupt(self) -> None:
        """End the sends in progress. When this returns, each later read is checked anew."""
        with self._changed:
            self._end_sends()

    def _end_sends(self) -> None:
        if self._changed.wait_for(lambda: not self._sends, _FINISHING):
            return
        for hang_up in self._sends.values():
            hang_up()
        self._changed.wait_for(lambda: not self._sends)

    @cached_property
    def _ranges(self) -> dict[int, ByteRanges]:
        return {} if self._stream is None else source_ranges(self._stream)

    def _check_covered(self, asked: AskedRead) -> None:
        ranges = self._lent_ranges() if asked.region == STAGING else self._ranges.get(asked.region)
        if ranges is None or not ranges.cover(asked.starts, asked.lengths):
            raise AtlasError(
                Code.FORBIDDEN,
                "The lease does not cover these bytes",
                got=f"{len(asked.starts)} runs of region {asked.region}, "
                f"the first at byte {int(asked.starts.min()):,}",
                hint="Read only blocks of the request, and buffers that are lent to the lease",
            )

    def _lent_ranges(self) -> ByteRanges | None:
        at = np.array(list(self._lent()), dtype=np.int64) * self._piece
        return ByteRanges.of(at, at + self._piece) if len(at) else None
