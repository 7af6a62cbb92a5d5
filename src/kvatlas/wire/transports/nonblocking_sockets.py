"""Non-blocking sockets: send and receive step by step, so that one thread serves many sockets.

An operation is a generator. It yields the event to wait for before its next step, which is
`selectors.EVENT_READ` or `EVENT_WRITE`. Only `send_buffers` is for blocking sockets.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[int, None, T]
"""An operation in steps. It yields the event to wait for, and finally returns its result."""
_MOST_BUFFERS = 512
"""The maximum number of buffers that one system call sends. Linux allows 1,024."""


def until_ready(call: Callable[[], T], event: int = EVENT_READ) -> Steps[T]:
    """Repeat a call on a socket until the call does not have to wait, and return its result.

    `event` is the event to wait for if the socket has no TLS. TLS sockets report the event
    themselves.
    """
    while True:
        try:
            return call()
        except BlockingIOError:
            yield event
        except ssl.SSLWantReadError:
            yield EVENT_READ
        except ssl.SSLWantWriteError:
            yield EVENT_WRITE


def send(one: socket.socket, data: bytes) -> Steps[None]:
    """Send all of `data`."""
    while data:
        sent = yield from until_ready(partial(one.send, data), EVENT_WRITE)
        data = data[sent:]


def receive(one: socket.socket, nbytes: int) -> Steps[bytes]:
    """Receive exactly `nbytes` bytes. Raise EOFError if the connection ends before that."""
    arrived = b""
    while len(arrived) < nbytes:
        some = yield from until_ready(partial(one.recv, nbytes - len(arrived)))
        if not some:
            raise EOFError
        arrived += some
    return arrived


def send_buffers(one: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all bytes of several buffers in order, over a blocking socket.

    Without TLS, one system call sends many buffers, so a short first buffer needs no separate
    packet.
    """
    if isinstance(one, ssl.SSLSocket):
        for buffer in buffers:
            one.sendall(buffer)
        return
    for first in range(0, len(buffers), _MOST_BUFFERS):
        some = buffers[first : first + _MOST_BUFFERS]
        sent = one.sendmsg(some)
        for buffer in some:  # all are sent, unless a signal interrupts the call
            if sent < len(buffer):
                one.sendall(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))


def ready(one: socket.socket, events: int = EVENT_READ, milliseconds: int = 0) -> bool:
    """Wait until one of the events occurs on a socket. Return whether one has occurred."""
    wanted = select.POLLIN if events & EVENT_READ else 0
    wanted |= select.POLLOUT if events & EVENT_WRITE else 0
    poll = select.poll()
    poll.register(one.fileno(), wanted)
    return bool(poll.poll(milliseconds))


def shut_down(one: socket.socket) -> None:
    """End a connection, even if a forked child has it open. Threads that wait on it return."""
    with suppress(OSError):
        # `SSLSocket.shutdown` would drop TLS: later data would be sent unencrypted.
        socket.socket.shutdown(one, socket.SHUT_RDWR)


def hang_up(one: socket.socket) -> None:
    """Shut a connection down and close it."""
    shut_down(one)
    one.close()
