"""The other process: a transport with guarded pools that does what its tester says."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory import STAGING
from kvatlas.wire import Memory, Transport, make_transport
from kvatlas.wire.transports.shared_memory import create_segment

GUARD = 4099
SIZES = {0: 300_007, 1: 65_536, STAGING: 20_001}


class End:
    """A transport and one buffer: guard, region, guard, region, guard..."""

    def __init__(self, name: str, options: dict[str, Any], sizes: dict[int, int]) -> None:
        self.transport: Transport = make_transport(name, **options)
        self.offsets: dict[int, int] = {}
        stop = GUARD
        for pool, size in sizes.items():
            self.offsets[pool] = stop
            stop += size + GUARD
        self.sizes, self.total = sizes, stop
        self.segment = create_segment(stop) if name == "shm" else None
        self.bytes: NDArray[np.uint8] = (
            np.frombuffer(self.segment, np.uint8) if self.segment else np.zeros(stop, np.uint8)
        )
        base = self.bytes.ctypes.data
        self.regions = {
            pool: Memory(base + start, sizes[pool]) for pool, start in self.offsets.items()
        }
        self.transport.register(self.regions)

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.total, dtype=np.uint8)

    def close(self) -> int:
        self.transport.close()
        self.transport.close()
        return self.transport.registered

    def drop(self) -> None:
        """Free the shared memory too."""
        self.close()
        if self.segment is not None:
            self.bytes = np.zeros(0, np.uint8)
            self.segment.close()


def main(
    tester: Connection,
    name: str,
    options: dict[str, Any],
    sizes: dict[int, int],
    settings: dict[str, str],
) -> None:
    """Be the other end until told to exit, or until nobody tells it anything any more."""
    # The server that this was forked from may have been started in the midst of another test.
    for left_over in [one for one in os.environ if one.startswith("UCX_")]:
        del os.environ[left_over]
    os.environ.update(settings)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for noisy in (1, 2):  # libraries print what they like
        os.dup2(nowhere, noisy)
    end = End(name, options, sizes)
    tester.send((end.transport.publish(), end.regions))
    while True:
        try:
            word, *rest = tester.recv()
        except (EOFError, OSError):
            word, rest = "exit", []
        if word == "exit":
            return end.drop()
        if word == "fill":
            end.fill(rest[0])
            tester.send(True)
        elif word == "bytes":
            tester.send(end.bytes.tobytes())
        elif word == "close":
            tester.send(end.close())
