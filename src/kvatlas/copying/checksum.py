"""CRC-32 checksums, by ISA-L if it is installed (several times faster), otherwise by zlib."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache

Summed = bytes | bytearray | memoryview


@cache
def _fastest() -> Callable[[Summed, int], int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32


def crc32(data: Summed, start: int = 0) -> int:
    """Return the CRC-32 of `data`. `start` is the CRC-32 of the bytes before it, if there are any.

    >>> crc32(b"123456789") == crc32(b"456789", crc32(b"123")) == 0xCBF43926
    True
    """
    return _fastest()(data, start)


def has_fast_crc32() -> bool:
    """Return whether checksums are computed by ISA-L."""
    return _fastest() is not zlib.crc32
