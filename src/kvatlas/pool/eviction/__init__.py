"""Eviction: which of the entries that nobody uses goes next. One policy a file."""

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
"""Every policy by the name that commands take."""

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
]
