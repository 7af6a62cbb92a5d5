"""The rules of vLLM 0.33, checked against `tests/planning/vllm_answers.json`."""

import msgspec

from kvatlas.planning.engine_rules.chips import AMPERE, BLACKWELL, CONSUMER_BLACKWELL, HOPPER
from kvatlas.planning.engine_rules.rule_types import (
    BackendChoice,
    EngineRules,
    MissingKernels,
    PrefillCheckpoint,
)
from kvatlas.planning.engine_rules.vllm_0_31 import (
    BACKENDS,
    BLACKWELL_SPARSE,
    DSV41,
    FEW_HEADS,
    FLASHKDA,
    MISSING,
    SPARSE_MLA,
    V41_BACKENDS,
)
from kvatlas.planning.engine_rules.vllm_0_32 import MAMBA2, NVFP4_64

_QWEN = ("Qwen3Next", "Qwen3_5", "Qwen4Exp")
_BOUNDED = msgspec.structs.replace(FLASHKDA, architectures=("KimiK3", "Glm5Next"))
_NO_ROTARY = BackendChoice(
    chips=BLACKWELL,
    instead_of=SPARSE_MLA,
    backend="FLASHINFER_MLA_SPARSE",
    architectures=("Glm5Next",),
)
_V41_BLACKWELL = tuple(
    BackendChoice(chips=chips, instead_of=instead_of, backend=backend, architectures=DSV41)
    for chips, instead_of, backend in (
        (BLACKWELL, ("FLASHMLA_SPARSE_DSV4",), "FLASHMLA_MEGA_ATTN_DSV41"),
        (BLACKWELL, ("DEEPSEEK_SPARSE_SWA",), "DEEPSEEK_SPARSE_SWA_DSV41_SM100"),
        (
            BLACKWELL,
            ("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V32_INDEXER"),
            "DEEPSEEK_V41_INDEXER_SM100",
        ),
        (CONSUMER_BLACKWELL, ("FLASHMLA_SPARSE_DSV4",), "FLASHINFER_MLA_SPARSE_DSV41"),
        (
            CONSUMER_BLACKWELL,
            ("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V32_INDEXER"),
            "DEEPSEEK_V41_INDEXER_SM120",
        ),
    )
)
"""The kernels of SM100 store records of fp8 and nvfp4; other chips have DeepSeek-V4's records."""
_NO_V41 = MissingKernels(chips=AMPERE, backends=("FLASHMLA_SPARSE_DSV41",))
_NO_STEP5 = MissingKernels(chips=(*AMPERE, *CONSUMER_BLACKWELL), backends=("STEP5_DSA",))
FLASHINFER_GDN = (
    PrefillCheckpoint(
        kernel="FlashInfer", states="gated_delta_net", chips=HOPPER, architectures=_QWEN,
        alignment=64,
    ),
    # On Blackwell the kernel needs CUDA 13, with which vLLM's wheels are built.
    PrefillCheckpoint(
        kernel="FlashInfer", states="gated_delta_net", chips=(*BLACKWELL, *CONSUMER_BLACKWELL),
        architectures=_QWEN, key_dim=128, alignment=64,
    ),
)  # fmt: skip
RULES = EngineRules(
    version="0.33",
    checkpoints=(MAMBA2, _BOUNDED, *FLASHINFER_GDN),
    backends=(
        *_V41_BLACKWELL,
        *V41_BACKENDS,
        _NO_ROTARY,
        *BACKENDS,
        msgspec.structs.replace(FEW_HEADS, backend="FLASH_ATTN_MLA_SPARSE_FA4"),
        BLACKWELL_SPARSE,
    ),
    missing=(*MISSING, NVFP4_64, _NO_STEP5, _NO_V41),
)
