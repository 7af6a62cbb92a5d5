"""Which blocks an engine has said that it stored, and what is before each of them.

Blocks that it has, and some that it had: with two copies of a block, vLLM says that it is
removed when the first of them is, and goes on behind the other.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import repeat
from typing import NamedTuple

from kvatlas.pool.events import BlockHash, BlockStored
from kvatlas.pool.traces.content_ids import ROOT, hash_after, id_of

MOST_BLOCKS = 4 << 20
"""Blocks that an engine may have at a time, so that reading takes about 1 GB: 64 million tokens
in blocks of 16."""
REMEMBERED = 1 << 18
"""Blocks that are remembered behind their removal."""


class StoredBlock:
    """A block, behind the one before it. An engine has millions, so it is as small as it can be."""

    __slots__ = ("before", "content", "name")

    def __init__(
        self, name: BlockHash | None, content: bytes | None, before: StoredBlock | None
    ) -> None:
        self.name = name
        """The engine's own hash; None of the beginning of all prompts."""
        self.content = content
        """Our hash of everything up to its end; None where not everything was seen."""
        self.before = before

    def ids(self) -> list[int]:
        """The ids of all blocks up to this one."""
        found, block = [], self
        while block.before is not None:
            if block.content is not None:
                found.append(id_of(block.content))
            block = block.before
        return found[::-1]


BEGINNING = StoredBlock(None, ROOT, None)


class Addition(NamedTuple):
    """What an event has added."""

    before: StoredBlock
    last: StoredBlock
    new: bool
    """Whether any of its blocks was not there before."""


class ContradictionError(ValueError):
    """An engine's events contradict each other."""


class TooManyBlocksError(ValueError):
    """An engine has more blocks than are remembered."""


class StoredBlocks:
    """The blocks of one engine, by its own hashes."""

    def __init__(self) -> None:
        self._there: dict[BlockHash, StoredBlock] = {}
        self._removed: OrderedDict[BlockHash, StoredBlock] = OrderedDict()
        """The longest ago removed first."""

    def _before(self, event: BlockStored) -> StoredBlock:
        """What the blocks of an event are behind; of unknown content where nobody has seen it."""
        name = event.parent_block_hash
        if name is None:
            return BEGINNING
        found = self._there.get(name)
        if found is None:
            found = self._removed.get(name) or StoredBlock(name, None, None)
            self._use(found)
        return found

    def _use(self, block: StoredBlock | None) -> None:
        """Remember a removed block, and those before it, for as long as if it were removed now."""
        while block is not None and block.name is not None and block.name in self._removed:
            self._removed.move_to_end(block.name)
            block = block.before

    def store(self, event: BlockStored) -> Addition:
        """Take an event's blocks in."""
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
                raise ContradictionError(f"hash {name!r} for other tokens than before")
            self._there[name] = block = known
        if len(self._there) > MOST_BLOCKS:
            raise TooManyBlocksError(f"more than {MOST_BLOCKS:,} blocks that were never removed")
        return Addition(before, block, new)

    def remove(self, names: list[BlockHash]) -> None:
        """These can be found no more. What an engine removes may never have been seen."""
        for name in names:
            block = self._there.pop(name, None)
            if block is not None:
                self._removed[name] = block
        while len(self._removed) > REMEMBERED:
            self._removed.popitem(last=False)

    def clear(self) -> None:
        """Nothing can be found any more."""
        self.remove(list(self._there))
