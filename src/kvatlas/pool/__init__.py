"""Block pool and prefix caching: allocate block ids, reuse their content and evict them.

`BlockPool` is for engines: block tables for every group of a plan, prefix reuse, fork and
preemption, with the policies in `checkpoints` and `eviction`. `kvatlas.simulate` replays traces.
"""

from kvatlas.pool.block_ids import NO_BLOCK, BlockIds
from kvatlas.pool.block_pool import BlockPool
from kvatlas.pool.checkpoints import CHECKPOINTS, Checkpoints, checkpoint_policy
from kvatlas.pool.event_recording import EventRecording
from kvatlas.pool.event_stream import EventPublisher, EventSubscriber, ReceivedBatch
from kvatlas.pool.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kvatlas.pool.eviction import EVICTIONS, Eviction
from kvatlas.pool.prefix_hash import HashChain, PrefixIdentity
from kvatlas.pool.reservation import CopyOnWrite, Reservation

__all__ = [
    "CHECKPOINTS",
    "EVICTIONS",
    "NO_BLOCK",
    "AllBlocksCleared",
    "BlockEvent",
    "BlockIds",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "Checkpoints",
    "CopyOnWrite",
    "EventBatch",
    "EventPublisher",
    "EventRecording",
    "EventSubscriber",
    "Eviction",
    "HashChain",
    "PrefixIdentity",
    "ReceivedBatch",
    "Reservation",
    "checkpoint_policy",
]
