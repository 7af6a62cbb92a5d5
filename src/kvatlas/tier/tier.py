"""`Tier`: a pool of blocks in host memory or in a file, for caches of any topology.

A tier has its own plan: one rank, block-outermost, each block contiguous. Ranks of any plan of the
same model can store blocks, and ranks of any other plan can fetch them. Keys are opaque bytes. A
key identifies one block of tokens in one group of the tier's plan, or the recurrent state after
some number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvatlas.copying.memory_copy import rank_pools
from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.blocks import StoreResult
from kvatlas.tier.converting import TierRoutes
from kvatlas.tier.file import TierFile
from kvatlas.tier.hit import Hit
from kvatlas.tier.index import BlockIndex
from kvatlas.tier.ingest import check_tier_plan
from kvatlas.tier.request_blocks import Keys, TierSpans, block_tables, keys_by_group
from kvatlas.tier.storage import Carry, TierStorage
from kvatlas.tier.storing import StoreDesk
from kvatlas.wire import Memory


class Tier(AnyTier):
    """Blocks in host memory or in a file, found by keys.

    `Tier(plan)` stores blocks in newly allocated memory, or in `memory`, which maps each pool index
    to a buffer. `Tier.open` stores them in a file. A tier is thread-safe.

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
        """Begins and ends stores for callers that move the bytes themselves, such as the server."""
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
        """Open the tier in a file. If the file does not exist, create it with the given plan.

        With `durable`, each call that completes keys flushes the file to disk twice, so that the
        keys survive a power failure. Otherwise they survive the end of the process, but not a power
        failure. In both cases damaged blocks count as absent. A block's checksum is verified when
        the block is first used after opening, or at every use with `verify="always"`.
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
        """Store one rank's part of a request's tokens. Every rank of `plan` must call this.

        `blocks` are the request's block ids in the rank's cache, in the form that `Route.bind`
        takes. `keys` contains a key or None for each block of the tier in token order, either one
        list for all groups or a mapping by group. The key of a recurrent group identifies the state
        after the last token. A key can be found once the bytes of all ranks are stored. If the
        last block is incomplete, its key identifies only the tokens up to the end of the request.
        A range that starts inside a block is extended to the block's first token. Tokens outside
        the window of sliding layers are not stored. If this process cannot access the rank's pools,
        pass `carry`, a function that copies from the pools into `tier.memory`.
        """
        storage = self._storage
        with storage.using():
            store = self.desk.begin(plan, rank, tokens, keys_by_group(self.plan, keys))
            brought, sums = None, None
            try:
                if store.claim.fills:
                    about = (rank, blocks, (store.start, store.stop), store.ids)
                    sums, brought = storage.store_part(store.ingest, about, plan, pools, carry)
            finally:
                result = self.desk.end(store, brought, sums)
            return result

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any) -> int:
        """Return how many tokens can be fetched: all of them, or a number of whole blocks.

        The count starts at token 0 even if `tokens` starts later. Nothing is pinned or verified;
        `pin` does both.
        """
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            by_group = keys_by_group(self.plan, keys)
            return self._spans.longest(start, stop, by_group, self._index.present)

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[Hit]:
        """Pin and verify the stored blocks of `tokens`. Any number of ranks can fetch them."""
        with self._storage.using():
            start, stop = token_range(tokens, self.plan.max_len)
            hit = self._pinned(start, stop, keys_by_group(self.plan, keys))
        try:
            yield hit
        finally:
            hit.release()

    def drop(self, keys: Keys) -> int:
        """Remove keys from every group and return how many blocks were removed.

        If the tier is durable, they stay removed after a power failure.
        """
        with self._storage.using():
            by_group = keys_by_group(self.plan, keys)
            names = [(g, key) for g, row in by_group.items() for key in row if key is not None]
            removed = self._index.drop_keys(names)
            if removed and self._file is not None:
                self._file.flush()
            return removed

    # -- content ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of complete blocks."""
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        """Return whether every group has a complete block with this key."""
        groups = range(len(self.plan.groups))
        return isinstance(key, bytes) and all(self._index.has(group, key) for group in groups)

    def has(self, key: bytes, group: int = 0) -> bool:
        """Return whether a group has a complete block with this key."""
        return self._index.has(group, key)

    def kept_ends(
        self, group: int, ends: Sequence[tuple[int, bytes]], *, whole: bool = False
    ) -> list[bool]:
        """Return, for each prefix in `ends`, whether a group stores the block that ends with it.

        A prefix of a request is given as (length, key): its number of tokens, and the key of its
        last block.
        """
        del whole  # lookups find only complete blocks
        with self._storage.using():
            return [self._index.has(group, key) for _, key in ends]

    def names(self) -> list[tuple[int, bytes]]:
        """Return the (group, key) of all complete blocks, least recently used first."""
        return self._index.names()

    @property
    def evicted(self) -> int:
        """Number of complete blocks that were evicted."""
        return self._index.evicted

    @property
    def file(self) -> TierFile | None:
        """The file of the tier; None if the tier is in memory."""
        return self._file

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context that keeps the tier open. Entering it fails if the tier is closed."""
        return self._storage.using()

    @property
    def pools(self) -> dict[int, Bytes]:
        """The tier's memory by pool. For a tier in a file: the staging memory that `carry` uses."""
        return self._storage.pools

    @property
    def memory(self) -> dict[int, Memory]:
        """The memory of the pools, for transports to register."""
        return {i: Memory(pool.ctypes.data, pool.nbytes) for i, pool in self.pools.items()}

    def close(self) -> None:
        """Wait for calls in flight, then close the tier. Complete blocks stay in the file."""
        self._storage.close()

    # -- inside -------------------------------------------------------------------------

    def _pinned(self, start: int, stop: int, keys: Mapping[int, Sequence[bytes | None]]) -> Hit:
        while True:
            end, needs = stop, self._spans.needs(start, stop, keys)
            blocks = self._index.pin(needs)
            if blocks is None:  # some are missing: take the longest prefix
                end = self._spans.longest(start, stop, keys, self._index.present)
                needs = self._spans.needs(start, end, keys)
                blocks = self._index.pin(needs)
            if blocks is None:
                continue  # a block was evicted between the lookup and the pin
            with ExitStack() as pinned:
                pinned.callback(self._index.unpin, blocks)
                damaged = self._storage.damaged(blocks)
                if not damaged:
                    ids = [block.block_id for block in blocks]
                    tables = block_tables(self.plan, dict(zip(needs, ids, strict=True)))
                    let_go = pinned.pop_all().close
                    return Hit(start, end, self._storage, self._routes, tables, let_go)
            for block in damaged:
                self.metrics.add(damaged=1)
                self._index.drop(block)
