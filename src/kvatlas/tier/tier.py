"""`Tier`: a pool of rows in host memory or in a file, for caches of any topology.

A tier has a plan of its own: one rank, a block-outermost order, one row for each block.
Ranks of any plan of the same model store into it, ranks of any other load from it, both
along routes. Keys are opaque bytes; a key stands for one block of tokens of one group of
the tier's plan, or for a recurrent state after some tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Route, checked_rank, route, token_range
from kvatlas.tier.format import TierFile
from kvatlas.tier.index import Books, Claim, Row, Stored
from kvatlas.tier.ingest import Intake, check_tier_plan
from kvatlas.tier.keys import Keys, Spans, keys_by_group
from kvatlas.tier.lookup import Carry, Held, longest
from kvatlas.wire import Bytes, Memory, Metrics, copy_pools, rank_pools, stream_bytes

_PLANS = 16
_Kept = TypeVar("_Kept")


class Tier:
    """A second home for blocks.

    `Tier(plan)` keeps rows in memory of its own, or in `memory`, by pool; `Tier.open` keeps
    them in a file. Any number of threads may use one.

    >>> from kvatlas.planning import plan
    >>> prefill = plan("Qwen3-8B", memory="64MiB", tp=2, layout="LBNHC", max_len=64)
    >>> decode = plan("Qwen3-8B", memory="64MiB", layout="BHLNC", block_size=32, max_len=64)
    >>> pools = [{0: np.full(prefill.pools[0].nbytes, rank, np.uint8)} for rank in (1, 2)]
    >>> tier = Tier(plan("Qwen3-8B", memory="32MiB", layout="BLHNC", max_len=64))
    >>> keys = [b"first 16 tokens", b"first 32 tokens", b"first 48 tokens"]
    >>> tier.store(pools[0], prefill, rank=0, blocks=[7, 2, 9], tokens=48, keys=keys)
    Stored(whole=0, waiting=3, no_room=0)
    >>> tier.store(pools[1], prefill, rank=1, blocks=[7, 2, 9], tokens=48, keys=keys)
    Stored(whole=3, waiting=0, no_room=0)
    >>> tier.match([*keys, b"first 64 tokens"], tokens=64)
    48
    >>> mine = {0: np.zeros(decode.pools[0].nbytes, np.uint8)}
    >>> tier.load(mine, decode, blocks=[4, 1], tokens=48, keys=keys)
    >>> keys_of_layer_0 = decode.view("model.layers.0.self_attn.attn", "k")
    >>> mine[0][keys_of_layer_0(B=4, H=[0, 3, 4, 7], N=3, C=0)]
    array([1, 1, 2, 2], dtype=uint8)
    """

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[int, Any] | None = None,
        *,
        _file: TierFile | None = None,
        _verify: str = "once",
    ) -> None:
        check_tier_plan(plan)
        self.plan, self._file, self._verify = plan, _file, _verify
        self.metrics = Metrics()
        if _file is not None:
            self.pools: dict[int, Bytes] = dict(_file.pools)
        elif memory is not None:
            self.pools = rank_pools(plan, 0, memory)
        else:
            self.pools = {p.index: np.zeros(p.nbytes, dtype=np.uint8) for p in plan.pools}
        self._books = Books(plan, _file.clear if _file else lambda _: None)
        if _file is not None:
            for older in self._books.restore(list(_file.found())):
                _file.clear(older)
        self._spans = Spans(plan, plan)
        self._intakes: OrderedDict[Plan, Intake] = OrderedDict()
        self._routes: OrderedDict[Plan, Route] = OrderedDict()
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy, self._open = 0, True

    @classmethod
    def open(
        cls,
        path: str | Path,
        plan: Plan | None = None,
        *,
        durable: bool = True,
        verify: Literal["once", "always"] = "once",
    ) -> Tier:
        """A tier in a file: a new one of this plan, or the one that is there, with its plan.

        `durable` waits for the disk, twice for each call that makes keys whole, so that
        they outlive a power cut as well; without it they outlive the process. Either way
        what is damaged is absent: a row's bytes are verified when they are first used
        after opening, or `always`.
        """
        if plan is not None:
            check_tier_plan(plan)
        file = TierFile(Path(path), plan, durable=durable)
        try:
            return cls(file.plan, _file=file, _verify=verify)
        except BaseException:
            file.close()
            raise

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
    ) -> Stored:
        """Store one rank's part of a request's tokens; every rank of its plan calls this.

        `blocks` are the request's own, as routes take them. `keys` has a key, or None, for
        each block of the tier in the order of tokens, for all its groups or by group; that
        of a recurrent group stands for the state after the last token. A key is there
        when all ranks' bytes are. The last block may have begun only: its key then stands
        for so many tokens. A start within a block is taken from the block's first token.
        What windows have left behind is not stored. `carry` moves bytes that this process
        cannot reach, from the rank's pools into `tier.memory`.
        """
        with self._using():
            intake = self._remembered(self._intakes, plan, lambda: Intake(plan, self.plan))
            rank = checked_rank(plan, rank, "source")
            start, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
            start = intake.spans.whole_blocks(start)
            needs = intake.spans.needs(start, stop, keys_by_group(self.plan, keys))
            if rank not in intake.sources:  # others bring what this one also holds
                asked = [need for need in needs if need.key is not None]
                whole = sum(self._books.find(need) is not None for need in asked)
                return Stored(whole, len(asked) - whole, 0)
            claim = self._books.claim(needs, intake, rank)
            try:
                if claim.rows:
                    self._fill(claim, intake, (start, stop), pools, plan, blocks, carry)
            finally:
                self._books.release(claim)
            return Stored(claim.whole, claim.waiting, claim.no_room)

    def _fill(
        self,
        claim: Claim,
        intake: Intake,
        tokens: tuple[int, int],
        pools: Mapping[int, Any] | None,
        plan: Plan,
        blocks: Any,
        carry: Carry | None,
    ) -> None:
        needs = [need for need, _ in claim.rows.values()]
        rows = {place: row.number for place, (_, row) in claim.rows.items()}
        brought = None
        ready: list[Row] = []
        try:
            with self.metrics.phase("bind"):
                copies, brings = intake.copies(claim.rank, blocks, tokens, needs, rows)
            with self.metrics.phase("store"):
                if carry is None:
                    copy_pools(copies, rank_pools(plan, claim.rank, pools or {}), self.pools)
                else:
                    carry(copies)
            self.metrics.add(stored_bytes=stream_bytes(copies), descriptors=sum(map(len, copies)))
            brought = brings
        finally:
            ready = self._books.arrived(claim, intake, brought)
            self._settle(ready)
        claim.whole += len(ready)

    def _settle(self, rows: list[Row]) -> None:
        """Commit rows that have all of their bytes; only then can they be found."""
        done = False
        try:
            self._books.number(rows)
            if self._file is not None and rows:
                with self.metrics.phase("commit"):
                    self._file.commit(rows)
            done = True
        finally:
            self._books.settle(rows, whole=done)

    # -- loading ------------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any) -> int:
        """How many tokens could be loaded: all of them, or as many whole blocks as there are.

        It counts from token 0 also where `tokens` starts later. Nothing is held fast or
        verified; `hold` does both.
        """
        with self._using():
            start, stop = token_range(tokens, self.plan.max_len)
            return longest(self._books, self._spans, start, stop, keys_by_group(self.plan, keys))

    @contextmanager
    def hold(self, keys: Keys, tokens: Any) -> Iterator[Held]:
        """Hold fast what there is of some tokens, verified, for any number of ranks to load."""
        with self._using():
            start, stop = token_range(tokens, self.plan.max_len)
            held = self._held(start, stop, keys_by_group(self.plan, keys))
        try:
            yield held
        finally:
            held.release()

    def load(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
        carry: Carry | None = None,
    ) -> None:
        """Load tokens into a rank's blocks: all of them, or a refusal and nothing."""
        _, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
        with self.hold(keys, tokens) as held:
            if held.tokens < stop:
                raise AtlasError(
                    Code.MISSING_BLOCKS,
                    "Every token that is loaded is in the tier",
                    got=f"{held.tokens} of {stop} tokens",
                    hint="Ask Tier.match first, or hold what there is",
                )
            held.load(pools, plan, rank=rank, blocks=blocks, carry=carry)

    def drop(self, keys: Keys) -> int:
        """Forget keys, in every group; how many rows that were."""
        with self._using():
            found = keys_by_group(self.plan, keys)
            names = [(g, key) for g, row in found.items() for key in row if key is not None]
            return self._books.drop_keys(names)

    # -- what there is ------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows that are whole."""
        return len(self._books)

    def __contains__(self, key: object) -> bool:
        """Whether a key is whole in every group that it could stand for."""
        groups = range(len(self.plan.groups))
        return isinstance(key, bytes) and all(self._books.has(group, key) for group in groups)

    def has(self, key: bytes, group: int = 0) -> bool:
        """Whether a key of a group is whole."""
        return self._books.has(group, key)

    def names(self) -> list[tuple[int, bytes]]:
        """Every (group, key) that is whole, the one used longest ago first."""
        return self._books.names()

    @property
    def evicted(self) -> int:
        """Whole rows that have made room for others."""
        return self._books.evicted

    @property
    def memory(self) -> dict[int, Memory]:
        """Where the pools are, for transports to register."""
        return {i: Memory(pool.ctypes.data, pool.nbytes) for i, pool in self.pools.items()}

    def close(self) -> None:
        """Wait for calls that are under way, then let go; what is whole stays in the file."""
        with self._idle:
            was, self._open = self._open, False
            self._idle.wait_for(lambda: not self._busy)
        if was:
            self.pools = {}
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Tier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if not self._open:
                raise AtlasError(
                    Code.UNREADABLE,
                    "A tier is used while it is open",
                    got="one that was closed",
                    hint="Open it again",
                )
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _remembered(
        self, book: OrderedDict[Plan, _Kept], plan: Plan, make: Callable[[], _Kept]
    ) -> _Kept:
        with self._making:
            found = book.get(plan)
            if found is None:
                found = book[plan] = make()
            book.move_to_end(plan)
            while len(book) > _PLANS:
                book.popitem(last=False)
            return found

    def _route_to(self, plan: Plan) -> Route:
        return self._remembered(self._routes, plan, lambda: route(self.plan, plan))

    def _held(self, start: int, stop: int, keys: Mapping[int, Sequence[bytes | None]]) -> Held:
        while True:
            end = longest(self._books, self._spans, start, stop, keys)
            needs = self._spans.needs(start, end, keys)
            rows = self._books.pin(needs)
            if rows is None:
                continue  # gone since it was found
            try:
                bad = self._damaged(rows)
            except BaseException:
                self._books.unpin(rows)
                raise
            if not bad:
                return Held(self, start, end, needs, rows)
            self._books.unpin(rows)
            for row in bad:
                self.metrics.add(damaged=1)
                self._books.drop(row)

    def _damaged(self, rows: list[Row]) -> list[Row]:
        """The rows whose bytes are not those that were stored."""
        if self._file is None:
            return []
        doubted = [row for row in rows if not row.verified or self._verify == "always"]
        with self.metrics.phase("verify"):
            found = zip(doubted, self._file.sums(doubted), strict=True)
        bad = [row for row, checksum in found if checksum != row.checksum]
        for row in doubted:
            row.verified = row not in bad
        return bad
