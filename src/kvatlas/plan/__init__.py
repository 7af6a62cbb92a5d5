"""Plans: from what layers cache to where every byte lies.

`plan()` takes a model, memory and a topology, and a policy: `atlas` (the default),
`vllm` (vLLM 0.32's answer to the byte) or `uniform` (vLLM without its hybrid
manager). The result is a `Plan`: pure data.
"""

from kvatlas.plan.backends import BACKENDS, Backend
from kvatlas.plan.foreign import foreign
from kvatlas.plan.make import plan
from kvatlas.plan.parts import Group, Pool, Region
from kvatlas.plan.plan import Plan
from kvatlas.plan.report import Padding, padding
from kvatlas.plan.request import quantity

__all__ = [
    "BACKENDS",
    "Backend",
    "Group",
    "Padding",
    "Plan",
    "Pool",
    "Region",
    "foreign",
    "padding",
    "plan",
    "quantity",
]
