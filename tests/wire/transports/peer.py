"""The other process: a transport with guarded pools that does what its tester says.

Run as a script. One JSON line in, one out; the first line out says how to connect.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.wire.transports.base import STAGING, Memory, Transport
from kvatlas.wire.transports.registry import make
from kvatlas.wire.transports.shared_memory import allocate

GUARD = 4099
SIZES = {0: 300_007, 1: 65_536, STAGING: 20_001}


class End:
    """A transport and one buffer: guard, region, guard, region, guard..."""

    def __init__(self, name: str, options: dict[str, Any], sizes: dict[int, int]) -> None:
        self.transport: Transport = make(name, **options)
        self.in_file = name == "file" and "name" in options
        self.offsets: dict[int, int] = {}
        stop = GUARD
        for pool, size in sizes.items():
            self.offsets[pool] = stop
            stop += size + GUARD
        self.sizes, self.total = sizes, stop
        self.segment = allocate(stop) if name == "shm" else None
        self.bytes: NDArray[np.uint8] = (
            np.frombuffer(self.segment, np.uint8) if self.segment else np.zeros(stop, np.uint8)
        )
        base = 0 if self.in_file else self.bytes.ctypes.data
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


def main() -> None:
    # Die with the tester, however it ends.
    ctypes.CDLL(None).prctl(1, 9)
    # Libraries print what they like: answers have the pipe to themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, options, sizes = json.loads(sys.argv[1])
    end = End(name, options, {int(pool): size for pool, size in sizes.items()})

    def say(what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    regions = {
        pool: (memory.address, memory.nbytes, memory.device) for pool, memory in end.regions.items()
    }
    say([base64.b64encode(end.transport.publish()).decode(), regions])
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "fill":
            end.fill(rest[0])
            say(True)
        elif word == "bytes":
            say(base64.b64encode(end.bytes.tobytes()).decode())
        elif word == "notes":
            say([base64.b64encode(note).decode() for note in end.transport.notes()])
        elif word == "close":
            say(end.close())
        elif word == "exit":
            end.drop()
            break


if __name__ == "__main__":
    main()
