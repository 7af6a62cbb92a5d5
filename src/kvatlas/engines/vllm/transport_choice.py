"""The transport that the setting `auto` selects: the fastest that reaches the engine's peers."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec

from kvatlas.engines.vllm.settings import AUTO, ConnectorSettings
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.nixl_agents import nixl_installed, rdma_devices


class TransportChoice(NamedTuple):
    """A transport, its options, and the reason for the choice."""

    name: str
    options: dict[str, Any]
    why: str

    def applied_to(self, settings: ConnectorSettings) -> ConnectorSettings:
        """Return the settings with this transport and its options."""
        return msgspec.structs.replace(
            settings, transport=self.name, transport_options=self.options
        )


def choose_transport(settings: ConnectorSettings, *, on_gpu: bool) -> TransportChoice:
    """Return the transport that an engine uses: the configured one, or the choice of `auto`.

    `on_gpu` is true if the engine's caches are in GPU memory, false if they are in host memory. If
    only processes of the same host can reach the engine, `auto` chooses `cuda` for GPU memory and
    `shm` for host memory. If other hosts can reach the engine, `auto` chooses `nixl` if this host
    has NIXL and an RDMA device. Without these, it chooses `tcp` for host memory, and raises an
    error for GPU memory.

    >>> choose_transport(ConnectorSettings(), on_gpu=False)
    TransportChoice(name='shm', options={}, why='all peers are on this host')
    >>> choose_transport(ConnectorSettings(transport="mooncake"), on_gpu=False).name
    'mooncake'
    """
    if settings.transport != AUTO:
        return TransportChoice(settings.transport, settings.transport_options, "as configured")
    if settings.local:
        name = "cuda" if on_gpu else "shm"
        return TransportChoice(name, {}, "all peers are on this host")
    devices = rdma_devices()
    if devices and nixl_installed():
        options = {} if "UCX_NET_DEVICES" in os.environ else {"device": f"{devices[0]}:1"}
        kind = {"kind": "VRAM"} if on_gpu else {}
        return TransportChoice("nixl", options | kind, f"RDMA device {devices[0]}")
    missing = "nixl is not installed" if devices else "this host has no RDMA device"
    if on_gpu:
        raise AtlasError(
            Code.WRONG_DEVICE,
            "No transport of this host can move caches in GPU memory to another host",
            got=f"transport 'auto', caches in GPU memory, and {missing}",
            hint="Install nixl on hosts with RDMA devices. If all engines are on this host, listen "
            "on 127.0.0.1",
        )
    return TransportChoice("tcp", {"host": settings.own_address}, missing)
