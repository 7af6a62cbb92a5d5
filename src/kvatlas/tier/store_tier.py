"""`StoreTier`: one tier for a fleet, in a store of objects that all of its engines reach.

It has the calls of `Tier`, and a plan of its own as `Tier` has, but no blocks: the plan says what
a row looks like, and rows are in the store, cut into objects that every topology writes and
reads whole. Nothing is kept here but rows on their way, in memory of bounded size, and nothing
that a store says is believed: a row is found when all of its objects are there, and used when
each of them is what it should be. A store that is slow, full or gone is a miss.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import duration
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing.block_tables import checked_rank
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.converting import PLANS, Converting, kept_as_written
from kvatlas.tier.hit import check_all_there
from kvatlas.tier.index import StoreResult
from kvatlas.tier.ingest import Ingest
from kvatlas.tier.namespaces import RowName
from kvatlas.tier.request_blocks import Keys, NeededBlock, keys_by_group
from kvatlas.tier.row_storing import Puts, RowStoring
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.stored_rows import FoundRows, OtherRows, StoredRows, check_alike
from kvatlas.tier.stores import ObjectStore

_UNAVAILABLE = (Code.DEADLINE, Code.WIRE_FAILED, Code.UNREADABLE)
"""Errors of a store that cannot be asked."""
_STORE_FAILED = {
    Code.DEADLINE: "late",
    Code.MISSING_BLOCKS: "gone",
    Code.CHECKSUM: "damaged",
    Code.WIRE_FAILED: "failed",
    Code.UNREADABLE: "failed",
}
"""Errors that are the store's: why something could not be had of it."""


class StoreTier:
    """A second home for blocks, in a store, which it takes over and closes.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> from kvatlas.models import CacheIdentity
    >>> from kvatlas.tier import HostStore
    >>> prefill = plan("Qwen3-8B", memory="64MiB", tp=2, layout="LBNHC", max_len=64)
    >>> decode = plan("Qwen3-8B", memory="64MiB", layout="BHLNC", block_size=32, max_len=64)
    >>> rows = plan("Qwen3-8B", memory="32MiB", layout="BHLNC", block_size=16, max_len=64)
    >>> store, ours = HostStore(), CacheIdentity(weights="a digest of the checkpoint")
    >>> tier = StoreTier(store, rows, ours, staging=32 << 20)
    >>> keys = [b"first 16 tokens", b"first 32 tokens"]
    >>> for rank in (0, 1):
    ...     pools = {0: np.full(prefill.pools[0].nbytes, 1 + rank, np.uint8)}
    ...     tier.store(pools, prefill, rank=rank, blocks=[7, 2], tokens=32, keys=keys)
    StoreResult(whole=0, waiting=2, no_room=0)
    StoreResult(whole=2, waiting=0, no_room=0)
    >>> mine = {0: np.zeros(decode.pools[0].nbytes, np.uint8)}
    >>> tier.fetch(mine, decode, blocks=[4], tokens=32, keys=keys)
    >>> keys_of_layer_0 = decode.view("model.layers.0.self_attn.attn", "k")
    >>> mine[0][keys_of_layer_0(B=4, H=[0, 3, 4, 7], N=3, C=0)]
    array([1, 1, 2, 2], dtype=uint8)
    >>> others = StoreTier(store, rows, CacheIdentity(weights="another"), staging=32 << 20)
    >>> others.match(keys, tokens=32), dict(others.misses)
    (0, {'other_weights': 1})
    >>> tier.close(), others.close()
    (None, None)
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: Plan,
        identity: CacheIdentity,
        *,
        shards: int | None = None,
        stages: int = 1,
        staging: int = 256 << 20,
        deadline: float = 5.0,
        other: OtherRows | None = None,
    ) -> None:
        """`deadline` is seconds for each call, a fetch of all rows of a request among them.

        With `other`, rows of another cache dtype are found as well, where they are more
        than there are of one's own, and converted as they are fetched. Nothing is stored as them.
        """
        self.plan, self.deadline = plan, duration(deadline)
        self.misses: Counter[str] = Counter()
        """How often less was found than asked for, or could be fetched, by reason."""
        if other is not None:
            check_alike(plan, other)
        cut = (shards, stages)
        how = None if other is None else kept_as_written(other.convert)
        own = StoredRows(store, plan, identity, cut, staging, how)
        self.namespace, self.metrics = own.namespace, own.storage.metrics
        self._own, self._traffic, self._storage = own, own.traffic, own.storage
        self._rows = [own]
        """Rows that are looked for: one's own first."""
        if other is not None:
            with ExitStack() as on_failure:
                on_failure.callback(own.close, Deadline(deadline))
                theirs = StoredRows(store, other.plan, identity, cut, staging, other.convert)
                on_failure.pop_all()
            theirs.storage.metrics = self.metrics
            self._rows.append(theirs)
        self._ingest_from = lru_cache(PLANS)(lambda src: Ingest(src, plan))
        self._compiling = threading.Lock()
        self._puts: set[Future[Any]] = set()
        self._lock = threading.Lock()

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
        wait: bool = True,
    ) -> StoreResult:
        """Store one rank's part of a request's tokens; every rank of its plan calls this.

        Arguments are those of `Tier.store`. Without `wait` it returns when the pools have been
        read, and what is on its way to the store counts as waiting, and what this rank had
        nothing to bring to as whole; `flush` waits for what is on its way.
        What the store has no room for, fails at, or is too slow for, counts as `no_room`.
        """
        with self._storage.using():
            with self._compiling:
                ingest = self._ingest_from(plan)
            rank = checked_rank(plan, rank, "source")
            start, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
            start = ingest.spans.whole_blocks(start)
            needs = ingest.spans.needs(start, stop, keys_by_group(self.plan, keys))
            rows = {n: RowName(n.group, n.key, n.cover) for n in needs if n.key is not None}
            deadline = Deadline(self.deadline)
            refused: set[RowName] = set()
            try:
                absent = self._not_brought(rows, ingest, rank, deadline)
                if absent:
                    storing = RowStoring(self._traffic, ingest, rank, absent)
                    bound = storing.bind(blocks, (start, stop), self._storage, pools or {})
                    marking = self._traffic.mark()
                    self._keep([marking] if marking else [])
                    puts, no_room = storing.start(bound, deadline, paced=wait)
                    self._keep([*puts])
                    refused = {*no_room, *(self._finish(puts, deadline) if wait else ())}
                    if wait and marking is not None:
                        self._traffic.calls.result(marking, deadline)
                if wait:
                    absent = self._absent(rows, deadline)
            except AtlasError as problem:
                if problem.code not in _UNAVAILABLE:
                    raise
                self.metrics.add(store_failed=1)
                return StoreResult(0, 0, len(rows))
            lost = sum(row in refused for row in absent.values())
            return StoreResult(len(rows) - len(absent), len(absent) - lost, lost)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait for what is on its way to the store; whether all of it has ended."""
        with self._lock:
            under_way = list(self._puts)
        patience = self.deadline if seconds is None else duration(seconds)
        return not wait_for(under_way, patience).not_done

    def idle(self) -> bool:
        """Whether nothing is on its way between here and the store."""
        return all(rows.staging.idle() for rows in self._rows)

    def _not_brought(
        self, rows: Mapping[NeededBlock, RowName], ingest: Ingest, rank: int, deadline: Deadline
    ) -> dict[NeededBlock, RowName]:
        """The rows to which this rank has something to bring."""
        if rank not in ingest.sources:  # others bring what this one also holds
            return {}
        there = self._traffic.brought(rows, (ingest.number, rank), deadline)
        pairs = zip(rows.items(), there, strict=True)
        return {need: row for (need, row), done in pairs if not done}

    def _absent(
        self, rows: Mapping[NeededBlock, RowName], deadline: Deadline
    ) -> dict[NeededBlock, RowName]:
        """The rows of which some object is not there."""
        present = self._traffic.present(list(rows.values()), deadline)
        pairs = zip(rows.items(), present, strict=True)
        return {need: row for (need, row), (whole, _) in pairs if not whole}

    def _finish(self, puts: Puts, deadline: Deadline) -> Iterator[RowName]:
        """Wait for puts; rows that found no room, that the store failed at or is late with."""
        for started, rows in puts.items():
            try:
                refused = self._traffic.calls.result(started, deadline)
            except AtlasError:
                self.metrics.add(store_failed=1)
                yield from rows
            else:
                names = self.namespace.objects
                yield from (row for row in rows if not set(refused).isdisjoint(names(row)))

    def _keep(self, puts: Sequence[Future[Any]]) -> None:
        """Know of puts until they have ended."""
        with self._lock:
            self._puts.update(puts)
        for started in puts:
            started.add_done_callback(self._forget)

    def _forget(self, ended: Future[Any]) -> None:
        with self._lock:
            self._puts.discard(ended)

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any, *, convert: bool = True) -> int:
        """How many tokens could be fetched: all of them, or as many whole blocks as there are.

        A store that fails or is late has none but those that it had answered for. Without
        `convert`, rows of another cache dtype do not count.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            return self._found(start, stop, keys, self._rows if convert else [self._own])[1].tokens

    @property
    def converts(self) -> bool:
        """Whether rows of another cache dtype are found as well."""
        return len(self._rows) > 1

    def kept_ends(
        self,
        group: int,
        ends: Sequence[tuple[int, bytes]],
        *,
        whole: bool = False,
        other: bool = False,
    ) -> list[bool]:
        """Whether a group has the row that requests of so many tokens end in, by its key.

        Unless asked for `whole` rows, one may lack objects that other ranks have yet to store.
        With `other` these are rows of the other cache dtype, where the tier `converts`: a
        request is served from rows of one dtype. Refused, and counted, where the store fails.
        """
        with self._storage.using():
            deadline = Deadline(self.deadline)
            rows = self._rows[-1] if other else self._own
            try:
                return rows.kept(group, ends, deadline, whole=whole)
            except AtlasError as problem:
                self._missed(problem)
                raise

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[StoreHit]:
        """What there is of some tokens, for any number of ranks to fetch.

        Stores keep nothing in place: what was there may be gone when it is fetched.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            rows, found = self._found(start, stop, keys, self._rows)
            hit = rows.hit(start, found, self.deadline, self._missed)
        yield hit

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
        convert: Converting | None = None,
    ) -> None:
        """Fetch tokens into a rank's blocks: all of them, or a refusal.

        With `convert`, what the rank keeps in another dtype is converted. Refused after it had
        begun, it leaves blocks that were filled in part.
        """
        _, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
        with self.pin(keys, tokens) as hit:
            check_all_there(hit.tokens, stop)
            hit.fetch(pools, plan, rank=rank, blocks=blocks, convert=convert)

    def drop(self, keys: Keys) -> int:
        """Forget keys, in every group; how many objects that were."""
        with self._storage.using():
            by_group = keys_by_group(self.plan, keys)
            names = [(g, key) for g, row in by_group.items() for key in row if key is not None]
            prefixes = [self.namespace.all_of(group, key) for group, key in names]
            return self._remove_all(prefixes)

    def drop_tenant(self) -> int:
        """Remove every object of this tenant, whatever the model; how many that were."""
        with self._storage.using():
            removed = self._remove_all([self.namespace.tenant_prefix])
            self._traffic.forget_marks()
            return removed

    def close(self) -> None:
        """Wait for calls that are under way, and let go of the store once its calls have ended.

        A store that hangs is left to itself after the deadline.
        """
        self.flush()
        deadline = Deadline(self.deadline)
        ended = [rows.close(deadline) for rows in self._rows]
        if all(ended):
            self._traffic.store.close()

    def __enter__(self) -> StoreTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------

    def _remove_all(self, prefixes: list[str]) -> int:
        """Remove all objects whose names begin so; how many that were."""
        traffic = self._traffic
        started = traffic.calls.start(lambda: sum(map(traffic.store.remove_all, prefixes)))
        return traffic.calls.result(started, Deadline(self.deadline))

    def _found(
        self, start: int, stop: int, keys: Keys, among: Sequence[StoredRows]
    ) -> tuple[StoredRows, FoundRows]:
        """The most tokens that there are, and whose rows; why not more is counted."""
        deadline, by_group = Deadline(self.deadline), keys_by_group(self.plan, keys)
        best, most = self._own, FoundRows(0, {}, "")
        try:
            for rows in among:
                found = rows.find(start, stop, by_group, deadline)
                if rows is self._own or found.tokens > most.tokens:
                    best, most = rows, found
                if most.tokens >= stop:
                    return best, most
            self._count(self._why_absent(deadline) if most.missing == "absent" else most.missing)
        except AtlasError as problem:
            if problem.code not in _STORE_FAILED:
                raise
            self._missed(problem)
        return best, most

    def _why_absent(self, deadline: Deadline) -> str:
        """From what on nobody has stored anything like one's own, nor what could be converted."""
        reasons = [rows.traffic.why_absent(deadline) for rows in self._rows]
        return "absent" if "absent" in reasons else reasons[0]

    def _missed(self, problem: AtlasError) -> None:
        """Count why something could not be had of the store."""
        if problem.code in _STORE_FAILED:
            self._count(_STORE_FAILED[problem.code])

    def _count(self, reason: str) -> None:
        with self._lock:
            self.misses[reason] += 1
