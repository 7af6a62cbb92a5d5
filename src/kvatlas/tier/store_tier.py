"""`StoreTier`: a tier for a fleet, in an object store that all of its engines can reach.

It has the same methods as `Tier` and also a plan, but no blocks. The plan describes canonical rows,
which depend on the model and not on the plan that the tier was opened with. Rows are stored as
objects, cut so that every topology writes and reads whole objects. This process holds only rows in
flight, in memory of bounded size. The store is not trusted: a row is found when all of its objects
exist, and each object is verified before use. A slow, full or unreachable store counts as a miss.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import duration
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing.block_tables import checked_rank
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.blocks import StoreResult
from kvatlas.tier.canonical_rows import canonical_rows
from kvatlas.tier.converting import kept_as_written
from kvatlas.tier.ingest import Ingest
from kvatlas.tier.namespaces import RowName
from kvatlas.tier.request_blocks import Keys, NeededBlock, keys_by_group
from kvatlas.tier.row_lookup import FoundRows
from kvatlas.tier.row_storing import Puts, RowStoring
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.store_inspection import CopiedPrefix, copy_prefix
from kvatlas.tier.stored_rows import OtherRows, StoredRows, check_alike
from kvatlas.tier.stores import ObjectStore
from kvatlas.tier.storing import Ingests

_UNAVAILABLE = (Code.DEADLINE, Code.WIRE_FAILED, Code.UNREADABLE, Code.ROW_UNREADABLE)
"""Error codes of a store that cannot be reached."""
_STORE_FAILED = {
    Code.DEADLINE: "late",
    Code.MISSING_BLOCKS: "gone",
    Code.CHECKSUM: "damaged",
    Code.WIRE_FAILED: "failed",
    Code.UNREADABLE: "failed",
    Code.ROW_UNREADABLE: "failed",
}
"""Error codes of a store, and the reason under which each is counted as a miss."""


class StoreTier(AnyTier):
    """Rows of a model in an object store. The tier owns the store and closes it.

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
        span: int | None = None,
        shards: int | None = None,
        stages: int = 1,
        staging: int = 256 << 20,
        timeout: float = 5.0,
        other: OtherRows | None = None,
    ) -> None:
        """Open a tier in a store, for the model of any plan.

        All calls take keys that were computed for `tier.plan`. A row has `span` tokens; by default,
        the greatest common divisor of the plan's block sizes. Tiers with equal spans share rows.

        Each call, including a whole fetch, takes at most `timeout` seconds. `staging` is the
        number of bytes for rows in flight. `shards` and `stages` determine how rows are cut into
        objects (see `RowObjects`) and must be the same in all engines that share rows.

        With `other`, lookups also search rows of another cache dtype. These are used if they cover
        more tokens than rows of the tier's own dtype, and are converted when they are fetched. New
        rows are always stored in the tier's own dtype.
        """
        plan = canonical_rows(plan, span=span)
        self.plan, self.timeout = plan, duration(timeout)
        self.misses: Counter[str] = Counter()
        """Number of lookups and fetches that returned fewer tokens than requested, by reason."""
        if other is not None:
            other = OtherRows(canonical_rows(other.plan, span=plan.block_size), other.convert)
            check_alike(plan, other)
        cut = (shards, stages)
        how = None if other is None else kept_as_written(other.convert)
        own = StoredRows(store, plan, identity, cut, staging, how)
        self.namespace, self.metrics = own.namespace, own.storage.metrics
        self._own, self._traffic, self._storage = own, own.traffic, own.storage
        self._rows = [own]
        """The rows to search, those of the tier's own dtype first."""
        if other is not None:
            with ExitStack() as on_failure:
                on_failure.callback(own.close, Deadline(timeout))
                theirs = StoredRows(store, other.plan, identity, cut, staging, other.convert)
                on_failure.pop_all()
            theirs.storage.metrics = self.metrics
            self._rows.append(theirs)
        self._ingests = Ingests(plan)
        self._puts: set[Future[Any]] = set()
        self._closing = False
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
        """Store one rank's part of a request's tokens. Every rank of `plan` must call this.

        The arguments are the same as for `Tier.store`. With `wait=False` the call returns as soon
        as the pools have been read. Rows in flight then count as `waiting`, and rows to which this
        rank contributes nothing count as `whole`. `flush` waits for rows in flight. A row counts as
        `no_room` if the store has no space for it, fails or times out.
        """
        with self._storage.using():
            ingest = self._ingests.of(plan)
            rank = checked_rank(plan, rank, "source")
            by_group = keys_by_group(self.plan, keys)
            start, stop, needs = self._ingests.needs(plan, tokens, by_group)
            rows = {n: RowName(n.group, n.key, n.cover) for n in needs if n.key is not None}
            deadline = Deadline(self.timeout)
            refused: set[RowName] = set()
            try:
                absent = self._not_brought(rows, ingest, rank, deadline)
                if absent:
                    about = (rank, blocks, (start, stop))
                    into = (self._traffic, self._storage)
                    storing = RowStoring(*into, ingest, about, absent, pools or {})
                    marking = self._traffic.mark()
                    self._keep([marking] if marking else [])
                    puts, no_room = storing.start(deadline, paced=wait)
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

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for writes in flight and return whether all of them have finished."""
        with self._lock:
            under_way = list(self._puts)
        timeout = self.timeout if timeout is None else duration(timeout)
        return not wait_for(under_way, timeout).not_done

    def idle(self) -> bool:
        """Return whether no read or write is in flight."""
        return all(rows.staging.idle() for rows in self._rows)

    def _not_brought(
        self, rows: Mapping[NeededBlock, RowName], ingest: Ingest, rank: int, deadline: Deadline
    ) -> dict[NeededBlock, RowName]:
        """Return the rows to which this rank has yet to contribute objects."""
        if rank not in ingest.sources:  # other ranks store the same data
            return {}
        there = self._traffic.brought(rows, (ingest.number, rank), deadline)
        pairs = zip(rows.items(), there, strict=True)
        return {need: row for (need, row), done in pairs if not done}

    def _absent(
        self, rows: Mapping[NeededBlock, RowName], deadline: Deadline
    ) -> dict[NeededBlock, RowName]:
        """Return the rows that lack at least one object."""
        present = self._traffic.present(list(rows.values()), deadline)
        pairs = zip(rows.items(), present, strict=True)
        return {need: row for (need, row), (whole, _) in pairs if not whole}

    def _finish(self, puts: Puts, deadline: Deadline) -> Iterator[RowName]:
        """Wait for writes and yield rows that found no space, failed or timed out."""
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
        """Track writes until they have finished, so that `flush` can wait for them."""
        with self._lock:
            self._puts.update(puts)
        for started in puts:
            started.add_done_callback(self._forget)

    def _forget(self, ended: Future[Any]) -> None:
        with self._lock:
            self._puts.discard(ended)

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any, *, convert: bool = True) -> int:
        """Return how many tokens can be fetched: all of them, or a multiple of the block size.

        If the store fails or times out, return the number of tokens that were found until then.
        With `convert=False`, rows of another cache dtype do not count.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            return self._found(start, stop, keys, self._rows if convert else [self._own])[1].tokens

    @property
    def converts(self) -> bool:
        """Whether lookups also find rows of another cache dtype."""
        return len(self._rows) > 1

    def kept_ends(
        self,
        group: int,
        ends: Sequence[tuple[int, bytes]],
        *,
        whole: bool = False,
        other: bool = False,
    ) -> list[bool]:
        """Return, for each prefix in `ends`, whether a group stores the row of its last block.

        A prefix of a request is given as (length, key): its number of tokens, and the key of its
        last block. Unless `whole` is set, the row may lack objects that other ranks have yet to
        store. A request is always served from rows of one cache dtype: those of this tier's dtype
        or, with `other`, those of the dtype that the tier can convert. If the store fails, the
        miss is counted and the error raised.
        """
        with self._storage.using():
            deadline = Deadline(self.timeout)
            rows = self._rows[-1] if other else self._own
            try:
                return rows.lookup.kept(group, ends, deadline, whole=whole)
            except AtlasError as problem:
                self._missed(problem)
                raise

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[StoreHit]:
        """Find the stored rows of `tokens`. Any number of ranks can fetch them.

        An object store cannot pin rows: they may be evicted before they are fetched.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            rows, found = self._found(start, stop, keys, self._rows)
            hit = rows.hit(start, found, self.timeout, self._missed)
        yield hit

    def prefetch(
        self,
        prefix: Sequence[int],
        to: ObjectStore,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> CopiedPrefix:
        """Copy the rows of `prefix`, a sequence of tokens, to another store (see `copy_prefix`).

        A call of `close` cancels the copy.
        """
        tenant, namespace = self.namespace.prefix.split("/")[1:3]
        about = {"tenant": tenant, "namespace": namespace, **options}
        with self._storage.using():
            ended = lambda: self._closing or cancelled()  # noqa: E731
            return copy_prefix(self._traffic.store, to, prefix, cancelled=ended, **about)

    def drop(self, keys: Keys) -> int:
        """Remove keys from every group and return how many objects were removed."""
        with self._storage.using():
            by_group = keys_by_group(self.plan, keys)
            return self._call(lambda: self._own.remove(by_group))

    def drop_tenant(self) -> int:
        """Remove all objects of this tenant, of all models, and return their number."""
        with self._storage.using():
            prefix = self.namespace.tenant_prefix
            removed = self._call(lambda: self._traffic.store.remove_all(prefix))
            self._traffic.forget_marks()
            return removed

    def close(self) -> None:
        """Cancel copies, wait for calls in flight, then close the store.

        If the store hangs, the call returns after the deadline and leaves it open.
        """
        self._closing = True
        self.flush()
        deadline = Deadline(self.timeout)
        ended = [rows.close(deadline) for rows in self._rows]
        if all(ended):
            self._traffic.store.close()

    # -- inside -------------------------------------------------------------------------

    def _call(self, act: Callable[[], int]) -> int:
        """Execute a call of the store within the timeout."""
        calls = self._traffic.calls
        return calls.result(calls.start(act), Deadline(self.timeout))

    def _found(
        self, start: int, stop: int, keys: Keys, among: Sequence[StoredRows]
    ) -> tuple[StoredRows, FoundRows]:
        """Find the longest stored prefix and its rows.

        If it is shorter than `stop` tokens, count the reason in `misses`.
        """
        deadline, by_group = Deadline(self.timeout), keys_by_group(self.plan, keys)
        best, most = self._own, FoundRows(0, {}, "")
        try:
            for rows in among:
                found = rows.lookup.longest(start, stop, by_group, deadline)
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
        """Return the reason for a miss: "other_LEVEL", or "absent" if all levels match.

        The levels are tenant, model, weights, dtype and format, in this order. LEVEL is the first
        one at which nothing in the store matches this tier.
        """
        reasons = [rows.traffic.why_absent(deadline) for rows in self._rows]
        return "absent" if "absent" in reasons else reasons[0]

    def _missed(self, problem: AtlasError) -> None:
        """Count the reason why the store could not serve a call."""
        if problem.code in _STORE_FAILED:
            self._count(_STORE_FAILED[problem.code])

    def _count(self, reason: str) -> None:
        with self._lock:
            self.misses[reason] += 1
