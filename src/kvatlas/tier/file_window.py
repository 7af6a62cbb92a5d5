"""`Window`: staging memory for a tier's file, for transports that require addresses."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import round_up
from kvatlas.tier.format import PAGE
from kvatlas.wire import Memory

_MAP_NORESERVE = 0x4000
"""Reserve addresses without memory. Python 3.11's `mmap` lacks this constant."""


class Window:
    """Staging memory as large as the file's pools, for transports that copy to and from addresses.

    Only pages that were used take memory. While no caller uses the window, the system may reclaim
    its pages.
    """

    def __init__(self, places: Mapping[int, Memory]) -> None:
        self._places = places
        self._map: mmap.mmap | None = None
        self._pools: dict[int, Bytes] = {}
        self._users = 0
        self._lock = threading.Lock()

    @property
    def pools(self) -> dict[int, Bytes]:
        """Return the memory of each pool."""
        with self._lock:
            if self._map is None:
                self._map = self._mapped()
                at, everything = 0, np.frombuffer(self._map, np.uint8)
                for index, place in self._places.items():
                    self._pools[index] = everything[at : at + place.nbytes]
                    at = round_up(at + place.nbytes, PAGE)
            return self._pools

    def _mapped(self) -> mmap.mmap:
        nbytes = sum(round_up(place.nbytes, PAGE) for place in self._places.values())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            return mmap.mmap(-1, nbytes, flags=flags)
        except OSError as problem:
            text = "The address space for staging memory cannot be reserved"
            got = f"a reservation of {nbytes:,} bytes: {problem}"
            hint = "Store and fetch without carry=, or plan the tier with less memory"
            raise AtlasError(Code.NOT_ENOUGH_MEMORY, text, got=got, hint=hint) from problem

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the content of the window during the context.

        Outside such contexts the system may reclaim its pages, and their content is lost.
        """
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._map is not None and not self._users:
                    # The mapping remains, so memory that is registered with a device stays valid.
                    self._map.madvise(mmap.MADV_FREE)

    def close(self) -> None:
        """Release the memory, which is unmapped when its last view is deleted."""
        with self._lock:
            self._pools, self._map = {}, None
