"""Plans: compute where every byte of a model's caches is stored.

`plan()` takes a model, memory, a topology and a policy: `atlas` (the default), `vllm`
(the plan of vLLM 0.32, byte for byte) or `uniform` (vLLM without its hybrid manager).
It returns a `Plan`, which is pure data.
"""

from kvatlas.geometry import size
from kvatlas.planning.backends import ANY_ORDER, BACKENDS, Backend, backends_of
from kvatlas.planning.fitting import Fit, Fitting, Topology, fit, given_topology
from kvatlas.planning.foreign_memory import foreign
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.planner import Policy, default_length, plan
from kvatlas.planning.plans import LARGEST_JSON, Plan, check_plan_version, checked_plan
from kvatlas.planning.report import Padding, capacity_sentence, padding
from kvatlas.planning.request import length, quantity
from kvatlas.planning.sized_layers import FULL_KINDS, SLIDING_KINDS, kind_of
from kvatlas.planning.topology import stage_layers

__all__ = [
    "ANY_ORDER",
    "BACKENDS",
    "DECODING",
    "FULL_KINDS",
    "LARGEST_JSON",
    "SLIDING_KINDS",
    "Backend",
    "Fit",
    "Fitting",
    "Group",
    "Padding",
    "Plan",
    "Policy",
    "Pool",
    "Region",
    "Topology",
    "backends_of",
    "capacity_sentence",
    "check_plan_version",
    "checked_plan",
    "default_length",
    "fit",
    "foreign",
    "given_topology",
    "kind_of",
    "length",
    "padding",
    "plan",
    "quantity",
    "size",
    "stage_layers",
]
