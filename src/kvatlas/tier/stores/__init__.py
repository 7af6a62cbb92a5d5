"""Object stores: named objects in host memory, in a folder or in Mooncake Store."""

from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.encrypted import EncryptedStore, KeyFolder
from kvatlas.tier.stores.folder import FolderStore
from kvatlas.tier.stores.host import HostStore
from kvatlas.tier.stores.mooncake import MooncakeStore

__all__ = [
    "ABSENT",
    "EncryptedStore",
    "FolderStore",
    "HostStore",
    "KeyFolder",
    "MooncakeStore",
    "ObjectStore",
    "Parts",
    "StoreRoom",
    "joined_size",
]
