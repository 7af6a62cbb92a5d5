"""Transports by their names."""

from __future__ import annotations

from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.base import Transport

NAMES = ("nixl", "mooncake", "shm", "memory", "file")
"""In the order of preference: first what reaches furthest and runs fastest."""


def make(name: str, /, **options: Any) -> Transport:
    """A transport by its name, with the options of its class.

    >>> make("memory").name
    'memory'
    >>> try:
    ...     make("pigeon")
    ... except AtlasError as refusal:
    ...     print(refusal.code)
    wire_failed
    """
    if name not in NAMES:
        raise AtlasError(
            Code.WIRE_FAILED,
            "A transport is one that kvatlas knows",
            got=repr(name),
            hint=f"Choose one of {', '.join(NAMES)}",
        )
    return _class(name)(**options)


def _class(name: str) -> type[Transport]:
    if name == "nixl":
        from kvatlas.wire.transports.nixl import NixlTransport

        return NixlTransport
    if name == "mooncake":
        from kvatlas.wire.transports.mooncake import MooncakeTransport

        return MooncakeTransport
    if name == "shm":
        from kvatlas.wire.transports.shm import ShmTransport

        return ShmTransport
    if name == "file":
        from kvatlas.wire.transports.file import FileTransport

        return FileTransport
    from kvatlas.wire.transports.memory import MemoryTransport

    return MemoryTransport
