"""The tiers: what one topology stored, another can fetch, on one host or from a fleet's store."""

from kvatlas.tier.hit import Hit
from kvatlas.tier.index import StoreResult
from kvatlas.tier.namespaces import CacheIdentity
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.stores import FolderStore, HostStore, MooncakeStore, ObjectStore
from kvatlas.tier.tier import Tier

__all__ = [
    "CacheIdentity",
    "FolderStore",
    "Hit",
    "HostStore",
    "MooncakeStore",
    "ObjectStore",
    "StoreHit",
    "StoreResult",
    "StoreTier",
    "Tier",
]
