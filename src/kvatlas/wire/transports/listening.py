"""Listening sockets of a library that binds them to every interface, narrowed to one address.

The kernel lets a filter be put on a socket that listens: packets that it drops never
become a connection. So who has the socket's descriptor, which everybody in the process
has, can hold it to the address that the library was told.
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
_NETWORK_HEADER = 0xFFF00000  # where a filter finds it, whatever lies before it
_DESTINATION = {4: 16, 6: 24}
"""Where the header of either version has the address that a packet is for."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_WHOLE = 0xFFFFFFFF
_LISTENS, _GONE = "0A", ("06", "07")
"""The kernel's numbers for states: a socket that listens; connections that are over."""


def own_addresses(host: str) -> list[str]:
    """The addresses of this machine that a name stands for; not the one that means all of them.

    >>> own_addresses("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as problem:
        got = f"{host}: {problem}"
        raise errors.failed(got, hint="Name an address of this machine") from problem
    addresses = sorted({str(entry[4][0]) for entry in found})
    if any(ipaddress.ip_address(address).is_unspecified for address in addresses):
        raise errors.failed(f"{host}, which is every address", hint="Name the one for peers")
    return addresses


def is_loopback(address: str) -> bool:
    """Whether nobody but processes of this host can connect to an address.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("fe80::1%eth0")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listeners() -> dict[int, socket.socket]:
    """Duplicates of the TCP sockets of this process that listen, by inode."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            descriptor = int(path.name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            one = socket.socket(fileno=os.dup(descriptor))
            inet = one.family in (socket.AF_INET, socket.AF_INET6)
            if inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(one.fileno()).st_ino] = one
            else:
                one.close()
    return found


def narrow(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Let a socket that listens take connections to these addresses alone, for good."""
    program = b"".join(struct.pack("HBBI", *step) for step in _only_to(addresses))
    code = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, whole)
    listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def _only_to(addresses: Iterable[str]) -> list[tuple[int, int, int, int]]:
    """A filter that keeps packets to some addresses: (what, steps if so, if not, number)."""
    program = []
    for address in map(ipaddress.ip_address, addresses):
        packed = address.packed
        words = [int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)]
        left = 2 * len(words) + 1  # steps of this address after the one for its version
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
    """Whether anybody is connected, or about to be, to one of these ports."""
    wanted = {f"{port:04X}" for port in ports}
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if local.rpartition(":")[2] in wanted and state not in (_LISTENS, *_GONE):
                    return True
    return False
