"""Transports by their names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvatlas.wire.transports.base import Transport
from kvatlas.wire.transports.errors import failed

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
"""In the order of preference: first what runs fastest, then what reaches furthest."""


def make_transport(name: str, /, **options: Any) -> Transport:
    """A transport by its name, with the options of its class.

    >>> make_transport("memory").name
    'memory'
    >>> make_transport("pigeon")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The transport failed. Got no transport 'pigeon'. \
Choose one of cuda, nixl, mooncake, tcp, shm, memory, file. [wire_failed]
    """
    if name not in _CLASSES:
        raise failed(f"no transport {name!r}", f"Choose one of {', '.join(TRANSPORT_NAMES)}")
    module = import_module(f"kvatlas.wire.transports.{name}")
    transport: Transport = getattr(module, _CLASSES[name])(**options)
    return transport
