"""Fork safety: forked children close their copies of this process's sockets.

A forked child inherits every descriptor of its parent. While the child lives, the kernel keeps the
inherited connections open, so peers would not notice that the parent has died. Sockets are
therefore recorded here, and a forked child closes them at once. It closes descriptors only: it
neither shuts a connection down nor ends its TLS session, because the parent still uses both.

The threads of the parent do not exist in the child, so locks that they held stay locked. Objects
that use sockets or threads record the process that made them, and raise an error in any other
process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from kvatlas.errors import AtlasError, Code

S = TypeVar("S", bound=socket.socket)
T = TypeVar("T")

_sockets: WeakSet[socket.socket] = WeakSet()
"""The sockets to close. No lock guards them, because a thread could hold it during a fork."""
_kept: WeakSet[object] = WeakSet()
"""Objects of libraries that must not be destroyed in a forked child."""
_forks = 0
"""The number of forks between the first process and this one."""


def close_in_children(made: S) -> S:
    """Close a socket in forked children of this process. Return the socket.

    Wrapping a socket for TLS creates a new socket, which must be recorded as well.
    """
    _sockets.add(made)
    return made


def fresh_in_children(lock: threading.Lock) -> threading.Lock:
    """Unlock a lock in forked children, where the thread that holds it does not exist.

    Return the lock.
    """
    # The method that the standard library uses for the locks of its own modules.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def keep_in_children(made: T) -> T:
    """Keep forked children from destroying the object `made`. Return `made`.

    Use this for libraries whose clean-up in a child would affect the parent. For example, UCX
    removes the parent's sockets from an epoll instance that both processes share.
    """
    _kept.add(made)
    return made


class OwningProcess:
    """Records the process that made an object. A forked child must not use the object.

    >>> process = OwningProcess("node")
    >>> process.check()
    >>> process.forked
    False
    """

    def __init__(self, what: str) -> None:
        self._what, self._made_at = what, _forks

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the process that made the object."""
        return self._made_at != _forks

    def check(self) -> None:
        """Raise an error in a forked child."""
        if self._made_at != _forks:
            raise AtlasError(
                Code.WIRE_FAILED,
                f"The {self._what} was created before this process was forked",
                got="a call in a forked child",
                hint=f"Create a new {self._what} in the child, or start processes with "
                'multiprocessing.get_context("spawn")',
            )


def _after_fork_in_child() -> None:
    """Close the sockets that the child inherited.

    No lock is acquired, because a thread of the parent may have held the lock during the fork.
    """
    for kept in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # a reference that nothing drops
    global _forks
    _forks += 1
    for one in list(_sockets):
        descriptor = socket.socket.detach(one)
        with suppress(OSError):
            if descriptor >= 0:
                os.close(descriptor)
    _sockets.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
