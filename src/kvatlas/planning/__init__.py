"""Plans: where every byte of a model's caches is stored.

`plan()` takes a model, memory, a topology and a policy: `atlas` (the default), `vllm`
(the plan of a release of vLLM, byte for byte) or `uniform` (vLLM without its hybrid manager).
The result is a `Plan`, which is pure data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvatlas.planning.backends import BACKENDS, Backend, backends_of
from kvatlas.planning.fitting import Fit, Fitting, fit
from kvatlas.planning.foreign_memory import foreign
from kvatlas.planning.given_sizes import GivenSizes, Topology
from kvatlas.planning.memory_budget import Budget, EngineLoad, gpu_budget
from kvatlas.planning.plan_parts import FieldPlacement, Group, Pool, PoolSegment, Region
from kvatlas.planning.planner import Policy, plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.report import Padding, padding

if TYPE_CHECKING:
    from kvatlas.planning.exchange_document import CacheDocument, TablesDocument
    from kvatlas.planning.exchange_from_plan import to_exchange
    from kvatlas.planning.exchange_to_plan import from_exchange

__all__ = [
    "BACKENDS",
    "Backend",
    "Budget",
    "CacheDocument",
    "EngineLoad",
    "FieldPlacement",
    "Fit",
    "Fitting",
    "GivenSizes",
    "Group",
    "Padding",
    "Plan",
    "Policy",
    "Pool",
    "PoolSegment",
    "Region",
    "TablesDocument",
    "Topology",
    "backends_of",
    "fit",
    "foreign",
    "from_exchange",
    "gpu_budget",
    "padding",
    "plan",
    "to_exchange",
]

_LATER = {
    "CacheDocument": "exchange_document",
    "TablesDocument": "exchange_document",
    "to_exchange": "exchange_from_plan",
    "from_exchange": "exchange_to_plan",
}
"""Names that are imported on first use, by module: plans and routes do not need them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kvatlas.planning' has no attribute {name!r}")
    value = getattr(import_module(f"kvatlas.planning.{_LATER[name]}"), name)
    globals()[name] = value
    return value
