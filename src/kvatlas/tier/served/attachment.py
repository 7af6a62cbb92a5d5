"""`Attachment`: the session of one client with the server of a tier.

The first connection of a session carries no messages after the handshake. While that connection is
open, the server keeps the client's pins and the blocks that the client is filling. The client
closes it only when no copy is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.file import TierFile
from kvatlas.tier.ingest import check_tier_plan
from kvatlas.tier.served import messages as m
from kvatlas.tier.storage import TierStorage
from kvatlas.wire import Metrics, Security
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import Connection
from kvatlas.wire.encoding import decode, encode, raise_refusal
from kvatlas.wire.handshake_checks import check_plan_size
from kvatlas.wire.protocol import Message, Refusal, bad_handshake
from kvatlas.wire.shared_pools import map_pools
from kvatlas.wire.unix_sockets import connect_to_path, unix_endpoint


class Attachment:
    """A session with the server at a path, and this process's access to the tier's blocks."""

    def __init__(self, path: Path, timeout: float, metrics: Metrics) -> None:
        self.path, self._timeout = path, timeout
        self._open, self._doubtful = True, False
        deadline = time.monotonic() + timeout
        with ExitStack() as on_failure:
            self._socket = _which(path)
            self._anchor = Connection(_connected(path, timeout))
            on_failure.callback(self._anchor.close)
            told = _greet(self._anchor, path, deadline)
            if _which(path) != self._socket:  # the server was replaced during the handshake
                raise _gone(path)
            if told.version != m.VERSION:
                raise bad_handshake(f"protocol version {told.version}, expected {m.VERSION}")
            if (told.file is None) == (told.memory is None):
                raise bad_handshake("a tier with both a file and shared memory, or neither")
            self._session = told.session
            self._channels = Channels(Security(), answers=m.TierAnswer, repeatable=m.REPEATABLE)
            on_failure.callback(self._channels.close)
            file: TierFile | None = None
            pools: dict[int, Bytes] = {}
            if told.file is not None:
                file = _file(told.file)
                on_failure.callback(file.close)
                self.plan = file.plan
            else:
                assert told.memory is not None  # noqa: S101
                self.plan, pools = _pools(told.memory)
            self.storage = ClientStorage(pools, file, self)
            self.storage.metrics = metrics
            on_failure.pop_all()
        self._use = None if file is None else file.use

    @property
    def alive(self) -> bool:
        """Whether the server still holds this session and has not been replaced."""
        try:
            return self._open and self._anchor.quiet and _which(self.path) == self._socket
        except (OSError, ValueError):  # closed meanwhile
            return False

    @property
    def usable(self) -> bool:
        """Whether the session is alive and all earlier requests were answered in time."""
        return self.alive and not self._doubtful

    def ask(self, kind: type[Message], **about: Any) -> Any:
        """Send a request of type `kind` with the fields `about`, and return the server's reply.

        Raises an error if the reply does not arrive within the client's time limit.
        """
        question = kind(session=self._session, **about)
        deadline = time.monotonic() + self._timeout
        try:
            return self._channels.ask(unix_endpoint(self.path), question, deadline=deadline)
        except AtlasError as refusal:
            # The server may still execute the request. Only the end of the session then releases
            # the blocks that it pins or claims.
            self._doubtful |= refusal.code in (Code.DEADLINE, Code.PEER_LOST, Code.BUSY)
            raise

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Prevent other processes from taking over the tier while this one moves bytes.

        Raises an error if the server was replaced or the session has ended: other processes may
        then use the blocks of this session. Data that was read is valid only if the context exits
        without an error.
        """
        with ExitStack() as used:
            if self._use is not None:
                used.enter_context(self._use)
            self._check()
            yield
            self._check()

    def _check(self) -> None:
        if not self.alive:
            raise _gone(self.path)

    def close(self) -> None:
        """Wait for copies in flight, then close all connections."""
        self.storage.close()
        self._open = False
        self._channels.close()
        self._anchor.close()


class ClientStorage(TierStorage):
    """The blocks of a tier that another process serves.

    They can be used only while that process serves the tier.
    """

    def __init__(
        self, pools: dict[int, Bytes], file: TierFile | None, attachment: Attachment
    ) -> None:
        super().__init__(pools, file, verify_always=False)
        self._attachment = attachment

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the storage open, and prevent other processes from taking over the tier.

        Raises an error if the storage is closed or the server was replaced or has ended.
        """
        with super().using(), self._attachment.moving():
            yield


def _connected(path: Path, timeout: float) -> Any:
    try:
        return connect_to_path(path, timeout)
    except TimeoutError:
        raise _slow(path) from None
    except OSError as problem:
        raise no_server(path, problem.strerror or str(problem)) from None


def _greet(anchor: Connection, path: Path, deadline: float) -> m.Attached:
    try:
        anchor.send(encode(m.Attach(version=m.VERSION)), deadline)
        answer = decode(anchor.receive(deadline), m.Attached | Refusal)
    except TimeoutError:
        raise _slow(path) from None
    except (OSError, EOFError):
        raise _gone(path) from None
    if isinstance(answer, Refusal):
        raise_refusal(answer)
    attached: m.Attached = answer
    return attached


def _file(told: m.OwnedFile) -> TierFile:
    """Open the file at the path that the server reported, and check that it has the reported id."""
    file = TierFile(Path(told.path), None, durable=False, shared=True)
    if file.identity != told.identity:
        file.close()
        problem = (
            "The path of the tier's file no longer refers to the file that the server has open"
        )
        hint = "Restart the tier's server if the file was replaced on purpose"
        raise AtlasError(Code.PEER_LOST, problem, got=told.path, hint=hint)
    return file


def _pools(told: m.OwnedMemory) -> tuple[Plan, dict[int, Bytes]]:
    check_plan_size(told.plan)
    plan = Plan.from_json(told.plan)
    check_tier_plan(plan)
    return plan, map_pools(told.published, {pool.index: pool.nbytes for pool in plan.pools})


def _which(path: Path) -> tuple[int, int, int] | None:
    """Return (device, inode, time of change) of the socket at a path; None if there is none.

    Each server creates a new socket, so the result changes when a server is replaced.
    """
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_mtime_ns


def _gone(path: Path) -> AtlasError:
    problem = "The tier's server disconnected"
    hint = "Retry: the call connects to the process that serves the tier by then"
    return AtlasError(Code.PEER_LOST, problem, got=f"socket {path}", hint=hint)


def no_server(path: Path, why: str) -> AtlasError:
    """Return the error for a path at which no process serves a tier."""
    problem, hint = (
        "No process serves the tier",
        "Start the process that serves the tier, and try again",
    )
    return AtlasError(Code.PEER_LOST, problem, got=f"socket {path}: {why}", hint=hint)


def _slow(path: Path) -> AtlasError:
    problem, hint = (
        "The tier's server did not respond in time",
        "Check whether the server process hangs",
    )
    return AtlasError(Code.DEADLINE, problem, got=f"socket {path}", hint=hint)
