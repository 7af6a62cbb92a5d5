"""The header of an object: its identity, its size and the checksum of its payload.

    0   8s   b"kvobject"
    8   u16  version, 2
    10  u16  checksum algorithm: 1 for CRC-32, as in zlib
    12  u32  index of the object in its row
    16  u64  size of the payload in bytes
    24  16s  digest of the namespace
    40  16s  digest of the row
    56  u32  checksum of the payload
    60  u32  CRC-32 of the preceding 60 bytes

Numbers are little-endian. A reader can compute all fields except the payload's checksum, so it
compares the header instead of parsing it.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from kvatlas.copying.checksum import crc32
from kvatlas.copying.run_bounds import Bytes
from kvatlas.tier.stores import Parts

MAGIC, VERSION, CRC32 = b"kvobject", 2, 1
_FIELDS = struct.Struct("<8sHHIQ16s16sI")
HEADER = _FIELDS.size + 4
"""Bytes of a header."""


class ObjectPlace(NamedTuple):
    """The identity of an object: its namespace, its row and its index in the row."""

    namespace: bytes
    row: bytes
    number: int


def checksum(parts: Parts) -> int:
    """Return the checksum of a payload."""
    found = 0
    for part in parts:
        found = crc32(part.data, found)
    return found


def header(place: ObjectPlace, nbytes: int, crc: int) -> Bytes:
    """Return the header of an object.

    >>> place = ObjectPlace(bytes(16), bytes(16), 0)
    >>> made = header(place, 4, checksum([np.arange(4, dtype=np.uint8)]))
    >>> made.nbytes, made[:8].tobytes(), is_sound(made, place, [np.arange(4, dtype=np.uint8)])
    (64, b'kvobject', True)
    """
    about = (place.number, nbytes, place.namespace, place.row, crc)
    said = _FIELDS.pack(MAGIC, VERSION, CRC32, *about)
    return np.frombuffer(said + zlib.crc32(said).to_bytes(4, "little"), np.uint8)


def is_sound(found: Bytes, place: ObjectPlace, payload: Parts) -> bool:
    """Return whether a header is valid for an object and matches its payload."""
    nbytes = sum(part.nbytes for part in payload)
    said = int.from_bytes(found[56:60].tobytes(), "little")
    return bool(np.array_equal(found, header(place, nbytes, said))) and checksum(payload) == said
