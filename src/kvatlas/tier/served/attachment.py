"""`Attachment`: one server of a tier as one client has found it, until either has gone.

Its first connection says nothing after the greeting: as long as it is open, the server
keeps what this client has pinned or is filling. So it is closed only when no bytes move.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.file import TierFile
from kvatlas.tier.ingest import check_tier_plan
from kvatlas.tier.served import messages as m
from kvatlas.tier.storage import TierStorage
from kvatlas.wire import Metrics, Security
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import Connection
from kvatlas.wire.peers import check_plan_size
from kvatlas.wire.protocol import Message, Refusal, bad_handshake, decode, encode
from kvatlas.wire.refusals import raise_refusal
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.shared_pools import map_pools
from kvatlas.wire.transports.errors import peer_lost
from kvatlas.wire.unix_sockets import connect_to_path, unix_endpoint


class Attachment:
    """A session with the server at a path, and the tier's blocks as this process reaches them."""

    def __init__(self, path: Path, seconds: float, metrics: Metrics) -> None:
        self.path, self._seconds = path, seconds
        self._open, self._doubtful = True, False
        deadline = time.monotonic() + seconds
        with ExitStack() as on_failure:
            self._socket = _which(path)
            self._anchor = Connection(_connected(path, seconds))
            on_failure.callback(self._anchor.close)
            told = _greet(self._anchor, path, deadline)
            if _which(path) != self._socket:  # one has taken another's place meanwhile
                raise _gone(path)
            if told.version != m.VERSION or (told.file is None) == (told.memory is None):
                raise bad_handshake("a tier's server that speaks of neither file nor memory")
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
        """Whether the server still knows this session, and nobody has taken its place."""
        try:
            return self._open and self._anchor.quiet and _which(self.path) == self._socket
        except (OSError, ValueError):  # closed meanwhile
            return False

    @property
    def usable(self) -> bool:
        """Whether it is good for further calls."""
        return self.alive and not self._doubtful

    def ask(self, kind: type[Message], **about: Any) -> Any:
        """The server's answer to a question, within the client's time."""
        question = kind(session=self._session, **about)
        deadline = time.monotonic() + self._seconds
        try:
            return self._channels.ask(unix_endpoint(self.path), question, deadline=deadline)
        except AtlasError as refusal:
            # It may still be carried out: what it pins or claims goes with the session alone.
            self._doubtful |= refusal.code in (Code.DEADLINE, Code.PEER_LOST, Code.BUSY)
            raise

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While this process reads or fills blocks, nobody else becomes the tier's server.

        Refused where somebody has already, or the session has ended: blocks that it had are
        then somebody else's. What was read is good only if this does not raise at the end.
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
        """Wait for bytes that are on their way, then let go of everything."""
        self.storage.close()
        self._open = False
        self._channels.close()
        self._anchor.close()


class ClientStorage(TierStorage):
    """The blocks of a tier that another process has; used only while that is so."""

    def __init__(
        self, pools: dict[int, Bytes], file: TierFile | None, attachment: Attachment
    ) -> None:
        super().__init__(pools, file, verify_always=False)
        self._attachment = attachment

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep it open meanwhile, and the server the same; refused where either is not so."""
        with super().using(), self._attachment.moving():
            yield


def _connected(path: Path, seconds: float) -> Any:
    try:
        return connect_to_path(path, seconds)
    except TimeoutError:
        raise _slow(path) from None
    except OSError as problem:
        raise peer_lost(f"nobody who serves a tier at {path}: {problem.strerror}") from None


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
    """The server's file, opened here: the same one, and nobody else's."""
    file = TierFile(Path(told.path), None, durable=False, shared=True)
    if file.identity != told.identity:
        file.close()
        raise peer_lost(f"another file at {told.path}")
    return file


def _pools(told: m.OwnedMemory) -> tuple[Plan, dict[int, Bytes]]:
    check_plan_size(told.plan)
    plan = Plan.from_json(told.plan)
    check_tier_plan(plan)
    return plan, map_pools(told.published, {pool.index: pool.nbytes for pool in plan.pools})


def _which(path: Path) -> tuple[int, int, int] | None:
    """Which socket is at a path: another server makes another one."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_mtime_ns


def _gone(path: Path) -> AtlasError:
    return peer_lost(f"the end of the tier's server at {path}")


def _slow(path: Path) -> AtlasError:
    hint = "See whether its process stands still"
    return AtlasError(Code.DEADLINE, got=f"no answer from the tier at {path}", hint=hint)
