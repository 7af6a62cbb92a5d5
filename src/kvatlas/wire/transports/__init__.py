"""Transports: one interface to CUDA IPC, NIXL, Mooncake, TCP, shared memory, files and memory."""

from kvatlas.wire.transports.base import HOST, STAGING, Handle, Link, Memory, Transport
from kvatlas.wire.transports.registry import TRANSPORT_NAMES, make_transport

__all__ = [
    "HOST",
    "STAGING",
    "TRANSPORT_NAMES",
    "Handle",
    "Link",
    "Memory",
    "Transport",
    "make_transport",
]
