"""kvatlas knows where every byte of an LLM's KV cache lives, and moves it anywhere.

The most used names and all packages are attributes of `kvatlas`, imported on first use:

>>> import kvatlas
>>> fits = kvatlas.plan("Qwen3-8B", memory="80GiB")
>>> fits.block_size, fits.num_blocks
(16, 36408)
>>> kvatlas.route(fits, kvatlas.plan("Qwen3-8B", memory="80GiB", tp=2))  # doctest: +ELLIPSIS
<Route of Qwen3-8B, 36 layers: tp 1, pp 1, LBNHC, blocks of 16 -> tp 2, ...>
>>> kvatlas.models.Model
<class 'kvatlas.models.model.Model'>
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvatlas import cache as cache
    from kvatlas import cli as cli
    from kvatlas import copying as copying
    from kvatlas import engines as engines
    from kvatlas import errors as errors
    from kvatlas import geometry as geometry
    from kvatlas import kernels as kernels
    from kvatlas import maps as maps
    from kvatlas import models as models
    from kvatlas import planning as planning
    from kvatlas import pool as pool
    from kvatlas import routing as routing
    from kvatlas import simulate as simulate
    from kvatlas import specs as specs
    from kvatlas import tier as tier
    from kvatlas import wire as wire
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

_NAMES_BY_PACKAGE: dict[str, tuple[str, ...]] = {
    "errors": ("AtlasError", "Code"),
    "geometry": ("DType", "Field", "Layout", "Page", "Placement", "validate"),
    "specs": (),
    "models": ("Model",),
    "planning": ("Plan", "fit", "plan"),
    "routing": ("Route", "route"),
    "cache": ("Cache", "allocate", "bind"),
    "kernels": (),
    "copying": (),
    "pool": ("BlockPool",),
    "simulate": (),
    "wire": ("Node", "Session"),
    "tier": ("Tier",),
    "maps": ("Map", "map"),
    "engines": (),
    "cli": (),
}

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


def imported_on_first_use(
    package: str, names_by_module: Mapping[str, tuple[str, ...]]
) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports names from modules of `package` when first used.

    Packages use this function for names that plans and routes do not need. Importing a package
    therefore stays fast.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported


_imported = imported_on_first_use("kvatlas", _NAMES_BY_PACKAGE)


def __getattr__(name: str) -> Any:
    if name in _NAMES_BY_PACKAGE:
        return import_module(f"kvatlas.{name}")
    return _imported(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_NAMES_BY_PACKAGE})
