"""Restrict listening sockets to some addresses, if a library binds them to all interfaces.

The kernel can attach a packet filter to a listening socket, so that packets to other addresses do
not open a connection. A library's sockets are descriptors of this process like any other, so this
module can attach the filter to them.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvatlas.wire.transports import errors

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here on count from the IP header
_DESTINATION = {4: 16, 6: 24}
"""The offset of the destination address in the IP header, by version."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_WHOLE = 0xFFFFFFFF
_LISTENS, _GONE = "0A", ("06", "07")
"""The kernel's codes for socket states: listening, and closed (TIME_WAIT, CLOSE)."""


def listeners() -> dict[int, socket.socket]:
    """Return duplicates of this process's listening TCP sockets, by inode."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            descriptor = int(path.name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            one = socket.socket(fileno=os.dup(descriptor))
            inet = one.family in (socket.AF_INET, socket.AF_INET6)
            if inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(one.fileno()).st_ino] = one
            else:
                one.close()
        except OSError as problem:  # closed meanwhile, unless no descriptor is left
            if limit := errors.own_limit(problem):
                raise limit from problem
    return found


def narrow(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Restrict a listening socket permanently to connections to these addresses."""
    program = b"".join(struct.pack("HBBI", *step) for step in _only_to(addresses))
    code = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, whole)
    listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def _only_to(addresses: Iterable[str]) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that accepts packets to the addresses and drops all others.

    Each instruction is (code, jump if true, jump if false, constant).
    """
    program = []
    for address in map(ipaddress.ip_address, addresses):
        packed = address.packed
        words = [int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)]
        left = 2 * len(words) + 1  # instructions for this address after the check of its version
        program += [
            (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
            (_SHIFT_RIGHT, 0, 0, 4),
            (_IF_EQUAL, 0, left, address.version),
        ]
        for number, word in enumerate(words):
            left -= 2
            where = _NETWORK_HEADER + _DESTINATION[address.version] + 4 * number
            program += [(_LOAD_WORD, 0, 0, where), (_IF_EQUAL, 0, left, word)]
        program.append((_RETURN, 0, 0, _WHOLE))
    return [*program, (_RETURN, 0, 0, 0)]


def connected(ports: Iterable[int]) -> bool:
    """Whether any peer is connected, or connecting, to one of these ports."""
    wanted = {f"{port:04X}" for port in ports}
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if local.rpartition(":")[2] in wanted and state not in (_LISTENS, *_GONE):
                    return True
    return False
