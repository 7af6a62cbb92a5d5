"""Shared tiers: one of the processes that use a tier serves it to the others.

The first process that opens a tier's file becomes its owner and serves it to the others. When
the owner ends, the next process that calls the tier takes over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.file_owner import socket_beside
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.server import TierServer
from kvatlas.tier.tier import Tier
from kvatlas.wire import make_transport, pools_for
from kvatlas.wire.unix_sockets import forget_path

log = logging.getLogger("kvatlas.tier")

_OPENING = 30.0
"""Seconds that other processes wait for the first one to open a tier."""
_TAKE_OVER = 2.0
"""Seconds that a call waits while another process takes over from a dead owner."""
_WATCH = 0.5
"""Seconds between checks whether a tier is being served."""


def share_file(
    path: str | Path, plan: Plan | None = None, *, durable: bool = True, timeout: float = 10.0
) -> TierClient:
    """Open the tier in a file for any number of processes. With a plan, create a missing file.

    An existing file keeps its plan. `durable` takes effect only if this process becomes the one
    that serves the file.

    >>> import tempfile
    >>> from kvatlas.planning import plan
    >>> made = plan("Qwen3-8B", memory="32MiB", layout="BLHNC", max_len=64)
    >>> path = Path(tempfile.mkdtemp()) / "prefixes.tier"
    >>> with share_file(path, made) as one, share_file(path) as other:
    ...     one.match([b"first 16 tokens"], 16), other.plan == made
    (0, True)
    """
    path = Path(path).absolute()
    host = _Host(lambda: _serve_file(path, plan, durable=durable))
    return _shared(socket_beside(path), host, timeout)


def share_memory(at: str | Path, plan: Plan, *, timeout: float = 10.0) -> TierClient:
    """Open a tier in shared memory, served at the socket path `at`.

    Its content is lost when the process that serves it ends.
    """
    at = Path(at).absolute()
    return _shared(at, _Host(lambda: _serve_memory(at, plan)), timeout)


class _Host:
    """Makes this process serve a tier whenever no other process does."""

    def __init__(self, serve: Callable[[], ExitStack]) -> None:
        self._serve = serve
        self._serving: ExitStack | None = None

    def serve(self) -> None:
        """Start serving the tier, unless another process does."""
        if self._serving is not None:
            return
        try:
            self._serving = self._serve()
        except AtlasError as refusal:
            if refusal.code is not Code.TWICE:
                raise

    def close(self) -> None:
        """Stop serving the tier."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()


def _shared(at: Path, host: _Host, timeout: float) -> TierClient:
    """Return a client of the tier at a socket path, and serve the tier if no process does.

    The call waits for a server that another process may be starting.
    """
    try:
        about: dict[str, Any] = {"before": host.serve, "closed": host.close}
        connect_timeout = max(timeout, _OPENING)
        client = TierClient(at, timeout=timeout, connect_timeout=connect_timeout, **about)
    except BaseException:
        host.close()
        raise
    client.connect_timeout = _TAKE_OVER
    threading.Thread(
        target=_watch, args=(weakref.ref(client),), name="kvatlas-tier-watch", daemon=True
    ).start()
    return client


def _watch(watched: weakref.ref[TierClient]) -> None:
    """Take over serving the tier if its server ends, even while this process makes no calls."""
    while (client := watched()) is not None and not client.closed:
        with suppress(AtlasError):
            client.find_server()
        del client
        time.sleep(_WATCH)


def _serve_file(path: Path, plan: Plan | None, *, durable: bool) -> ExitStack:
    """Take ownership of a tier's file and serve it until the returned stack is closed."""
    with ExitStack() as serving:
        tier = serving.enter_context(_opened(path, plan, durable=durable))
        served = serving.enter_context(TierServer(tier))
        log.info("serving path=%s at=%s", path, served.path)
        return serving.pop_all()


def _opened(path: Path, plan: Plan | None, *, durable: bool) -> Tier:
    if path.exists():
        return Tier.open(path, durable=durable)
    try:
        return Tier.open(path, plan, durable=durable)
    except AtlasError as refusal:
        if refusal.code is not Code.BAD_PLAN or not path.exists():
            raise
        return Tier.open(path, durable=durable)  # another process was faster, with another plan


def _serve_memory(at: Path, plan: Plan) -> ExitStack:
    """Create a tier in shared memory and serve it until the returned stack is closed."""
    with ExitStack() as serving:
        _own(at, serving)
        tier = Tier(plan, pools_for(plan, 0, make_transport("shm")))
        serving.callback(tier.close)
        serving.enter_context(TierServer(tier, at))
        return serving.pop_all()


def _own(at: Path, owning: ExitStack) -> None:
    """Lock a socket path, so that only this process serves a tier there.

    The system releases the lock when the process ends.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = at.with_name(f"{at.name}.lock")
    try:
        fd = os.open(lock, flags, 0o600)
    except OSError as fault:
        problem = "The lock file of the tier cannot be opened"
        hint = "Use a path in a folder that you own"
        got = f"{lock}: {fault.strerror}"
        raise AtlasError(Code.UNWRITABLE, problem, got=got, hint=hint) from None
    owning.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An owner removes the file while it holds the lock, so this file may be a removed one.
        mine = os.path.samestat(os.fstat(fd), lock.stat())
    except OSError:
        mine = False
    if not mine:
        raise AtlasError(
            Code.TWICE,
            "Another process already serves a tier at this path",
            got=at,
            hint="Use another path, or connect to that process with TierClient(path)",
        )
    owning.callback(lock.unlink)
    forget_path(at)
