"""The rules of vLLM 0.32, checked against `tests/planning/vllm_answers.json`."""

from kvatlas.planning.engine_rules.chips import AMPERE, CONSUMER_BLACKWELL, HOPPER
from kvatlas.planning.engine_rules.rule_types import (
    EngineRules,
    MissingKernels,
    PrefillCheckpoint,
)
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
NVFP4_64 = MissingKernels(  # FlashInfer's prefill without TensorRT-LLM's kernels misreads them
    chips=(*AMPERE, *HOPPER, *CONSUMER_BLACKWELL),
    backends=("FLASHINFER",),
    head_dims=(64,),
    caches=("nvfp4",),
)
RULES = EngineRules(
    version="0.32",
    checkpoints=(MAMBA2, FLASHKDA),
    backends=(*V41_BACKENDS, *BACKENDS, FEW_HEADS, BLACKWELL_SPARSE),
    missing=(*MISSING, NVFP4_64, RINGS),
)
