"""NIXL agents: import the library, create agents, and translate their errors."""

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
"""The name of the exception that NIXL raises after a connection to a peer broke."""
_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_DEVICES = "UCX_NET_DEVICES"
_LOOPBACK = "lo"
_RDMA = Path("/sys/class/infiniband")
_DESCRIPTORS = 64
"""Descriptors that must be free before an agent is created: without one, UCX aborts."""
_LONGEST_SLEEP = 5_000
"""The maximum sleep in microseconds of a thread that serves peers. Incoming data wakes it."""
_ON_ONE_HOST = {"all", "sm", "shm", "cma"}
"""UCX transports (UCX_TLS) that can read another process's memory without its participation."""


class Agents:
    """Creates the agents of one transport, all with the same options."""

    def __init__(
        self, kind: Kind, backend: str, device: str | None, *, over_tcp: bool = False
    ) -> None:
        self._library = _library()
        self.kind, self.backend = kind, backend
        self._device = _network_device(device)
        if backend == "UCX" and not over_tcp and _needs_tcp(self._device):
            raise errors.failed(
                f"device={self._device!r}, which has no RDMA",
                hint='Use the transport "tcp", or pass over_tcp=True to accept the risk',
                problem="UCX over TCP may abort this process if a peer that reads from it dies",
            )
        loopback = backend == "UCX" and self._device == _LOOPBACK
        self.beyond_host = "" if loopback else f"{backend} on {self._device}"
        """The device at which other hosts reach the agents; empty if they cannot."""
        self.guarantees = Guarantees()
        """Over RDMA, peers need the keys of the agents' memory. Over TCP, UCX checks no keys."""
        if backend == "UCX" and _over_rdma(self._device):
            self.guarantees = Guarantees(authentication=True)
        elif loopback and not _needs_tcp(self._device):
            self.guarantees = Guarantees(confidentiality=True, integrity=True)
        self.by_cpu = backend == "UCX" and kind == "DRAM" and not rdma_devices()
        """Whether the CPU moves the bytes, during calls to an agent of this process."""

    def make(self, name: str, *, serves: bool) -> Any:
        """Return a new agent. If `serves` is true, the agent has a thread that serves peers."""
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
        """Return the native object of an agent whose thread sleeps until a peer needs it.

        An agent of NIXL's Python interface has a thread that polls and occupies a whole core.
        """
        below = self._library.nixlBind
        config = below.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _LONGEST_SLEEP
        config.syncMode = self._library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
        return below.nixlAgent(name, config)


def not_empty(memory: Mapping[int, Memory]) -> dict[int, Memory]:
    """Return the regions that are not empty. NIXL does not accept empty regions."""
    return {pool: region for pool, region in memory.items() if region.nbytes}


def rows_of(memory: Mapping[int, Memory]) -> Rows:
    """Return regions as the rows (address, length, device) that NIXL expects."""
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
        # A stored error must not keep the agent alive through the frames of its traceback.
        traceback.clear_frames(problem.__traceback__)
        name = type(problem).__name__
        fault = errors.peer_lost if name == PEER_LOST else errors.failed
        raise fault(f"{name}: {problem}") from problem


def _network_device(wanted: str | None) -> str:
    """Return the network device for UCX: `wanted`, `UCX_NET_DEVICES`, or else the loopback device.

    Raise an error if both are given and differ: UCX would ignore `wanted`.
    """
    setting = os.environ.get(_DEVICES)
    if wanted is not None and setting not in (None, wanted):
        got = f"device={wanted!r} and {_DEVICES}={setting}"
        problem = "The network device is specified twice, with different values"
        raise errors.failed(got, f"Unset {_DEVICES}, or omit device=", problem)
    return wanted or setting or _LOOPBACK


def _needs_tcp(device: str) -> bool:
    """Whether there may be peers that UCX can reach only over TCP.

    Over TCP, the process that is read from has to send the bytes. UCX aborts that process if the
    connection breaks before the first byte: `ucp_request_send` does not handle that error.
    """
    devices = [name.partition(":")[0] for name in device.split(",")]
    if rdma_devices() and ("all" in devices or any((_RDMA / name).exists() for name in devices)):
        return False
    named = set(os.environ.get("UCX_TLS", "all").split(","))
    own_host = bool(named & _ON_ONE_HOST) or any(name.startswith("^") for name in named)
    return devices != [_LOOPBACK] or not own_host


def _over_rdma(device: str) -> bool:
    """Whether UCX uses only RDMA devices."""
    devices = [name.partition(":")[0] for name in device.split(",")]
    return bool(rdma_devices()) and all((_RDMA / name).exists() for name in devices)


def _library() -> Any:
    """Return NIXL's Python module.

    The package `nixl` imports torch to choose between the installed builds. If only one build is
    installed, it is imported directly.
    """
    _without_rdma()
    # UCX warns if an agent is destroyed with operations in flight, which is intended here.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    builds = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
    chosen = builds[0] if len(builds) == 1 else "nixl"
    try:
        return importlib.import_module(f"{chosen}._api")
    except ImportError as problem:
        raise errors.cannot_import("nixl", problem) from problem


def _without_rdma() -> None:
    """Keep UCX from loading its RDMA module on hosts without RDMA devices.

    If the system's libibverbs is installed too, two copies of its dependencies would be loaded, and
    the process would crash at exit.
    """
    if not rdma_devices():
        os.environ.setdefault("UCX_MODULES", "^ib")


def rdma_devices() -> list[str]:
    """Return the names of this host's RDMA devices, sorted."""
    return sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else []


def nixl_installed() -> bool:
    """Whether a build of NIXL is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("nixl", *_BUILDS))
