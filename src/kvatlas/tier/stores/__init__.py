"""Object stores: named objects in memory, in a folder, or in a store that hosts share."""

from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.encrypted import EncryptedStore
from kvatlas.tier.stores.folder import FolderStore
from kvatlas.tier.stores.host import HostStore
from kvatlas.tier.stores.key_folder import KeyFolder
from kvatlas.tier.stores.mooncake import MooncakeStore
from kvatlas.tier.stores.objects import BucketStore
from kvatlas.tier.stores.redis import RedisStore

__all__ = [
    "ABSENT",
    "BucketStore",
    "EncryptedStore",
    "FolderStore",
    "HostStore",
    "KeyFolder",
    "MooncakeStore",
    "ObjectStore",
    "Parts",
    "RedisStore",
    "StoreRoom",
    "joined_size",
]
