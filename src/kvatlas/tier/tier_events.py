"""`TierEvents`: report the blocks that a tier stores or evicts, as vLLM's KV events for routers.

A process that stores the blocks of requests passes the requests to `note`, and calls `tell` from
time to time. `tell` looks up which blocks are in the tier now, and which reported blocks have been
evicted. It must poll, because an object store evicts blocks without notification, and because other
processes may use the same tier.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError
from kvatlas.planning import Group
from kvatlas.pool import BlockEvent, BlockRemoved, BlockStored
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.tier import Tier

MEMORY = "CPU"
"""vLLM's name for host memory as a cache medium."""
STORAGE = "STORAGE"
"""vLLM's name for files and stores as a cache medium."""
_LOCAL, _REMOTE = "LOCAL", "REMOTE"
_TRIES = 4
"""Maximum number of lookups per request. Most windows and recurrent states are never stored."""
_NOTED = 4096
"""Maximum number of requests that wait for a lookup. The oldest are dropped beyond it."""
_NOTED_TOKENS = 1 << 24
"""Maximum number of tokens of all waiting requests, which take about 200 MB."""
_AGAIN = 1024
"""Maximum number of reported blocks that one call looks up again."""
_SECONDS = 2.0
"""Seconds after which remaining lookups are left to the next call."""
_MOST = 1 << 20
"""Maximum number of reported blocks. Beyond it, the oldest are reported as removed."""

EventListener = Callable[[list[BlockEvent]], None]


class _Block(NamedTuple):
    group: int
    key: bytes

    @property
    def hash(self) -> int:
        return block_hash(self.key)


class _Noted(NamedTuple):
    chain: PrefixChain
    stop: int
    tries: int


class _NotedRequests:
    """A thread-safe queue of requests that wait for a lookup."""

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque()
        self._tokens = 0
        self._lock = threading.Lock()  # never held during a call to the tier

    def __len__(self) -> int:
        return len(self._noted)

    def add(self, noted: _Noted, *, first: bool = False) -> None:
        """Add a request to the end of the queue or, if `first` is true, to its front.

        While the queue exceeds its limits, drop the request at the front.
        """
        with self._lock:
            (self._noted.appendleft if first else self._noted.append)(noted)
            self._tokens += noted.chain.count
            while len(self._noted) > _NOTED or self._tokens > _NOTED_TOKENS:
                self._tokens -= self._noted.popleft().chain.count

    def take(self) -> _Noted | None:
        """Remove and return the oldest request, or None."""
        with self._lock:
            if not self._noted:
                return None
            noted = self._noted.popleft()
            self._tokens -= noted.chain.count
            return noted

    def clear(self) -> None:
        """Remove all requests."""
        with self._lock:
            self._noted.clear()
            self._tokens = 0


class TierEvents:
    """Report the stored blocks of noted requests to a listener, such as an `EventPublisher`.

    Only complete blocks are reported, with their tokens. `medium` is "CPU" for memory and
    "STORAGE" for a file or a store. Methods are thread-safe. The listener must not raise.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> from kvatlas.tier import PrefixFinder
    >>> own = plan("Qwen3-8B", memory="64MiB", layout="BHLNC", max_len=64)
    >>> tier, pools = Tier(own), {0: np.zeros(own.pools[0].nbytes, np.uint8)}
    >>> chain, heard = PrefixFinder(tier).chain(range(40)), []
    >>> events = TierEvents(tier, heard.extend)
    >>> result = tier.store(pools, own, blocks=[3, 1], tokens=32, keys=chain.keys(32))
    >>> events.note(chain, 32)
    >>> events.tell()
    >>> heard[0].medium, heard[0].block_size, heard[0].token_ids == list(range(32))
    ('CPU', 16, True)
    >>> heard[0].block_hashes == [block_hash(key) for key in chain.keys(32)[0]]
    True
    >>> tier.drop(chain.keys(32)), events.tell(), len(heard[1].block_hashes)
    (2, None, 2)
    """

    def __init__(
        self, tier: AnyTier, listener: EventListener, *, medium: str | None = None
    ) -> None:
        in_memory = isinstance(tier, Tier) and tier.file is None
        self.medium = medium or (MEMORY if in_memory else STORAGE)
        self._locality = _REMOTE if isinstance(tier, StoreTier) else _LOCAL
        self._tier, self._listener = tier, listener
        self._noted = _NotedRequests()
        self._told: OrderedDict[_Block, int] = OrderedDict()
        """Reported blocks and the number of tokens up to their ends, oldest first."""
        self._lock = threading.Lock()

    def note(self, chain: PrefixChain, stop: int) -> None:
        """Record that the first `stop` tokens of a request were stored or are being stored."""
        self._noted.add(_Noted(chain, stop, 1))

    def tell(self) -> None:
        """Report blocks that were stored or evicted since the last call.

        If the tier is slow or cannot be reached, the remaining lookups are left to the next call.
        """
        with self._lock:
            news: list[BlockEvent] = []
            until = time.monotonic() + _SECONDS
            try:
                news += self._removed()
                for _ in range(len(self._noted)):
                    noted = self._noted.take()
                    if noted is None:
                        break
                    try:
                        complete = self._look_for(noted, news)
                    except AtlasError:
                        self._noted.add(noted, first=True)
                        raise
                    if not complete and noted.tries < _TRIES:
                        self._noted.add(noted._replace(tries=noted.tries + 1))
                    if time.monotonic() > until:
                        break
                news += self._forgotten()
            except AtlasError:
                pass  # the tier cannot be reached, so nothing is known about its blocks
            if news:
                self._listener(news)

    def forget(self) -> None:
        """Forget all reported blocks, without sending events.

        Call this if the listener was cleared.
        """
        with self._lock:
            self._noted.clear()
            self._told.clear()

    # -- inside -------------------------------------------------------------------------

    def _look_for(self, noted: _Noted, news: list[BlockEvent]) -> bool:
        """Append events to `news` for stored blocks of a request that were not reported before.

        Return whether the tier stores all blocks of the request.
        """
        complete = True
        for number, group in enumerate(self._tier.plan.groups):
            ends = range(group.block, noted.stop + 1, group.block)
            keys = [(stop, noted.chain.key_at(stop)) for stop in ends]
            new = [(stop, key) for stop, key in keys if _Block(number, key) not in self._told]
            there = self._tier.kept_ends(number, new, whole=True) if new else []
            found = [stop for (stop, _), kept in zip(new, there, strict=True) if kept]
            complete &= all(there)
            about = (noted.chain, number, group)
            news += [self._stored_event(*about, stops) for stops in _stretches(found, group.block)]
        return complete

    def _stored_event(
        self, chain: PrefixChain, number: int, group: Group, stops: Sequence[int]
    ) -> BlockStored:
        blocks = {_Block(number, chain.key_at(stop)): stop for stop in stops}
        self._told |= blocks
        first = stops[0] - group.block
        windows = group.kind in ("sliding_window", "sliding_window_mla")
        return BlockStored(
            block_hashes=[block.hash for block in blocks],
            parent_block_hash=block_hash(chain.key_at(first)) if first else None,
            token_ids=chain.tokens(first, stops[-1]),
            block_size=group.block,
            medium=self.medium,
            lora_name=chain.lora or None,
            extra_keys=_extra_keys(chain, len(blocks), first=not first),
            group_idx=number,
            kv_cache_spec_kind="mamba" if group.kind == "recurrent" else group.kind,
            kv_cache_spec_sliding_window=group.window if windows else None,
            locality=self._locality,
        )

    def _removed(self) -> list[BlockEvent]:
        """Look up the oldest reported blocks again and return events for evicted ones."""
        oldest = list(islice(self._told.items(), _AGAIN))
        gone: list[_Block] = []
        for number, part in groupby(sorted(oldest), lambda one: one[0].group):
            asked = list(part)
            ends = [(stop, block.key) for block, stop in asked]
            there = self._tier.kept_ends(number, ends, whole=True)
            gone += [block for (block, _), kept in zip(asked, there, strict=True) if not kept]
        for block, _ in oldest:
            self._told.move_to_end(block)
        return self._removed_events(gone)

    def _forgotten(self) -> list[BlockEvent]:
        return self._removed_events(list(islice(self._told, max(0, len(self._told) - _MOST))))

    def _removed_events(self, blocks: Sequence[_Block]) -> list[BlockEvent]:
        for block in blocks:
            del self._told[block]
        return [
            BlockRemoved([one.hash for one in part], self.medium, number, self._locality)
            for number, part in groupby(blocks, lambda block: block.group)
        ]


def _stretches(stops: Sequence[int], block: int) -> Iterator[list[int]]:
    """Split the end positions of blocks, ascending and in tokens, into lists of adjacent blocks."""
    begun: list[int] = []
    for stop in stops:
        if begun and stop != begun[-1] + block:
            yield begun
            begun = []
        begun.append(stop)
    if begun:
        yield begun


def block_hash(key: bytes) -> int:
    """Return the hash that events contain for a block: the last 64 bits of its key.

    >>> block_hash(bytes(15) + b"A")
    65
    """
    return int.from_bytes(key[-8:], "big")


def _extra_keys(
    chain: PrefixChain, blocks: int, *, first: bool
) -> list[tuple[Any, ...] | None] | None:
    """Return vLLM's `extra_keys` for `blocks` consecutive blocks of a request.

    They are the values other than tokens that the hash of each block includes: the LoRA name and,
    for the first block of the request, the salt. Set `first` if the blocks begin with the first
    block of the request. Return None if the request has neither value.
    """
    lora = (chain.lora,) if chain.lora else ()
    salt = (chain.salt.hex(),) if chain.salt and first else ()
    if not lora and not chain.salt:
        return None
    return [(*lora, *salt) or None, *[lora or None] * (blocks - 1)]
