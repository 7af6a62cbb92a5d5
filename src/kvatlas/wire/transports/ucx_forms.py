"""Validate the format of UCX addresses and keys, because UCX parses them without bounds checks.

The content of a valid address or key may still be wrong. UCX then cannot connect to the address or
use the key, but it never reads past the end.
"""

from __future__ import annotations

_WORKER = 2
"""The expected flags of a worker's address, which contains only the worker's number."""
_ABILITIES = {0: 16, 1: 8}
"""The number of bytes that describe a transport's capabilities, by address version."""
_MOST = 100
"""The maximum number of devices and transports in an address; UCX has room for 128."""
_MOST_DOMAINS = 64
_NO_DEVICE = 0xFF
_LAST, _WITHOUT_WAYS, _HAS_PATHS, _HAS_SYSTEM_DEVICE, _HAS_ENDPOINTS = 0x80, 0x80, 0x40, 0x20, 0x40


def is_address(address: bytes) -> bool:
    r"""Whether a worker's address can be parsed exactly to its end.

    The address consists of the version and flags, the worker's number, and a list of devices. A
    device has its memory domain, its address with length and flags, and a list of transports. A
    transport has a checksum of its name, its capabilities, and its address with length and flags.

    >>> way = bytes.fromhex("cf19" + "00" * 16 + "82" "aa5d")  # the last transport; 2 bytes
    >>> device = bytes.fromhex("00" "06" "000201020304") + way
    >>> end = bytes.fromhex("87" "80")  # the last device: no transports, 0 bytes
    >>> is_address(b"\x20" + bytes(8) + device + end)
    True
    >>> is_address(b"\x20" + bytes(8) + device)
    False
    """
    reader = _Reader(address)
    try:
        _skip_address(reader)
    except _FormError:
        return False
    return reader.at_end


def is_key(key: bytes, memory: set[int]) -> bool:
    """Whether a remote key can be parsed exactly to its end.

    The key consists of a bitmap of memory domains, a memory kind, and one key for each domain. The
    device may follow, with its distances to other devices (three bytes each). For a GPU, a
    terminator follows the distances. `memory` lists the allowed UCX memory kinds.

    >>> is_key(bytes.fromhex("0100000000000000" "00" "00" "ff"), {0})
    True
    >>> is_key(bytes.fromhex("0100000000000000" "02" "00" "ff"), {0})
    False
    >>> is_key(bytes.fromhex("0300000000000000" "00" "00"), {0})
    False
    >>> is_key(bytes.fromhex("1000000000000000" "01" "00" "01" "00000f" "01000f" "ff"), {1})
    True
    """
    reader = _Reader(key)
    try:
        domains = int.from_bytes(reader.take(8), "little").bit_count()
        if reader.byte() not in memory:
            return False
        for _ in range(domains):
            reader.take(reader.byte())
    except _FormError:
        return False
    return reader.at_end or reader.left % 3 == 1 or (reader.left % 3 == 2 and key[-1] == _NO_DEVICE)


class _FormError(Exception):
    """The bytes end too early, or contain a value that UCX does not write."""


class _Reader:
    def __init__(self, whole: bytes) -> None:
        self._whole, self._place = whole, 0

    @property
    def left(self) -> int:
        return len(self._whole) - self._place

    @property
    def at_end(self) -> bool:
        return self.left == 0

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _FormError
        self._place += count
        return self._whole[self._place - count : self._place]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, mask: int, version: int) -> tuple[int, int]:
        """Return (number, flags that share its byte).

        In newer versions, a number that does not fit into `mask` is in the next byte.
        """
        both = self.byte()
        number, flags = both & mask, both & ~mask
        if version > 0 and number == mask:
            number = self.byte()
        return number, flags


def _skip_address(reader: _Reader) -> None:
    head = reader.byte()
    version = head & 15
    flags = head >> 4 if version == 0 else reader.byte()
    if version not in _ABILITIES or flags != _WORKER:
        raise _FormError
    reader.take(8)
    for _ in range(_MOST):
        if _skip_device(reader, version):
            return
    raise _FormError


def _skip_device(reader: _Reader, version: int) -> bool:
    """Skip one device and its transports. Return whether it is the last device."""
    domain, kind = reader.number(0x7F, version)
    length, flags = reader.number(0x1F, version)
    if domain >= _MOST_DOMAINS:
        raise _FormError
    for flag in (_HAS_PATHS, _HAS_SYSTEM_DEVICE):
        if flags & flag:
            reader.byte()
    reader.take(length)
    last = bool(kind & _WITHOUT_WAYS)
    for _ in range(_MOST):
        if last:
            return bool(flags & _LAST)
        reader.take(2 + _ABILITIES[version])
        length, way = reader.number(0x3F, version)
        if way & _HAS_ENDPOINTS:
            raise _FormError
        reader.take(length)
        last = bool(way & _LAST)
    raise _FormError
