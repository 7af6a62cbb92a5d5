"""The rules of vLLM 0.32, checked against `tests/planning/vllm_answers.json`."""

from kvatlas.planning.engine_rules.rule_types import EngineRules, PrefillCheckpoint
from kvatlas.planning.engine_rules.vllm_0_31 import (
    BACKENDS,
    BLACKWELL_SPARSE,
    FEW_HEADS,
    FLASHKDA,
    MISSING,
    RINGS,
    V41_BACKENDS,
)

MAMBA2 = PrefillCheckpoint(kernel="Mamba-2's scan", states="mamba2")
RULES = EngineRules(
    version="0.32",
    checkpoints=(MAMBA2, FLASHKDA),
    backends=(*V41_BACKENDS, *BACKENDS, FEW_HEADS, BLACKWELL_SPARSE),
    missing=(*MISSING, RINGS),
)
