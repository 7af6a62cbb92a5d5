"""`TierClient`: a tier that another process serves, with the same methods as `Tier`.

An unreachable server counts as a miss: nothing matches, nothing is pinned, and storing raises
`peer_lost`, all within `timeout` seconds. Later calls connect to the next process that serves the
tier.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import duration
from kvatlas.planning import Plan
from kvatlas.routing.block_tables import checked_rank
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.blocks import PartSums, StoreResult
from kvatlas.tier.converting import PLANS, TierRoutes
from kvatlas.tier.hit import Hit
from kvatlas.tier.request_blocks import Keys, NeededBlock, keys_by_group
from kvatlas.tier.served import messages as m
from kvatlas.tier.served.attachment import Attachment, no_server
from kvatlas.tier.storage import Carry, TierStorage, closed_error
from kvatlas.tier.storing import Ingests
from kvatlas.wire import Metrics
from kvatlas.wire.protocol import SendPlan, bad_handshake, by_group, pack_tables, unpack_tables

_PAUSE = 0.25
"""Seconds to wait before looking again for a server that was not found."""
_LOOK_AGAIN = 0.02
_GONE = (
    Code.PEER_LOST, Code.DEADLINE, Code.UNKNOWN_SESSION, Code.BUSY, Code.UNREADABLE,
    Code.TOO_MANY_FILES,
)  # fmt: skip
"""Error codes that mean that the server cannot be reached or cannot reply now."""

Kind = TypeVar("Kind")


class TierClient(AnyTier):
    """A tier that another process of the same host and user serves at a path.

    A client is thread-safe. When it is closed or its process ends, its pins are released, and its
    unfinished store operations end. If the server is replaced, the new server's tier must have the
    same plan.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        timeout: float = 10.0,
        connect_timeout: float = 0.0,
        before: Callable[[], None] = lambda: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to the server at a path. No call takes longer than `timeout` seconds.

        If there is no server, the client retries for `connect_timeout` seconds and calls `before`
        before each attempt. `closed` is called when the client is closed.
        """
        self.path = Path(path).absolute()
        self.timeout, self.connect_timeout = duration(timeout), duration(connect_timeout)
        self._before, self._on_close = before, closed
        self._lock = threading.Lock()
        self.closed, self._next_attempt = False, 0.0
        self._attachment: Attachment | None = None
        self.metrics = Metrics()
        self._nothing = TierStorage({}, None, verify_always=False)
        self._known_plan: Plan | None = None
        self.plan = plan = self._attach().plan
        self._known_plan = plan.without_notes()
        self._ingests = Ingests(plan)
        self._routes = TierRoutes(plan)
        self._plans: dict[Plan, tuple[bytes, bytes]] = {}

    # -- storing ------------------------------------------------------------------------

    def store(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
        carry: Carry | None = None,
    ) -> StoreResult:
        """Store one rank's part of a request's tokens, like `Tier.store`."""
        rank = checked_rank(plan, rank, "source")
        rows = keys_by_group(self.plan, keys)
        start, stop, needs = self._ingests.needs(plan, tokens, rows)
        ingest, at = self._ingests.of(plan), self.find_server()
        begun = self._begin(at, plan, rank=rank, blocks=blocks, tokens=(start, stop), rows=rows)
        storage, sums, brought = at.storage, PartSums(), False
        try:
            ids = self._filled(needs, begun.fills)
            if ids:
                with storage.using():
                    about = (rank, blocks, (start, stop), ids)
                    sums, _ = storage.store_part(ingest, about, plan, pools, carry)
            brought = True
        finally:
            parts = tuple(m.SummedPart(*place, *part) for place, part in sums.items())
            with nullcontext() if brought else suppress(AtlasError):
                ended = at.ask(m.EndStore, store=begun.store, brought=brought, sums=parts)
        result = _expected(ended, m.StoreEnded)
        return StoreResult(result.whole, result.waiting, result.no_room)

    def _begin(
        self, at: Attachment, plan: Plan, *, rank: int, blocks: Any, tokens: Any, rows: Any
    ) -> m.StoreBegun:
        text, digest = self._told(plan)
        about = {"plan": digest, "rank": rank, "keys": rows, "start": tokens[0], "stop": tokens[1]}
        tables = pack_tables(by_group(blocks))
        answer = at.ask(m.BeginStore, blocks=tables, **about)
        if isinstance(answer, SendPlan):
            at.ask(m.LearnPlan, plan=text)
            answer = at.ask(m.BeginStore, blocks=tables, **about)
        return _expected(answer, m.StoreBegun)

    def _told(self, plan: Plan) -> tuple[bytes, bytes]:
        """Return the plan as encoded bytes, and their hash."""
        if plan not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans = {}
            text = plan.to_json()
            self._plans[plan] = text, hashlib.sha256(text).digest()
        return self._plans[plan]

    def _filled(self, needs: list[NeededBlock], fills: bytes) -> dict[NeededBlock, int]:
        """Decode the blocks that the server assigned, and check that they are valid and needed."""
        if len(fills) % 8:
            raise bad_handshake(f"a block list of {len(fills)} bytes, expected a multiple of 8")
        ids = {}
        for number, block_id in np.frombuffer(fills, "<u4").reshape(-1, 2).tolist():
            if number >= len(needs):
                raise bad_handshake(f"block index {number}, expected less than {len(needs)}")
            pool = self.plan.pool(0, needs[number].group)
            if block_id >= pool.blocks:
                raise bad_handshake(f"block id {block_id}, expected less than {pool.blocks}")
            ids[needs[number]] = block_id
        return ids

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any) -> int:
        """Return how many tokens can be fetched, or 0 if no process serves the tier."""
        about = self._tokens(keys, tokens)
        with self._gone_is_a_miss("match"):
            found = _expected(self.find_server().ask(m.MatchKeys, **about), m.KeysMatched)
            return found.tokens
        return 0

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[Hit]:
        """Pin and verify the stored blocks of `tokens`.

        If no process serves the tier, the hit has no tokens.
        """
        about, hit = self._tokens(keys, tokens), None
        with self._gone_is_a_miss("pin"):
            at = self.find_server()
            hit = self._hit(at, at.ask(m.PinKeys, **about))
        if hit is None:
            hit = Hit(about["start"], 0, self._nothing, self._routes, {}, lambda: None)
        try:
            yield hit
        finally:
            hit.release()

    @contextmanager
    def join(self, name: bytes) -> Iterator[Hit]:
        """Pin the blocks that another client has pinned. `name` is the `name` of its `Hit`.

        Raises an error if no client holds the pin any longer.
        """
        at = self.find_server()
        hit = self._hit(at, at.ask(m.JoinPin, pin=name))
        try:
            yield hit
        finally:
            hit.release()

    def _hit(self, at: Attachment, answer: Any) -> Hit:
        pinned = _expected(answer, m.KeysPinned)
        tables = unpack_tables(pinned.tables)

        def let_go() -> None:
            with suppress(AtlasError):  # if the server or the session has ended, so has the pin
                at.ask(m.Unpin, pin=pinned.pin)

        about = (at.storage, self._routes, tables, let_go)
        return Hit(pinned.start, pinned.tokens, *about, name=pinned.pin)

    # -- content ------------------------------------------------------------------------

    def drop(self, keys: Keys) -> int:
        """Remove keys from every group and return how many blocks were removed."""
        rows = keys_by_group(self.plan, keys)
        return int(_expected(self.find_server().ask(m.DropKeys, keys=rows), m.KeysDropped).blocks)

    def has(self, key: bytes, group: int = 0) -> bool:
        """Return whether a group has a complete block with this key."""
        return all(self._find((group, key)).whole)

    def kept_ends(
        self, group: int, ends: Sequence[tuple[int, bytes]], *, whole: bool = False
    ) -> list[bool]:
        """Return, for each prefix in `ends`, whether a group stores the block that ends with it.

        A prefix of a request is given as (length, key): its number of tokens, and the key of its
        last block. Raises an error if no process serves the tier.
        """
        del whole  # lookups find only complete blocks
        found: list[bool] = []
        for first in range(0, len(ends), m.MOST_NAMES):
            names = tuple((group, key) for _, key in ends[first : first + m.MOST_NAMES])
            answer = self.find_server().ask(m.FindNames, names=names)
            some = _expected(answer, m.NamesFound).whole
            if len(some) != len(names):
                raise bad_handshake(f"NamesFound with {len(some)} results for {len(names)} names")
            found += some
        return found

    def __contains__(self, key: object) -> bool:
        """Return whether every group has a complete block with this key."""
        if not isinstance(key, bytes):
            return False
        return all(self._find(*((group, key) for group in range(len(self.plan.groups)))).whole)

    def __len__(self) -> int:
        """Return the number of complete blocks."""
        return self._find().blocks

    @property
    def evicted(self) -> int:
        """Number of complete blocks that were evicted since the server opened the tier."""
        return self._find().evicted

    def _find(self, *names: tuple[int, bytes]) -> m.NamesFound:
        with self._gone_is_a_miss("names"):
            return _expected(self.find_server().ask(m.FindNames, names=names), m.NamesFound)
        return m.NamesFound(whole=(False,), blocks=0, evicted=0)

    def close(self) -> None:
        """Wait for copies in flight. Then release all pins and end all store operations."""
        with self._lock:
            was, self.closed = self.closed, True
            at, self._attachment = self._attachment, None
        if not was:
            if at is not None:
                at.close()
            self._on_close()

    # -- the server ---------------------------------------------------------------------

    def find_server(self) -> Attachment:
        """Return the attachment to the current server, or attach to the server that replaced it."""
        at = self._attachment
        if at is not None and at.usable:
            return at
        return self._attach()

    def _attach(self) -> Attachment:
        if not self._lock.acquire(timeout=self.timeout):
            problem = "Connecting to the tier's server took too long"
            got = f"more than {self.timeout:g} seconds for socket {self.path}"
            hint = "Check whether the server process hangs"
            raise AtlasError(Code.DEADLINE, problem, got=got, hint=hint)
        try:
            old, made = self._attachment, self._attached_anew()
        finally:
            self._lock.release()
        if old is not None and old is not made:
            # Closing waits for copies in flight, and this call must not wait for them.
            threading.Thread(target=old.close, name="kvatlas-tier-leave", daemon=True).start()
        return made

    def _attached_anew(self) -> Attachment:
        if self.closed:
            raise closed_error()
        if self._attachment is not None and self._attachment.usable:
            return self._attachment
        if time.monotonic() < self._next_attempt:
            raise no_server(self.path, "the last attempt to connect failed")
        try:
            self._attachment = self._found()
        except AtlasError:
            self._next_attempt = time.monotonic() + _PAUSE
            raise
        return self._attachment

    def _found(self) -> Attachment:
        """Attach to a server. If there is none, try again for `connect_timeout` seconds."""
        until = time.monotonic() + self.connect_timeout
        while True:
            try:
                self._before()
                made = Attachment(self.path, self.timeout, self.metrics)
                break
            except AtlasError as refusal:
                if refusal.code is not Code.PEER_LOST or time.monotonic() > until:
                    raise
            time.sleep(_LOOK_AGAIN)
        if self._known_plan not in (None, made.plan.without_notes()):
            made.close()
            problem = "The tier's new server uses another plan"
            hint = "Open the tier again to use the new plan"
            raise AtlasError(Code.PEER_LOST, problem, got=f"{self.path}: {made.plan}", hint=hint)
        return made

    def _tokens(self, keys: Keys, tokens: Any) -> dict[str, Any]:
        start, stop = token_range(tokens, self.plan.max_len)
        return {"keys": keys_by_group(self.plan, keys), "start": start, "stop": stop}

    @contextmanager
    def _gone_is_a_miss(self, question: str) -> Iterator[None]:
        """Suppress the errors of an unreachable tier, and count them as misses.

        `question` is the name of the call that the miss is counted for.
        """
        try:
            yield
        except AtlasError as refusal:
            if refusal.code not in _GONE or self.closed:
                raise
            self.metrics.ended(question, str(refusal.code))


def _expected(answer: Any, kind: type[Kind]) -> Kind:
    """Return the reply if it has the expected type. Raises an error otherwise."""
    if not isinstance(answer, kind):
        raise bad_handshake(f"a {type(answer).__name__} message, expected {kind.__name__}")
    return answer
