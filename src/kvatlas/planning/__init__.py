"""Plans: where every byte of a model's caches is stored.

`plan()` takes a model, memory, a topology and a policy: `atlas` (the default), `vllm`
(the plan of a release of vLLM, byte for byte) or `uniform` (vLLM without its hybrid manager).
The result is a `Plan`, which is pure data.
"""

from kvatlas.planning.backends import BACKENDS, Backend, backends_of
from kvatlas.planning.exchange_document import CacheDocument, TablesDocument
from kvatlas.planning.exchange_from_plan import to_exchange
from kvatlas.planning.exchange_to_plan import from_exchange
from kvatlas.planning.fitting import Fit, Fitting, fit
from kvatlas.planning.foreign_memory import foreign
from kvatlas.planning.given_sizes import GivenSizes, Topology
from kvatlas.planning.plan_parts import FieldPlacement, Group, Pool, PoolSegment, Region
from kvatlas.planning.planner import Policy, plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.report import Padding, padding

__all__ = [
    "BACKENDS",
    "Backend",
    "CacheDocument",
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
    "padding",
    "plan",
    "to_exchange",
]
