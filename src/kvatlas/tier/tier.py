"""`Tier`: a pool of blocks in host memory or in a file, for caches of any topology.

A tier has a plan of its own: one rank, a block-outermost order, each block in one piece.
Ranks of any plan of the same model store into it, ranks of any other fetch from it, both
along routes. Keys are opaque bytes; a key stands for one block of tokens of one group of
the tier's plan, or for a recurrent state after some tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, checked_rank, route, token_range
from kvatlas.tier.format import TierFile
from kvatlas.tier.index import BlockIndex, Claim, StoreResult, TierBlock
from kvatlas.tier.ingest import Ingest, check_tier_plan
from kvatlas.tier.request_blocks import Keys, NeededBlock, TierSpans, keys_by_group
from kvatlas.wire import Bytes, Memory, Metrics, copy_pools, rank_pools, stream_bytes

_PLANS = 16
"""Plans whose routes to and from a tier stay compiled."""

Carry = Callable[[Sequence[Copy]], None]
"""Carries copies out, by any transport, and returns when all bytes are there."""


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
        self.plan, self._file, self._verify = plan, _file, _verify
        self.metrics = Metrics()
        self._pools: dict[int, Bytes] = {}
        if memory is not None:
            self._pools = rank_pools(plan, 0, memory)
        elif _file is None:
            self._pools = {p.index: np.zeros(p.nbytes, dtype=np.uint8) for p in plan.pools}
        self._index = BlockIndex(plan, _file.clear if _file else lambda _: None)
        if _file is not None:
            for older in self._index.restore(_file.recorded()):
                _file.clear(older)
        self._spans = TierSpans(plan, plan)
        self._ingest_from = lru_cache(_PLANS)(lambda src: Ingest(src, plan))
        self._route_to = lru_cache(_PLANS)(lambda dst: route(plan, dst))
        self._compiling = threading.Lock()
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
        with self._using():
            with self._compiling:  # once: ranks that fill a block meet in one Ingest
                ingest = self._ingest_from(plan)
            rank = checked_rank(plan, rank, "source")
            start, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
            start = ingest.spans.whole_blocks(start)
            needs = ingest.spans.needs(start, stop, keys_by_group(self.plan, keys))
            if rank not in ingest.sources:  # others bring what this one also holds
                keyed = [need for need in needs if need.key is not None]
                whole = sum(self._index.find(need) is not None for need in keyed)
                return StoreResult(whole, len(keyed) - whole, 0)
            move = self._carried(carry) if carry else self._writing(plan, rank, pools or {})
            claim = self._index.claim(needs, ingest, rank)
            try:
                if claim.fills:
                    self._fill(claim, ingest, blocks, (start, stop), move)
            finally:
                self._index.unpin(claim.pinned)
            return StoreResult(claim.whole, claim.waiting, claim.no_room)

    def _fill(
        self, claim: Claim, ingest: Ingest, blocks: Any, tokens: tuple[int, int], carry: Carry
    ) -> None:
        brought = None
        try:
            with self.metrics.phase("bind"):
                ids = {need: block.block_id for need, block in claim.fills}
                copies, deliveries = ingest.copies(claim.rank, blocks, tokens, ids)
            self._carry("store", copies, carry)
            brought = deliveries
        finally:
            ready = self._index.arrived(claim, ingest, brought)
            self._commit(ready)
        claim.whole += len(ready)

    def _writing(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Carry:
        """From memory that this process can reach, into the tier."""
        if self._file is None:
            return lambda copies: copy_pools(copies, rank_pools(plan, rank, pools), self._pools)
        write = self._file.write
        return lambda copies: write(copies, rank_pools(plan, rank, pools))

    def _carried(self, carry: Carry) -> Carry:
        """From anywhere, into the tier's memory; from there into its file."""
        file = self._file
        if file is None:
            return carry

        def through_window(copies: Sequence[Copy]) -> None:
            with file.window.used():
                carry(copies)
                file.write([replace(c, src_pool=c.dst_pool, src=c.dst) for c in copies], self.pools)

        return through_window

    def _commit(self, blocks: list[TierBlock]) -> None:
        """Commit blocks that have all of their bytes; only then can they be found."""
        done = False
        try:
            if self._file is not None and blocks:
                with self.metrics.phase("commit"):
                    self._file.commit(blocks)
            done = True
        finally:
            self._index.settle(blocks, whole=done)

    # -- fetching -----------------------------------------------------------------------

    def match(self, keys: Keys, tokens: Any) -> int:
        """How many tokens could be fetched: all of them, or as many whole blocks as there are.

        It counts from token 0 also where `tokens` starts later. Nothing is pinned or
        verified; `pin` does both.
        """
        with self._using():
            start, stop = token_range(tokens, self.plan.max_len)
            return self._index.longest(self._spans, start, stop, keys_by_group(self.plan, keys))

    @contextmanager
    def pin(self, keys: Keys, tokens: Any) -> Iterator[Hit]:
        """Pin what there is of some tokens, verified, for any number of ranks to fetch."""
        with self._using():
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
    ) -> None:
        """Fetch tokens into a rank's blocks: all of them, or a refusal and nothing."""
        _, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
        with self.pin(keys, tokens) as hit:
            if hit.tokens < stop:
                problem, got = "The tier does not have all tokens", f"{hit.tokens} of {stop} tokens"
                hint = "Ask Tier.match first, or pin what there is"
                raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
            hit.fetch(pools, plan, rank=rank, blocks=blocks, carry=carry)

    def drop(self, keys: Keys) -> int:
        """Forget keys, in every group; how many blocks that were."""
        with self._using():
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

    def names(self) -> list[tuple[int, bytes]]:
        """Every (group, key) that is whole, the least recently used first."""
        return self._index.names()

    @property
    def evicted(self) -> int:
        """Whole blocks that have made room for others."""
        return self._index.evicted

    @property
    def pools(self) -> dict[int, Bytes]:
        """The tier's memory, by pool; of a tier in a file, what stands for it in a `carry`."""
        return self._pools if self._file is None else self._file.window.pools

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
            self._pools = {}
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
                problem = "The tier is closed"
                raise AtlasError(Code.UNREADABLE, problem, got="a call", hint="Open it again")
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _carry(self, phase: str, copies: Sequence[Copy], carry: Carry) -> None:
        with self.metrics.phase(phase):
            carry(copies)
        descriptors = sum(map(len, copies))
        self.metrics.add(**{f"{phase}_bytes": stream_bytes(copies)}, descriptors=descriptors)

    def _reading(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Carry:
        """From the tier into memory that this process can reach."""
        if self._file is None:
            return lambda copies: copy_pools(copies, self._pools, rank_pools(plan, rank, pools))
        read = self._file.read
        return lambda copies: read(copies, rank_pools(plan, rank, pools))

    def _pinned(self, start: int, stop: int, keys: Mapping[int, Sequence[bytes | None]]) -> Hit:
        while True:
            end = self._index.longest(self._spans, start, stop, keys)
            needs = self._spans.needs(start, end, keys)
            blocks = self._index.pin(needs)
            if blocks is None:
                continue  # gone since it was found
            with ExitStack() as pinned:
                pinned.callback(self._index.unpin, blocks)
                damaged = self._damaged(blocks)
                if not damaged:
                    pinned.pop_all()
                    return Hit(self, start, end, needs, blocks)
            for block in damaged:
                self.metrics.add(damaged=1)
                self._index.drop(block)

    def _damaged(self, blocks: list[TierBlock]) -> list[TierBlock]:
        """The blocks whose bytes are not those that were stored."""
        if self._file is None:
            return []
        doubted = [block for block in blocks if not block.verified or self._verify == "always"]
        with self.metrics.phase("verify"):
            checksums = self._file.checksums(doubted)
        for block, checksum in zip(doubted, checksums, strict=True):
            block.verified = checksum == block.checksum
        return [block for block in doubted if not block.verified]


@dataclass(eq=False, repr=False)
class Hit:
    """Tokens of a request that a tier has, in blocks that stay until it is released."""

    _tier: Tier
    start: int
    tokens: int
    """How many tokens of the request, from its first, can be fetched; 0 for none."""
    _needs: list[NeededBlock]
    _blocks: list[TierBlock]
    _loaded: ExitStack = field(default_factory=ExitStack)
    """Ends the use of the tier's memory."""

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        carry: Carry | None = None,
    ) -> None:
        """Fill one rank's blocks, as routes take them."""
        tier = self._tier
        with tier._using():
            rank = checked_rank(plan, rank, "destination")
            copies = self._bound(plan, rank, blocks)
            if carry is not None:
                self._load(copies)
            tier._carry("fetch", copies, carry or tier._reading(plan, rank, pools or {}))

    def copies(self, plan: Plan, *, rank: int = 0, blocks: Any) -> tuple[Copy, ...]:
        """The byte ranges from `tier.memory` to a rank's pools, for any transport.

        Of a tier in a file, the bytes are there until the hit is released.
        """
        with self._tier._using():
            copies = self._bound(plan, rank, blocks)
            self._load(copies)
            return copies

    def _bound(self, plan: Plan, rank: int, blocks: Any) -> tuple[Copy, ...]:
        way = self._tier._route_to(plan)
        if not self.tokens or 0 not in way.sources(rank):
            return ()
        with self._tier.metrics.phase("bind"):
            ends: dict[str, Any] = {"src_blocks": self._tables(), "dst_blocks": blocks}
            tokens = self.start, self.tokens
            return way.bind(src_rank=0, dst_rank=rank, tokens=tokens, **ends).copies

    def _load(self, copies: Sequence[Copy]) -> None:
        """Read what copies take from a file into the memory that stands for it."""
        file = self._tier._file
        if file is not None:
            self._loaded.enter_context(file.window.used())
            within = [replace(c, dst_pool=c.src_pool, dst=c.src) for c in copies]
            file.read(within, file.window.pools)

    def release(self) -> None:
        """Unpin the blocks; a second call does nothing."""
        blocks, self._blocks = self._blocks, []
        self._loaded.close()
        self._tier._index.unpin(blocks)

    def _tables(self) -> dict[int, list[int]]:
        """Block ids by group; entries that nobody needs have none, and are refused if used."""
        groups = self._tier.plan.groups
        tables = {group: [-1] for group in range(len(groups))}
        for need, block in zip(self._needs, self._blocks, strict=True):
            entry = 0 if groups[need.group].kind == "recurrent" else need.entry
            table = tables[need.group]
            table += [-1] * (entry + 1 - len(table))
            table[entry] = block.block_id
        return tables
