"""Calls of the system that fail, for tests of tiers in files."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying import file_runs
from kvatlas.tier import Tier
from tests.planning.models import SMALL
from tests.tier.world import tier_plan

DENSE = SMALL["dense"]
TOKENS = 64
CODES = {
    errno.EIO: Code.UNREADABLE,
    errno.ENOSPC: Code.NOT_ENOUGH_MEMORY,
    errno.EDQUOT: Code.NOT_ENOUGH_MEMORY,
}


def kept(blocks: int = 6) -> Any:
    return tier_plan(DENSE, max_len=TOKENS, memory=8192 * blocks)


def code_of(act: Any, *arguments: Any, **options: Any) -> Code:
    with pytest.raises(AtlasError) as refusal:
        act(*arguments, **options)
    return refusal.value.code


def rows_agree(tier: Tier) -> None:
    """Every block is free, whole or being filled, once; nothing is pinned; the file says so too."""
    index = tier._index
    held = [*index._whole.values(), *index._filling.values()]
    assert not any(block.pins or block.writing for block in held)
    ids = index._free[0] + [block.block_id for block in held]
    assert sorted(ids) == list(range(tier.plan.pools[0].blocks))
    assert tier._file is not None
    said = {block.name for block in tier._file.recorded()}
    gone = {block.name for block, _ in index._uncleared.values()}
    assert set(index._whole) <= said <= set(index._whole) | gone


class Faulty:
    """Calls of the system that fail at the n-th time, and from then on."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, at: int, number: int) -> None:
        self.count, self.at, self.number = 0, at, number
        vectored = call.startswith("vectored ")
        name = call.removeprefix("vectored ")
        self.real = getattr(file_runs._system if vectored else os, name)
        patch.setattr(
            file_runs._system if vectored else os,
            name,
            self.vectored if vectored else self.plain,
        )

    def fails(self) -> bool:
        self.count += 1
        return self.count >= self.at

    def plain(self, *arguments: Any) -> Any:
        if self.fails():
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments)

    def vectored(self, *arguments: Any) -> Any:
        if self.fails():
            ctypes.set_errno(self.number)
            return -1
        return self.real(*arguments)
