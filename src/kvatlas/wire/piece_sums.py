"""Checksums by which two nodes compare transferred bytes.

The checksums are CRC-32, or keyed MACs if the session is protected.

CRC-32 detects damage. It does not detect an attacker, who can change bytes so that their CRC-32
stays the same. A MAC detects both, because only the two nodes have its key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvatlas.copying.gather_scatter import stream_bytes
from kvatlas.copying.movers import PoolMover
from kvatlas.copying.stream_pieces import piece_checksum
from kvatlas.routing import Copy

MAC_BYTES, CRC_BYTES = 16, 4


def mac_key(session: bytes, lease: bytes) -> bytes:
    """Return the key of a lease's MACs, derived from keys that only the two nodes have."""
    return hashlib.blake2b(lease, key=session, person=b"kvatlas sums").digest()


def piece_sum(piece: Any, key: bytes | None) -> bytes:
    """Return the MAC of the bytes `piece`, or their CRC-32 if `key` is None.

    >>> piece = np.zeros(3, np.uint8)
    >>> piece_sum(piece, None).hex(), len(piece_sum(piece, b"key"))
    ('12d941ff', 16)
    """
    if key is None:
        return piece_checksum(piece).to_bytes(CRC_BYTES, "little")
    on_host = piece if isinstance(piece, np.ndarray) else piece.cpu().numpy()
    return hashlib.blake2b(on_host.data, key=key, digest_size=MAC_BYTES).digest()


def stream_sums(
    mover: PoolMover, copies: Sequence[Copy], piece: int, key: bytes | None, *, source: bool
) -> bytes:
    """Return the concatenated checksums of the bytes of `copies`, one for every `piece` bytes.

    If `source` is true, the bytes are read at the source of the copies, else at their destination.
    """
    if key is None:
        return mover.checksums(copies, piece, source=source).astype("<u4").tobytes()
    if not source:
        copies = [
            Copy(c.destination_pool, c.source_pool, c.destination, c.source, c.length)
            for c in copies
        ]
    stream = np.empty(stream_bytes(copies), dtype=np.uint8)
    mover.gather(copies, stream)
    pieces = (stream[at : at + piece] for at in range(0, stream.size, piece))
    return b"".join(piece_sum(one, key) for one in pieces)
