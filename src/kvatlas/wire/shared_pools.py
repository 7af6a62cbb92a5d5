"""Pools in shared memory that other processes of this user map and use as their own."""

from __future__ import annotations

from collections.abc import Mapping

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.errors import bad_metadata
from kvatlas.wire.transports.shm import ShmTransport, map_published
from kvatlas.wire.transports.shm_sockets import hang_up


class SharedPools:
    """Pools of this process, given to whoever has what is `published`.

    >>> import numpy as np
    >>> from kvatlas.wire.transports.shm import create_segment
    >>> segment = create_segment(64)
    >>> shared = SharedPools({0: segment.memory})
    >>> mapped = map_pools(shared.published, {0: 64})
    >>> segment[3] = 7
    >>> int(mapped[0][3])
    7
    >>> shared.close()
    """

    def __init__(self, memory: Mapping[int, Memory]) -> None:
        self._transport = ShmTransport()
        self._transport.register(memory)
        for pool in memory:
            if not self._transport.shares(pool):
                self._transport.close()
                problem = "Other processes cannot reach memory that is not shared"
                hint = "Allocate it with pools_for(plan, 0, make_transport('shm'))"
                raise AtlasError(Code.WRONG_DEVICE, problem, got=f"pool {pool}", hint=hint)
        self.published = self._transport.publish()

    def close(self) -> None:
        """Give them to nobody else; who has them keeps them."""
        self._transport.close()


def map_pools(published: bytes, sizes: Mapping[int, int]) -> dict[int, Bytes]:
    """The pools of another process, by index, all of them as large as is said here."""
    connection, mapped = map_published(published, sizes)
    hang_up(connection)
    if mapped.keys() != sizes.keys():
        raise bad_metadata(f"pools {sorted(mapped)} where there are {sorted(sizes)}")
    return mapped
