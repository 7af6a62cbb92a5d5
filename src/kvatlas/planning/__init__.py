"""Plans: where every byte of a model's caches is stored.

`plan()` takes a model, memory, a topology and a policy: `atlas` (the default), `vllm`
(the plan of a release of vLLM, byte for byte) or `uniform` (vLLM without its hybrid manager).
The result is a `Plan`, which is pure data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas import imported_on_first_use
from kvatlas.planning.backends import BACKENDS, Backend, backends_of
from kvatlas.planning.plan_parts import FieldPlacement, Group, Pool, PoolSegment, Region
from kvatlas.planning.planner import Policy, plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.report import Padding, padding

if TYPE_CHECKING:
    from kvatlas.planning.exchange_document import CacheDocument, TablesDocument
    from kvatlas.planning.exchange_from_plan import to_exchange
    from kvatlas.planning.exchange_to_plan import from_exchange
    from kvatlas.planning.fitting import Fit, Fitting, fit
    from kvatlas.planning.foreign_memory import foreign
    from kvatlas.planning.given_sizes import GivenSizes, Topology
    from kvatlas.planning.memory_budget import Budget, EngineLoad, gpu_budget
else:
    __getattr__ = imported_on_first_use(
        __name__,
        {
            "exchange_document": ("CacheDocument", "TablesDocument"),
            "exchange_from_plan": ("to_exchange",),
            "exchange_to_plan": ("from_exchange",),
            "fitting": ("Fit", "Fitting", "fit"),
            "foreign_memory": ("foreign",),
            "given_sizes": ("GivenSizes", "Topology"),
            "memory_budget": ("Budget", "EngineLoad", "gpu_budget"),
        },
    )

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
