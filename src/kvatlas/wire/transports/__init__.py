"""Transports: one interface over NIXL, Mooncake, shared memory, files and plain memory."""

from kvatlas.wire.transports.base import STAGING, Handle, Link, Memory, Transport
from kvatlas.wire.transports.registry import TRANSPORT_NAMES, make_transport

__all__ = ["STAGING", "TRANSPORT_NAMES", "Handle", "Link", "Memory", "Transport", "make_transport"]
