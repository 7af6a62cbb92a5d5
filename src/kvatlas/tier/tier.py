"""`Tier`: a pool of blocks in host memory or in a file, for caches of any topology.

A tier has a plan of its own: one rank, a block-outermost order, each block in one piece.
Ranks of any plan of the same model store into it, ranks of any other fetch from it, both
along routes. Keys are opaque bytes; a key stands for one block of tokens of one group of
the tier's plan, or for a recurrent state after some tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvatlas.planning import Plan
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.file import TierFile
from kvatlas.tier.hit import Hit, check_all_there, tables_of
from kvatlas.tier.index import BlockIndex, StoreResult
from kvatlas.tier.ingest import check_tier_plan
from kvatlas.tier.request_blocks import Keys, TierSpans, keys_by_group
from kvatlas.tier.storage import Carry, TierStorage
from kvatlas.tier.storing import StoreDesk
from kvatlas.wire import Memory
from kvatlas.wire.memory_copy import rank_pools
from kvatlas.wire.run_bounds import Bytes

_NAMES = 1 << 14
"""Names that are listed at once: what one message has room for."""


class Tier:
    """A second home for blocks.

    `Tier(plan)` keeps blocks in memory of its own, or in `memory`, by pool; `Tier.open` keeps
    them in a file. Any number of threads may use one.

    >>> from kvatlas.planning import plan
    >>> prefill = plan("Qwen3-8B", memory="64MiB", tp=2, layout="LBNHC", max_len=64)
    >>> decode = plan("Qwen3-8B", memory="64MiB", layout="BHLNC", block_size=32, max_len=64)
    >>> pools = [{0: np.full(prefill.pools[0].nbytes, rank, np.uint8)} for rank in (1, 2)]
    >>> tier = Tier(plan("Qwen3-8B", memory="32MiB", layout="BLHNC", max_len=64))
    >>> keys = [b"first 16 tokens", b"first 32 tokens", b"first 48 tokens"]
    >>> tier.store(pools[0], prefill, rank=0, blocks=[7, 2, 9], tokens=48, keys=keys)
    StoreResult(whole=0, waiting=3, no_room=0)
    >>> tier.store(pools[1], prefill, rank=1, blocks=[7, 2, 9], tokens=48, keys=keys)
    StoreResult(whole=3, waiting=0, no_room=0)
    >>> tier.match([*keys, b"first 64 tokens"], tokens=64)
    48
    >>> mine = {0: np.zeros(decode.pools[0].nbytes, np.uint8)}
    >>> tier.fetch(mine, decode, blocks=[4, 1], tokens=48, keys=keys)
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
        self.plan, self._file = plan, _file
        pools: dict[int, Bytes] = {}
        if memory is not None:
            pools = rank_pools(plan, 0, memory)
        elif _file is None:
            pools = {p.index: np.zeros(p.nbytes, dtype=np.uint8) for p in plan.pools}
        self._storage = TierStorage(pools, _file, verify_always=_verify == "always", plan=plan)
        self.metrics = self._storage.metrics
        self._index = BlockIndex(plan, _file.clear if _file else lambda _: None)
        if _file is not None:
            for older in self._index.restore(_file.recorded()):
                _file.clear(older)
        self._spans = TierSpans(plan, plan)
        self.desk = StoreDesk(plan, self._index, self._storage)
        """Where stores begin and end, for who moves bytes by itself."""
        self._routes = TierRoutes(plan)

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
        what is damaged is absent: a block's bytes are verified when they are first used
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
    ) -> StoreResult:
        """Store one rank's part of a request's tokens; every rank of its plan calls this.

        `blocks` are the request's own, as routes take them. `keys` has a key, or None, for
        each block of the tier in the order of tokens, for all its groups or by group; that
        of a recurrent group stands for the state after the last token. A key is there
        when all ranks' bytes are. The last block may have begun only: its key then stands
        for so many tokens. A start within a block is taken from the block's first token.
        What windows have left behind is not stored. `carry` moves bytes that this process
        cannot reach, from the rank's pools into `tier.memory`.
        """
        storage = self._storage
        with storage.using():
            store = self.desk.begin(plan, rank, tokens, keys_by_group(self.plan, keys))
            brought, sums = None, None
            try:
                if store.claim.fills:
                    offload = None if carry else storage.offload_of_sums(plan, rank, pools)
                    about = (rank, blocks, (store.start, store.stop), store.ids)
                    if offload is not None:
                        with self.metrics.phase("bind"):
                            grids, deliveries = store.ingest.grids(*about)
                        sums = storage.carry("store", grids, offload.store_sums)
                    elif carry is not None:
                        with self.metrics.phase("bind"):
                            copies, deliveries = store.ingest.copies(*about)
                        sums = storage.carry("store", copies, storage.carried(carry))
                    else:
                        runs = storage.store_runs(store.ingest, about, plan, pools or {})
                        sums, deliveries = runs
                    brought = deliveries
            finally:
                result = self.desk.end(store, brought, sums)
            return result

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any) -> int:
        """How many tokens could be fetched: all of them, or as many whole blocks as there are.

        It counts from token 0 also where `tokens` starts later. Nothing is pinned or
        verified; `pin` does both.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            return self._index.longest(self._spans, start, stop, keys_by_group(self.plan, keys))

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[Hit]:
        """Pin what there is of some tokens, verified, for any number of ranks to fetch."""
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            hit = self._pinned(start, stop, keys_by_group(self.plan, keys))
        try:
            yield hit
        finally:
            hit.release()

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
        carry: Carry | None = None,
        convert: Converting | None = None,
    ) -> None:
        """Fetch tokens into a rank's blocks: all of them, or a refusal and nothing.

        With `convert`, what the rank keeps in another dtype is converted.
        """
        _, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
        with self.pin(keys, tokens) as hit:
            check_all_there(hit.tokens, stop)
            about: dict[str, Any] = {"rank": rank, "blocks": blocks}
            hit.fetch(pools, plan, **about, carry=carry, convert=convert)

    def drop(self, keys: Keys) -> int:
        """Forget keys, in every group; how many blocks that were."""
        with self._storage.using():
            by_group = keys_by_group(self.plan, keys)
            names = [(g, key) for g, row in by_group.items() for key in row if key is not None]
            return self._index.drop_keys(names)

    # -- what there is ------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks that are whole."""
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        """Whether a key is whole in every group that it could stand for."""
        groups = range(len(self.plan.groups))
        return isinstance(key, bytes) and all(self._index.has(group, key) for group in groups)

    def has(self, key: bytes, group: int = 0) -> bool:
        """Whether a key of a group is whole."""
        return self._index.has(group, key)

    def kept_ends(
        self, group: int, ends: Sequence[tuple[int, bytes]], *, whole: bool = False
    ) -> list[bool]:
        """Whether a group has the block that requests of so many tokens end in, by its key."""
        del whole  # all blocks are
        with self._storage.using():
            return [self._index.has(group, key) for _, key in ends]

    def names(self) -> list[tuple[int, bytes]]:
        """Every (group, key) that is whole, the least recently used first."""
        return self._index.names()

    def names_since(self, mark: int = 0) -> tuple[list[tuple[int, bytes]], int]:
        """Names that became whole after a mark, the oldest first, and the mark after them.

        Not all at once where there are many: the marks are alike when there are no more.
        """
        return self._index.names_since(mark, _NAMES)

    @property
    def evicted(self) -> int:
        """Whole blocks that have made room for others."""
        return self._index.evicted

    @property
    def file(self) -> TierFile | None:
        """The file that it is in; None for one in memory."""
        return self._file

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the tier open meanwhile; refused once it is closed."""
        return self._storage.using()

    @property
    def pools(self) -> dict[int, Bytes]:
        """The tier's memory, by pool; of a tier in a file, what stands for it in a `carry`."""
        return self._storage.pools

    @property
    def memory(self) -> dict[int, Memory]:
        """Where the pools are, for transports to register."""
        return {i: Memory(pool.ctypes.data, pool.nbytes) for i, pool in self.pools.items()}

    def close(self) -> None:
        """Wait for calls that are under way, then let go; what is whole stays in the file."""
        self._storage.close()

    def __enter__(self) -> Tier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------

    def _pinned(self, start: int, stop: int, keys: Mapping[int, Sequence[bytes | None]]) -> Hit:
        while True:
            end, needs = stop, self._spans.needs(start, stop, keys)
            blocks = self._index.pin(needs)
            if blocks is None:  # not all of it
                end = self._index.longest(self._spans, start, stop, keys)
                needs = self._spans.needs(start, end, keys)
                blocks = self._index.pin(needs)
            if blocks is None:
                continue  # gone since it was found
            with ExitStack() as pinned:
                pinned.callback(self._index.unpin, blocks)
                damaged = self._storage.damaged(blocks)
                if not damaged:
                    tables = tables_of(self.plan, needs, blocks)
                    let_go = pinned.pop_all().close
                    return Hit(start, end, self._storage, self._routes, tables, let_go)
            for block in damaged:
                self.metrics.add(damaged=1)
                self._index.drop(block)
