"""The blocks that an engine has reported as stored, and the predecessor of each.

Recently removed blocks are remembered, too. If vLLM has two copies of a block, it reports the block
as removed when it evicts the first copy, but continues to use the second.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import repeat
from typing import NamedTuple

from kvatlas.pool.events import BlockHash, BlockStored
from kvatlas.simulate.traces.content_ids import ROOT, hash_after, id_of

MOST_BLOCKS = 4 << 20
"""Maximum number of blocks of an engine: 64 million tokens in blocks of 16. They take about 1 GB of
memory while a trace is read."""
REMEMBERED = 1 << 18
"""Number of blocks that are remembered after their removal."""


class StoredBlock:
    """A block and its predecessor. It has `__slots__`, because an engine has millions of blocks."""

    __slots__ = ("before", "content", "name")

    def __init__(
        self, name: BlockHash | None, content: bytes | None, before: StoredBlock | None
    ) -> None:
        self.name = name
        """The engine's hash of the block; None for the root."""
        self.content = content
        """Our hash of everything up to the end of the block; None if a part of it was not seen."""
        self.before = before

    def ids(self) -> list[int]:
        """Return the ids of all blocks from the root up to this one."""
        found, block = [], self
        while block.before is not None:
            if block.content is not None:
                found.append(id_of(block.content))
            block = block.before
        return found[::-1]


BEGINNING = StoredBlock(None, ROOT, None)


class Addition(NamedTuple):
    """The result of adding an event's blocks: the predecessor of the first, and the last block."""

    before: StoredBlock
    last: StoredBlock
    new: bool
    """Whether any of the event's blocks was not stored before."""


class ContradictionError(ValueError):
    """Raised if two events of an engine use the same block hash for different prefixes."""


class TooManyBlocksError(ValueError):
    """Raised if an engine has more than `MOST_BLOCKS` blocks."""


class StoredBlocks:
    """The blocks of one engine. Keys are the engine's block hashes."""

    def __init__(self) -> None:
        self._there: dict[BlockHash, StoredBlock] = {}
        self._removed: OrderedDict[BlockHash, StoredBlock] = OrderedDict()
        """Removed blocks, oldest removal first."""

    def _before(self, event: BlockStored) -> StoredBlock:
        """Return the block that precedes an event's blocks.

        If the engine never reported that block as stored, its `content` is None.
        """
        name = event.parent_block_hash
        if name is None:
            return BEGINNING
        found = self._there.get(name)
        if found is None:
            found = self._removed.get(name) or StoredBlock(name, None, None)
            self._use(found)
        return found

    def _use(self, block: StoredBlock | None) -> None:
        """Mark a removed block and its predecessors as recently used, so they are kept longer."""
        while block is not None and block.name is not None and block.name in self._removed:
            self._removed.move_to_end(block.name)
            block = block.before

    def store(self, event: BlockStored) -> Addition:
        """Add an event's blocks. Return the predecessor of the first block, and the last block."""
        before = self._before(event)
        size, block, new = event.block_size, before, False
        adapter = event.lora_id if event.lora_name is None else event.lora_name
        keys = event.extra_keys if event.extra_keys is not None else repeat(adapter)
        for place, (name, key) in enumerate(zip(event.block_hashes, keys, strict=False)):
            content = block.content
            if content is not None:
                tokens = event.token_ids[place * size : (place + 1) * size]
                content = hash_after(content, tokens, key)
            known = self._there.get(name)
            new |= known is None
            known = known or self._removed.pop(name, None)
            if known is None or known.content is None:
                known = StoredBlock(name, content, block)
            elif content is not None and content != known.content:
                raise ContradictionError(
                    f"block hash {name!r} for another prefix than in an earlier event"
                )
            self._there[name] = block = known
        if len(self._there) > MOST_BLOCKS:
            raise TooManyBlocksError(f"more than {MOST_BLOCKS:,} blocks that were never removed")
        return Addition(before, block, new)

    def remove(self, names: list[BlockHash]) -> None:
        """Mark blocks as removed. Unknown blocks are ignored."""
        for name in names:
            block = self._there.pop(name, None)
            if block is not None:
                self._removed[name] = block
        while len(self._removed) > REMEMBERED:
            self._removed.popitem(last=False)

    def clear(self) -> None:
        """Mark all blocks as removed."""
        self.remove(list(self._there))
