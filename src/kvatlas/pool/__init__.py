"""Block ids: dealt out to requests, found again by what they hold, and evicted.

`BlockPool` is for engines: block tables for every group of a plan, prefix reuse, fork and
preemption. `checkpoints` and `eviction` are its policies, one a file.
"""

from kvatlas.pool.block_ids import GONE, BlockIds
from kvatlas.pool.block_pool import BlockPool, CopyOnWrite, Reservation
from kvatlas.pool.checkpoints import CHECKPOINTS, Checkpoints, checkpoint_policy
from kvatlas.pool.eviction import EVICTIONS, Eviction
from kvatlas.pool.prefix_hash import HashChain, PrefixIdentity

__all__ = [
    "CHECKPOINTS",
    "EVICTIONS",
    "GONE",
    "BlockIds",
    "BlockPool",
    "Checkpoints",
    "CopyOnWrite",
    "Eviction",
    "HashChain",
    "PrefixIdentity",
    "Reservation",
    "checkpoint_policy",
]
