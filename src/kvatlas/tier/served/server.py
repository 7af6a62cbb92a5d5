"""`TierServer`: serve a tier of this process to other processes of the same user and host.

Only the server has the index. It looks up blocks, assigns blocks for ranks to fill and decides when
they are complete. The bytes of blocks do not pass through it. A client's pins and unfinished store
operations belong to its session, and a session belongs to one connection. The connection ends when
the client closes it or dies. The server then releases the client's pins, and frees the blocks that
the client was filling.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.file_owner import socket_beside
from kvatlas.tier.hit import Hit
from kvatlas.tier.ingest import Delivery
from kvatlas.tier.part_sums import PartSum
from kvatlas.tier.request_blocks import keys_by_group
from kvatlas.tier.served import messages as m
from kvatlas.tier.storing import OpenStore
from kvatlas.tier.tier import Tier
from kvatlas.wire.handshake_checks import check_plan_size
from kvatlas.wire.protocol import (
    Key,
    Message,
    Ok,
    SendPlan,
    bad_handshake,
    new_key,
    pack_tables,
    unpack_tables,
)
from kvatlas.wire.rpc import Caller, Server
from kvatlas.wire.shared_pools import SharedPools
from kvatlas.wire.unix_sockets import forget_path, unix_endpoint

_MAX_PLANS = 64
"""Maximum number of client plans that are cached."""
_MAX_OPEN = 4096
"""Maximum number of pins, and of stores, that one session may have at once."""
_CLOSE_SECONDS = 5.0
"""Seconds that clients have to release shared memory when the server is closed."""
_PAUSE = 0.01
_BEGINNINGS = (m.Attach, m.PinKeys, m.JoinPin, m.BeginStore)
"""Requests that create something that must be released later."""


@dataclass(eq=False)
class _Pin:
    """Blocks that one or more sessions have pinned."""

    hit: Hit
    held: ExitStack
    holders: int = 1


@dataclass(eq=False)
class _Store:
    """A store operation that a client has begun and not yet ended."""

    store: OpenStore
    deliveries: dict[Any, Delivery]


@dataclass(eq=False)
class _ClientSession:
    """The pins and unfinished store operations of one client."""

    open: bool = True
    pins: dict[Key, int] = field(default_factory=dict)
    """How often the session holds each pin."""
    stores: dict[Key, _Store] = field(default_factory=dict)


class TierServer:
    """Serve a tier on a Unix socket. For a tier in a file, the socket is `PATH.sock`.

    A tier in memory requires a socket path `at`, and its memory must be shared:
    `Tier(plan, pools_for(plan, 0, make_transport("shm")))`. Only processes of the same user may
    connect.

    >>> import tempfile
    >>> from kvatlas.planning import plan
    >>> from kvatlas.tier import TierClient, TierServer
    >>> made = plan("Qwen3-8B", memory="32MiB", layout="BLHNC", max_len=64)
    >>> path = Path(tempfile.mkdtemp()) / "prefixes.tier"
    >>> with Tier.open(path, made) as tier, TierServer(tier) as server:
    ...     with TierClient(server.path) as client:  # in any process
    ...         client.match([b"first 16 tokens"], tokens=16)
    0
    """

    def __init__(self, tier: Tier, at: str | Path | None = None) -> None:
        self._tier = tier
        self._shared: SharedPools | None = None
        if tier.file is not None:
            self.path = socket_beside(tier.file.path)
            where: dict[str, Any] = {"file": _told(tier)}
        elif at is None:
            problem = "A tier in memory requires a socket path"
            hint = "Pass a path in a folder that you own: TierServer(tier, at=path)"
            raise AtlasError(Code.BAD_CONFIG, problem, got="at=None", hint=hint)
        else:
            self.path = Path(at).absolute()
            self._shared = SharedPools(tier.memory)
            published = self._shared.published
            where = {"memory": m.OwnedMemory(plan=tier.plan.to_json(), published=published)}
        self._where = where
        self._sessions: dict[Key, _ClientSession] = {}
        self._of_callers: dict[Caller, Key] = {}
        self._pins: dict[Key, _Pin] = {}
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = self._closed = False
        try:
            self._server = Server(
                unix_endpoint(self.path),
                self._answer,
                questions=m.TierQuestion,
                closed=self._hung_up,
            )
        except BaseException:
            if self._shared is not None:
                self._shared.close()
            raise

    def close(self) -> None:
        """Stop serving, release all clients' pins, and end their store operations.

        The tier stays open. A block that a client is reading or filling is freed only when that
        client has finished. Clients of shared memory have a few seconds to release their blocks and
        cannot start new calls. Blocks that they do not release stay unused. A call in a forked
        child has no effect.
        """
        if self._server.process.forked:
            return
        was, self._closing = self._closing, True
        if was:
            return
        if self._shared is not None:
            self._wait_for_clients()
        self._closed = True
        self._server.close()
        forget_path(self.path)
        if self._shared is not None:
            self._shared.close()
        elif self._tier.file is not None and self._tier.file.use.wait_for_others():
            for session in list(self._sessions):
                self._end_session(session)

    def _wait_for_clients(self) -> None:
        """Wait a few seconds for clients to unpin. A dead client counts as unpinned."""
        until = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < until:
            with self._lock:
                if not any(one.pins or one.stores for one in self._sessions.values()):
                    return
            time.sleep(_PAUSE)

    @property
    def clients(self) -> int:
        """Number of clients with an open session."""
        return len(self._sessions)

    def __enter__(self) -> TierServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sessions -------------------------------------------------------------------------

    def _answer(self, question: Any, caller: Caller) -> Message:
        if self._closing and isinstance(question, _BEGINNINGS):
            problem = "The tier's server is shutting down"
            got = f"a request of type {type(question).__name__}"
            hint = "Retry: the call connects to the process that serves the tier by then"
            raise AtlasError(Code.PEER_LOST, problem, got=got, hint=hint)
        if isinstance(question, m.Attach):
            return self._attach(question, caller)
        session = self._sessions.get(question.session)
        if session is None:
            raise _no_session()
        answer: Message = _ANSWERS[type(question)](self, question, session)
        return answer

    def _attach(self, question: m.Attach, caller: Caller) -> Message:
        if question.version != m.VERSION:
            raise AtlasError(
                Code.UNLIKE_VERSIONS,
                got=f"protocol version {question.version}, expected {m.VERSION}",
                hint="Run the same version of kvatlas in all processes that share a tier",
            )
        key = new_key()
        with self._lock:
            if caller in self._of_callers:
                raise bad_handshake("a second session on one connection")
            if not caller.open:  # the connection has ended, and `_hung_up` has already run
                raise _no_session()
            self._sessions[key] = _ClientSession()
            self._of_callers[caller] = key
        return m.Attached(version=m.VERSION, session=key, **self._where)

    def _hung_up(self, caller: Caller) -> None:
        """End the session of a client that has closed its connection or has died."""
        with self._lock:
            key = self._of_callers.pop(caller, None)
        if key is not None and not self._closed:  # otherwise this server hung up
            self._end_session(key)

    def _end_session(self, key: Key) -> None:
        with self._lock:
            session = self._sessions.pop(key, None)
            if session is None:
                return
            session.open = False
            pins, stores = session.pins, list(session.stores.values())
            session.pins, session.stores = {}, {}
        with ExitStack() as all_of_them:  # releases each, even if another one fails
            for pin, times in pins.items():
                all_of_them.callback(self._let_go, pin, times)
            for store in stores:
                all_of_them.callback(self._give_up, store.store)

    def _give_up(self, store: OpenStore) -> None:
        """Free the blocks that a client was filling, unless the tier is closed."""
        with suppress(AtlasError), self._tier.in_use():
            self._tier.desk.end(store, None, None)

    # -- finding --------------------------------------------------------------------------

    def _match(self, question: m.MatchKeys, _: _ClientSession) -> Message:
        tokens = (question.start, question.stop)
        return m.KeysMatched(tokens=self._tier.match(question.keys, tokens))

    def _pin(self, question: m.PinKeys, session: _ClientSession) -> Message:
        held, key = ExitStack(), new_key()
        hit = held.enter_context(self._tier.pin(question.keys, (question.start, question.stop)))
        with self._lock:
            room = session.open and len(session.pins) < _MAX_OPEN
            if room:
                self._pins[key] = _Pin(hit, held)
                session.pins[key] = 1
        if not room:
            held.close()
            raise _too_many("pins") if session.open else _no_session()
        return _pinned(key, hit)

    def _join(self, question: m.JoinPin, session: _ClientSession) -> Message:
        with self._lock:
            pin = self._pins.get(question.pin)
            if not session.open:
                raise _no_session()
            if pin is None:
                raise AtlasError(
                    Code.MISSING_BLOCKS,
                    "No client holds the pin any longer",
                    got=f"a request to join pin {question.pin.hex()}",
                    hint="Keep the hit of pin() open until all clients have called join(hit.name)",
                )
            pin.holders += 1
            session.pins[question.pin] = session.pins.get(question.pin, 0) + 1
            return _pinned(question.pin, pin.hit)

    def _unpin(self, question: m.Unpin, session: _ClientSession) -> Message:
        with self._lock:
            times = session.pins.pop(question.pin, 0)
            if times > 1:
                session.pins[question.pin] = times - 1
        if times:
            self._let_go(question.pin, 1)
        return Ok()

    def _let_go(self, key: Key, times: int) -> None:
        with self._lock:
            pin = self._pins[key]
            pin.holders -= times
            if pin.holders:
                return
            del self._pins[key]
        pin.held.close()

    # -- storing --------------------------------------------------------------------------

    def _learn(self, question: m.LearnPlan, _: _ClientSession) -> Message:
        check_plan_size(question.plan)
        plan = Plan.from_json(question.plan)
        with self._lock:
            self._plans[hashlib.sha256(question.plan).digest()] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return Ok()

    def _begin(self, question: m.BeginStore, session: _ClientSession) -> Message:
        plan = self._plans.get(question.plan)
        if plan is None:
            return SendPlan()
        desk, key = self._tier.desk, new_key()
        blocks = unpack_tables(question.blocks)
        rows = keys_by_group(self._tier.plan, question.keys)
        with self._tier.in_use():
            store = desk.begin(plan, question.rank, (question.start, question.stop), rows)
            try:
                fills = dict(store.claim.fills)
                about = (question.rank, blocks, (store.start, store.stop), fills)
                deliveries = store.ingest.deliveries(*about) if fills else {}
                with self._lock:
                    if not session.open:
                        raise _no_session()
                    if len(session.stores) >= _MAX_OPEN:
                        raise _too_many("stores")
                    session.stores[key] = _Store(store, deliveries)
            except BaseException:
                desk.end(store, None, None)
                raise
        numbers = {need: number for number, need in enumerate(store.needs)}
        pairs = [(numbers[need], block.block_id) for need, block in store.claim.fills]
        return m.StoreBegun(store=key, fills=np.array(pairs, "<u4").tobytes())

    def _end(self, question: m.EndStore, session: _ClientSession) -> Message:
        with self._lock:
            begun = session.stores.pop(question.store, None)
        if begun is None:
            raise bad_handshake("an EndStore message without a BeginStore in this session")
        mine = {block.place for _, block in begun.store.claim.fills}
        sums = {(one.pool, one.block_id): PartSum(one.term, one.nbytes) for one in question.sums}
        others = sums.keys() - mine
        # If a client reports checksums of other blocks, its whole store counts as failed.
        brought = begun.deliveries if question.brought and not others else None
        with self._tier.in_use():
            result = self._tier.desk.end(begun.store, brought, sums if brought else None)
        if others:
            raise bad_handshake(
                f"checksums of {len(others)} blocks that StoreBegun did not assign to this client"
            )
        return m.StoreEnded(**result._asdict())

    # -- content --------------------------------------------------------------------------

    def _drop(self, question: m.DropKeys, _: _ClientSession) -> Message:
        return m.KeysDropped(blocks=self._tier.drop(question.keys))

    def _find(self, question: m.FindNames, _: _ClientSession) -> Message:
        whole = tuple(self._tier.has(key, group) for group, key in question.names)
        return m.NamesFound(whole=whole, blocks=len(self._tier), evicted=self._tier.evicted)


_ANSWERS: dict[type, Any] = {
    m.MatchKeys: TierServer._match,
    m.PinKeys: TierServer._pin,
    m.JoinPin: TierServer._join,
    m.Unpin: TierServer._unpin,
    m.LearnPlan: TierServer._learn,
    m.BeginStore: TierServer._begin,
    m.EndStore: TierServer._end,
    m.DropKeys: TierServer._drop,
    m.FindNames: TierServer._find,
}


def _told(tier: Tier) -> m.OwnedFile:
    assert tier.file is not None  # noqa: S101
    return m.OwnedFile(path=str(tier.file.path), identity=tier.file.identity)


def _pinned(key: Key, hit: Hit) -> m.KeysPinned:
    return m.KeysPinned(pin=key, start=hit.start, tokens=hit.tokens, tables=pack_tables(hit.tables))


def _no_session() -> AtlasError:
    problem, hint = "The client's session with the tier's server has ended", "Repeat the call"
    return AtlasError(Code.UNKNOWN_SESSION, problem, got="a request in this session", hint=hint)


def _too_many(what: str) -> AtlasError:
    problem = f"One client may have at most {_MAX_OPEN:,} {what} at once"
    hint = f"End some {what} first"
    return AtlasError(Code.TOO_MANY, problem, got=f"{_MAX_OPEN + 1:,} {what}", hint=hint)
