"""Find transports by name: transports of kvatlas and of other installed packages.

A package adds a transport with an entry point in the group `kvatlas.transports`. The entry point
names a subclass of `Transport`:

```toml
[project.entry-points."kvatlas.transports"]
fast = "fast_transport:FastTransport"
```
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from typing import Any

from kvatlas.wire.transports.base import Transport
from kvatlas.wire.transports.errors import coded_limits, failed

_GROUP = "kvatlas.transports"
_CLASSES = {
    "cuda": "CudaTransport",
    "nixl": "NixlTransport",
    "mooncake": "MooncakeTransport",
    "tcp": "TcpTransport",
    "shm": "ShmTransport",
    "memory": "MemoryTransport",
}
TRANSPORT_NAMES = tuple(_CLASSES)
"""The transports of kvatlas in order of preference: the fastest first, then the transports that
reach the most peers."""


def make_transport(name: str, /, **options: Any) -> Transport:
    """Return a new transport by name, with the options of its class.

    `name` is one of `TRANSPORT_NAMES`, or the name of an entry point that an installed package has
    in the group `kvatlas.transports`.

    >>> make_transport("memory").name
    'memory'
    >>> make_transport("pigeon")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: There is no such transport. Got 'pigeon'. \
Choose one of cuda, nixl, mooncake, tcp, shm, memory. [wire_failed]
    """
    if name in _CLASSES:
        made = getattr(import_module(f"kvatlas.wire.transports.{name}"), _CLASSES[name])
    else:
        made = _from_package(name)
    _check_options(name, made, options)
    with coded_limits():
        transport: Transport = made(**options)
    return transport


def _check_options(name: str, made: type[Transport], options: dict[str, Any]) -> None:
    """Raise an error if the class of a transport has no parameter for one of the options."""
    known = signature(made).parameters
    if any(one.kind is Parameter.VAR_KEYWORD for one in known.values()):
        return
    unknown = [option for option in options if option not in known]
    if unknown:
        got, hint = f"{unknown[0]!r} for {name!r}", f"Its options are {', '.join(known) or 'none'}"
        raise failed(got, hint, "The transport has no such option")


def _from_package(name: str) -> type[Transport]:
    """Return the transport class that another package provides under a name."""
    found = _entry_points().get(name)
    if found is None:
        hint = f"Choose one of {', '.join([*_CLASSES, *_entry_points()])}"
        raise failed(repr(name), hint, "There is no such transport")
    made = found.load()
    if not (isinstance(made, type) and issubclass(made, Transport)):
        hint = "Name a subclass of kvatlas.wire.Transport in the package's entry point"
        raise failed(found.value, hint, f"The entry point {name!r} is not a transport")
    return made


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Return other packages' entry points by name, except names of kvatlas's own transports."""
    return {one.name: one for one in entry_points(group=_GROUP) if one.name not in _CLASSES}
