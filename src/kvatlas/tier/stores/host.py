"""`HostStore`: objects in the memory of this process, with LRU eviction."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.geometry.integers import natural
from kvatlas.tier.stores.base import (
    ABSENT,
    ObjectStore,
    Parts,
    StoreRoom,
    joined_size,
    key_of,
    read_into,
    tenant_of,
)


class TenantObjects:
    """The objects of one tenant, least recently used first, and their total size."""

    def __init__(self) -> None:
        self.names: OrderedDict[str, None] = OrderedDict()
        self.used = 0


class HostStore(ObjectStore):
    """Objects in memory, up to `capacity` bytes, with at most `quota` bytes per tenant.

    >>> store, object = HostStore(capacity=8), np.arange(4, dtype=np.uint8)
    >>> store.put([("a", [object]), ("b", [object])]), store.put([("c", [object])])
    ([True, True], [True])
    >>> store.exists(["a", "b", "c"]), store.capacity()
    ([False, True, True], StoreRoom(used=8, total=8, objects=2))
    """

    def __init__(self, capacity: int = 1 << 30, quota: int = 0) -> None:
        self._capacity, self._used = natural(capacity, "the capacity of a store"), 0
        self._quota = natural(quota, "the quota of a tenant") or capacity
        self._objects: OrderedDict[str, Bytes] = OrderedDict()
        self._tenants: defaultdict[str, TenantObjects] = defaultdict(TenantObjects)
        self._keys: defaultdict[str, set[str]] = defaultdict(set)
        """The names of the objects of each key, by the part that `key_of` returns."""
        self._lock = threading.Lock()

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        return [self._put(name, parts) for name, parts in objects]

    def _put(self, name: str, parts: Parts) -> bool:
        size = joined_size(parts)
        if size > min(self._capacity, self._quota):
            return False
        made = np.concatenate(parts)
        with self._lock:
            if name in self._objects:
                self._use(name)
                return True
            tenant = tenant_of(name)
            while self._tenants[tenant].used + size > self._quota:
                self._forget(next(iter(self._tenants[tenant].names)))
            while self._used + size > self._capacity:
                self._forget(next(iter(self._objects)))
            own = self._tenants[tenant]
            self._objects[name] = made
            self._used += size
            own.names[name] = None
            own.used += size
            self._keys[key_of(name)].add(name)
        return True

    def _use(self, name: str) -> None:
        """Mark an object as the most recently used."""
        self._objects.move_to_end(name)
        self._tenants[tenant_of(name)].names.move_to_end(name)

    def _forget(self, name: str) -> None:
        size, tenant = self._objects.pop(name).nbytes, tenant_of(name)
        own = self._tenants[tenant]
        del own.names[name]
        self._used -= size
        own.used -= size
        if not own.names:
            del self._tenants[tenant]
        key = key_of(name)
        self._keys[key].discard(name)
        if not self._keys[key]:
            del self._keys[key]

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        return [read_into(parts, self._find(name)) for name, parts in objects]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""
        with self._lock:
            return [name in self._objects for name in names]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        with self._lock:
            there = [name for name in dict.fromkeys(names) if name in self._objects]
            for name in there:
                self._forget(name)
        return len(there)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        with self._lock:
            among = self._keys.get(key, ()) if (key := key_of(prefix)) else self._objects
            return iter([name for name in among if name.startswith(prefix)])

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        with self._lock:
            found = self._objects.get(name)
        return ABSENT if found is None else found.nbytes

    def close(self) -> None:
        """Do nothing: the store holds no resources."""

    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""
        with self._lock:
            return StoreRoom(self._used, self._capacity, len(self._objects))

    def _find(self, name: str) -> Bytes | None:
        with self._lock:
            if name in self._objects:
                self._use(name)
            return self._objects.get(name)
