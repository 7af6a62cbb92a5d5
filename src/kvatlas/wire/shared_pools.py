"""Pools in shared memory that other processes of this user can map."""

from __future__ import annotations

from collections.abc import Mapping

from kvatlas.copying.memory import Memory
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.errors import bad_metadata
from kvatlas.wire.transports.nonblocking_sockets import hang_up
from kvatlas.wire.transports.shm import ShmTransport, map_published


class SharedPools:
    """Shares pools of this process. Other processes of the same user map them with `map_pools`.

    `published` is the metadata that the other process needs.

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
                problem = "The pool is not in shared memory"
                hint = "Allocate the pool with pools_for(plan, rank, make_transport('shm'))"
                raise AtlasError(Code.WRONG_DEVICE, problem, got=f"pool {pool}", hint=hint)
        self.published = self._transport.publish()

    def close(self) -> None:
        """Stop sharing the pools with further processes. Existing mappings stay valid."""
        self._transport.close()


def map_pools(published: bytes, sizes: Mapping[int, int]) -> dict[int, Bytes]:
    """Map the pools of another process. Return them as bytes, by index.

    `published` is `SharedPools.published`. Raise `bad_handshake` if `sizes` are not the sizes of
    these pools.
    """
    connection, mapped = map_published(published, sizes)
    hang_up(connection)
    if mapped.keys() != sizes.keys():
        raise bad_metadata(f"pools {sorted(mapped)}, expected {sorted(sizes)}")
    return mapped
