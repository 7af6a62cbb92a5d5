"""Tiers: storage for prefixes outside the GPU, in host memory, a file or an object store.

Blocks that were stored from one topology can be fetched into any other.
"""

from kvatlas.tier.chained_keys import prefix_keys
from kvatlas.tier.converting import Converting
from kvatlas.tier.opening import open_store, open_tier
from kvatlas.tier.prefix_finder import PrefixFinder
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.server import TierServer
from kvatlas.tier.served.sharing import share_file, share_memory
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.stores import (
    BucketStore,
    EncryptedStore,
    FolderStore,
    HostStore,
    KeyFolder,
    MooncakeStore,
    ObjectStore,
    RedisStore,
)
from kvatlas.tier.tier import Tier
from kvatlas.tier.tier_events import TierEvents

__all__ = [
    "BucketStore",
    "Converting",
    "EncryptedStore",
    "FolderStore",
    "HostStore",
    "KeyFolder",
    "MooncakeStore",
    "ObjectStore",
    "PrefixFinder",
    "RedisStore",
    "StoreTier",
    "Tier",
    "TierClient",
    "TierEvents",
    "TierServer",
    "open_store",
    "open_tier",
    "prefix_keys",
    "share_file",
    "share_memory",
]
