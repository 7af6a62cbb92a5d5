"""kvatlas knows where every byte of an LLM's KV cache lives, and moves it anywhere.

The most used names are available here; each is imported from its package on first use:

>>> import kvatlas
>>> fits = kvatlas.plan("Qwen3-8B", memory="80GiB")
>>> fits.block_size, fits.num_blocks
(16, 36408)
>>> kvatlas.route(fits, kvatlas.plan("Qwen3-8B", memory="80GiB", tp=2))  # doctest: +ELLIPSIS
<Route of Qwen3-8B, 36 layers: tp 1, pp 1, LBNHC, blocks of 16 -> tp 2, ...>
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvatlas.cache import Cache, allocate, bind
    from kvatlas.errors import AtlasError, Code
    from kvatlas.geometry import DType, Field, Layout, Page, Placement, validate
    from kvatlas.maps import Map, map  # noqa: A004
    from kvatlas.models import Model
    from kvatlas.planning import Plan, fit, plan
    from kvatlas.pool import BlockPool
    from kvatlas.routing import Route, route
    from kvatlas.tier import Tier
    from kvatlas.wire import Node, Session

__version__ = "0.1.0"

_ROOMS = {
    "errors": ("AtlasError", "Code"),
    "geometry": ("DType", "Field", "Layout", "Page", "Placement", "validate"),
    "models": ("Model",),
    "planning": ("Plan", "fit", "plan"),
    "cache": ("Cache", "allocate", "bind"),
    "pool": ("BlockPool",),
    "routing": ("Route", "route"),
    "wire": ("Node", "Session"),
    "tier": ("Tier",),
    "maps": ("Map", "map"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AtlasError",
    "BlockPool",
    "Cache",
    "Code",
    "DType",
    "Field",
    "Layout",
    "Map",
    "Model",
    "Node",
    "Page",
    "Placement",
    "Plan",
    "Route",
    "Session",
    "Tier",
    "__version__",
    "allocate",
    "bind",
    "fit",
    "map",
    "plan",
    "route",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "errors":  # tracebacks print kvatlas.errors.AtlasError
        return import_module("kvatlas.errors")
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'kvatlas' has no attribute {name!r}")
    value = getattr(import_module(f"kvatlas.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
