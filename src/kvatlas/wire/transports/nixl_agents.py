"""NIXL agents: choose the library, make agents, and translate their errors."""

from __future__ import annotations

import importlib
import importlib.util
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.copying.memory import Memory
from kvatlas.errors import AtlasError
from kvatlas.wire.fork_safety import keep_in_children
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Guarantees
from kvatlas.wire.transports.nixl_metadata import Kind
from kvatlas.wire.transports.nixl_strided import Rows

PEER_LOST = "nixlRemoteDisconnectError"
"""The exceptions that NIXL raises after a connection to a peer broke."""
_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_DEVICES = "UCX_NET_DEVICES"
_LOOPBACK = "lo"
_RDMA = Path("/sys/class/infiniband")
_DESCRIPTORS = 64
"""Descriptors that must be free before an agent is made: UCX aborts if it runs out of them."""
_LONGEST_SLEEP = 5_000
"""The maximum sleep of a thread that serves peers, in microseconds. Incoming data wakes it."""
_ON_ONE_HOST = {"all", "sm", "shm", "cma"}
"""UCX transports that read from processes on the same host one-sidedly."""


class Agents:
    """Makes the agents of one transport, all with the same options."""

    def __init__(
        self, kind: Kind, backend: str, device: str | None, *, over_tcp: bool = False
    ) -> None:
        self._library = _library()
        self.kind, self.backend = kind, backend
        self._device = _network_device(device)
        if backend == "UCX" and not over_tcp and _reads_over_tcp(self._device):
            raise errors.failed(
                f"device {self._device!r} without RDMA",
                hint='Use the transport "tcp", or pass over_tcp=True to accept that',
                problem="UCX over TCP may abort a process whose readers die",
            )
        loopback = backend == "UCX" and self._device == _LOOPBACK
        self.beyond_host = "" if loopback else f"{backend} on {self._device}"
        """The device at which other hosts reach its agents; empty if they cannot."""
        self.guarantees = Guarantees()
        """Over RDMA, peers need the keys of its memory. Over TCP, UCX checks none."""
        if backend == "UCX" and _over_rdma(self._device):
            self.guarantees = Guarantees(authentication=True)
        elif loopback and not _reads_over_tcp(self._device):
            self.guarantees = Guarantees(confidentiality=True, integrity=True)
        self.by_cpu = backend == "UCX" and kind == "DRAM" and not _has_rdma()
        """Whether bytes arrive only during calls to an agent of this process."""

    def make(self, name: str, *, serves: bool) -> Any:
        """Make an agent. An agent that serves peers does so from its own thread."""
        errors.check_descriptors(_DESCRIPTORS)
        strict = self._library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = self._library.nixl_agent_config(
            enable_prog_thread=serves, backends=[], sync_mode=strict
        )
        options = {"engine_config": f"NET_DEVICES={self._device}"} if self.backend == "UCX" else {}
        try:
            agent = keep_in_children(self._library.nixl_agent(name, config))
            if serves:
                agent.agent = self._serving(name)
            agent.create_backend(self.backend, options)
        except Exception as problem:
            got = f"backend {self.backend!r} on {self._device!r}: {problem}"
            hint = "Use a backend that NIXL includes, and a network device of this machine"
            raise errors.failed(got, hint, "NIXL cannot create its backend") from problem
        return agent

    def _serving(self, name: str) -> Any:
        """What is below an agent that serves: its thread sleeps until a peer wants something.

        NIXL's own interface sets no pause, and its thread then never sleeps: a whole core.
        """
        below = self._library.nixlBind
        config = below.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _LONGEST_SLEEP
        config.syncMode = self._library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
        return below.nixlAgent(name, config)


def not_empty(memory: Mapping[int, Memory]) -> dict[int, Memory]:
    """Leave out empty regions, which NIXL does not accept."""
    return {pool: region for pool, region in memory.items() if region.nbytes}


def rows_of(memory: Mapping[int, Memory]) -> Rows:
    """Convert regions to the rows that NIXL takes."""
    regions = [(region.address, region.nbytes, region.number) for region in memory.values()]
    return np.array(regions, dtype=np.uint64)


@contextmanager
def translated() -> Iterator[None]:
    """A context that translates NIXL's exceptions into kvatlas errors."""
    try:
        yield
    except AtlasError:
        raise
    except Exception as problem:
        # What is kept of a failure must not keep the agent, whose end is waited for.
        traceback.clear_frames(problem.__traceback__)
        name = type(problem).__name__
        fault = errors.peer_lost if name == PEER_LOST else errors.failed
        raise fault(f"{name}: {problem}") from problem


def _network_device(wanted: str | None) -> str:
    """The device for UCX, which lets its own setting go before all others."""
    setting = os.environ.get(_DEVICES)
    if wanted is not None and setting not in (None, wanted):
        got = f"device={wanted!r} and {_DEVICES}={setting}"
        problem = "The network device is specified twice, with different values"
        raise errors.failed(got, f"Unset {_DEVICES}, or omit device=", problem)
    return wanted or setting or _LOOPBACK


def _reads_over_tcp(device: str) -> bool:
    """Whether UCX has nothing but TCP to read from some peers with.

    It then has the process that is read from send the bytes, and aborts that process where
    the connection breaks before the first of them: `ucp_request_send` takes no such error.
    """
    devices = [name.partition(":")[0] for name in device.split(",")]
    if _has_rdma() and ("all" in devices or any((_RDMA / name).exists() for name in devices)):
        return False
    named = set(os.environ.get("UCX_TLS", "all").split(","))
    own_host = bool(named & _ON_ONE_HOST) or any(name.startswith("^") for name in named)
    return devices != [_LOOPBACK] or not own_host


def _over_rdma(device: str) -> bool:
    """Whether UCX uses RDMA devices alone."""
    devices = [name.partition(":")[0] for name in device.split(",")]
    return _has_rdma() and all((_RDMA / name).exists() for name in devices)


def _library() -> Any:
    """NIXL's interface.

    The package `nixl` imports all of torch to choose between the builds that are
    installed. Where there is one, there is nothing to choose.
    """
    _without_rdma()
    # UCX warns of operations that end with their agent, which is what it is ended for.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    builds = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
    chosen = builds[0] if len(builds) == 1 else "nixl"
    try:
        return importlib.import_module(f"{chosen}._api")
    except ImportError as problem:
        raise errors.cannot_import("nixl", problem) from problem


def _without_rdma() -> None:
    """Keep UCX from loading its RDMA module on hosts without such a device.

    Where the system's own libibverbs is installed too, two copies of what it needs are
    loaded then, and the process crashes when it exits.
    """
    if not _has_rdma():
        os.environ.setdefault("UCX_MODULES", "^ib")


def _has_rdma() -> bool:
    return _RDMA.is_dir() and any(_RDMA.iterdir())
