"""What a process has open, and how much of it agents explain that were given up for good."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.wire import Memory, Transport, make_transport
from tests.attack.plans import Wire
from tests.wire.forking import forked

Open = dict[str, int]
"""Descriptors, and segments of shared memory that are mapped."""
_SHARED = Path("/dev/shm")  # noqa: S108


def open_things() -> Open:
    """What this process has open."""
    maps = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = (f"{_SHARED}/", "/memfd:")
    segments = {line[4] for line in maps if len(line) == 6 and line[5].startswith(shared)}
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "segments": len(segments)}


def opened_since(before: Open) -> Open:
    """What this process has open that it had not."""
    return {what: many - before[what] for what, many in open_things().items()}


def unused_segments() -> set[str]:
    """Names of shared memory of this host that no process has mapped."""
    names = {str(path) for path in _SHARED.iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text()
            names -= {name for name in names if name in text}
    return names


class RetiredAgents:
    """What agents of NIXL hold that are never destroyed: measured, in a process of its own."""

    def __init__(self, wire: Wire) -> None:
        process, pipe = forked(_measure, wire.settings)
        assert pipe.poll(60), "the process that measures agents says nothing"
        self.first: Open
        self.each: Open
        self.first, self.each = json.loads(pipe.recv_bytes())
        pipe.close()
        process.join()

    def hold(self, many: int) -> Open:
        """What so many hold: the first one also what UCX keeps while there is any."""
        more = max(0, many - 1)
        return {what: min(many, 1) * self.first[what] + more * self.each[what]
                for what in self.first}  # fmt: skip


def _measure(told: Connection, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    _keep_agents(1)  # opens what is kept open from then on
    before = open_things()
    agents = _keep_agents(2)
    two = opened_since(before)
    agents.pop()
    first = opened_since(before)
    each = {what: two[what] - first[what] for what in two}
    told.send_bytes(json.dumps([first, each]).encode())


def _keep_agents(many: int) -> list[Any]:
    """Agents that have met a peer, all that is left of their transport and the peer's."""
    (near, _near_memory), (far, _far_memory) = _transport(), _transport()
    agents = []
    for _ in range(many):
        link: Any = near.connect(far.publish(), far.reachable)
        agents.append(link.agent)
        link.close()
    near.close()
    far.close()
    return agents


def _transport() -> tuple[Transport, Bytes]:
    transport, memory = make_transport("nixl"), np.zeros(1 << 16, np.uint8)
    transport.register({0: Memory(memory.ctypes.data, memory.nbytes)})
    return transport, memory
