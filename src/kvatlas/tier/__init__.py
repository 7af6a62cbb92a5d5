"""Tiers: storage for prefixes outside the GPU, in host memory, a file or an object store.

Blocks that were stored from one topology can be fetched into any other.
"""

from kvatlas.tier.chained_keys import BlockKeys, PrefixChain, prefix_keys
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.file_owner import socket_beside
from kvatlas.tier.hit import Hit
from kvatlas.tier.index import StoreResult
from kvatlas.tier.opening import (
    is_store,
    open_store,
    open_store_tier,
    open_tier,
    other_rows,
    stored_as,
)
from kvatlas.tier.prefix_finder import AnyTier, PrefixFinder
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.server import TierServer
from kvatlas.tier.served.sharing import share_file, share_memory
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.store_inspection import (
    NamespaceSummary,
    collect_garbage,
    export_objects,
    import_objects,
    summaries,
    verify,
)
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.stored_rows import OtherRows
from kvatlas.tier.stores import FolderStore, HostStore, MooncakeStore, ObjectStore
from kvatlas.tier.tier import Tier
from kvatlas.tier.tier_events import MEMORY, STORAGE, EventListener, TierEvents, block_hash

__all__ = [
    "MEMORY",
    "STORAGE",
    "AnyTier",
    "BlockKeys",
    "Converting",
    "EventListener",
    "FolderStore",
    "Hit",
    "HostStore",
    "MooncakeStore",
    "NamespaceSummary",
    "ObjectStore",
    "OtherRows",
    "PrefixChain",
    "PrefixFinder",
    "StoreHit",
    "StoreResult",
    "StoreTier",
    "Tier",
    "TierClient",
    "TierEvents",
    "TierRoutes",
    "TierServer",
    "block_hash",
    "collect_garbage",
    "export_objects",
    "import_objects",
    "is_store",
    "open_store",
    "open_store_tier",
    "open_tier",
    "other_rows",
    "prefix_keys",
    "share_file",
    "share_memory",
    "socket_beside",
    "stored_as",
    "summaries",
    "verify",
]
