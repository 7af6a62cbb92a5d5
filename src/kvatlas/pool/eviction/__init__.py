"""Eviction policies: the order in which unused entries are evicted. One policy per module."""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.eviction.base import Eviction, Ids, Use
from kvatlas.pool.eviction.fifo import Fifo
from kvatlas.pool.eviction.lfu import Lfu
from kvatlas.pool.eviction.lru import Lru
from kvatlas.pool.eviction.optimal import Optimal
from kvatlas.pool.eviction.s3_fifo import S3Fifo
from kvatlas.pool.eviction.saved_compute import SavedCompute

EVICTIONS: dict[str, type[Eviction]] = {
    "fifo": Fifo,
    "lru": Lru,
    "lfu": Lfu,
    "s3-fifo": S3Fifo,
    "saved-compute": SavedCompute,
    "optimal": Optimal,
}
"""All policies by their names on the command line."""


def eviction_policy(name: str) -> type[Eviction]:
    """Return the class of the policy of this name.

    >>> eviction_policy("lru")
    <class 'kvatlas.pool.eviction.lru.Lru'>
    """
    if name not in EVICTIONS:
        hint = f"Use one of {', '.join(EVICTIONS)}"
        problem = "There is no such eviction policy"
        raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(name[:60]), hint=hint)
    return EVICTIONS[name]


__all__ = [
    "EVICTIONS",
    "Eviction",
    "Fifo",
    "Ids",
    "Lfu",
    "Lru",
    "Optimal",
    "S3Fifo",
    "SavedCompute",
    "Use",
    "eviction_policy",
]
