"""Transports by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvatlas.wire.transports.base import Transport
from kvatlas.wire.transports.errors import coded_limits, failed

_CLASSES = {
    "cuda": "CudaTransport",
    "nixl": "NixlTransport",
    "mooncake": "MooncakeTransport",
    "tcp": "TcpTransport",
    "shm": "ShmTransport",
    "memory": "MemoryTransport",
    "file": "FileTransport",
}
TRANSPORT_NAMES = tuple(_CLASSES)
"""The transports in order of preference: first the fastest, then those with the widest reach."""


def make_transport(name: str, /, **options: Any) -> Transport:
    """Return a new transport by name, with the options of its class.

    >>> make_transport("memory").name
    'memory'
    >>> make_transport("pigeon")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: There is no such transport. Got 'pigeon'. \
Choose one of cuda, nixl, mooncake, tcp, shm, memory, file. [wire_failed]
    """
    if name not in _CLASSES:
        hint = f"Choose one of {', '.join(TRANSPORT_NAMES)}"
        raise failed(repr(name), hint, "There is no such transport")
    module = import_module(f"kvatlas.wire.transports.{name}")
    with coded_limits():
        transport: Transport = getattr(module, _CLASSES[name])(**options)
    return transport
