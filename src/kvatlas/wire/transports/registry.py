"""Transports by their names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.base import Transport

_CLASSES = {
    "nixl": "NixlTransport",
    "mooncake": "MooncakeTransport",
    "shm": "ShmTransport",
    "memory": "MemoryTransport",
    "file": "FileTransport",
}
TRANSPORT_NAMES = tuple(_CLASSES)
"""In the order of preference: first what reaches furthest and runs fastest."""


def make_transport(name: str, /, **options: Any) -> Transport:
    """A transport by its name, with the options of its class.

    >>> make_transport("memory").name
    'memory'
    >>> try:
    ...     make_transport("pigeon")
    ... except AtlasError as refusal:
    ...     print(refusal.code)
    wire_failed
    """
    if name not in _CLASSES:
        raise AtlasError(
            Code.WIRE_FAILED,
            "There is no such transport",
            got=repr(name),
            hint=f"Choose one of {', '.join(TRANSPORT_NAMES)}",
        )
    module = import_module(f"kvatlas.wire.transports.{name}")
    transport: Transport = getattr(module, _CLASSES[name])(**options)
    return transport
